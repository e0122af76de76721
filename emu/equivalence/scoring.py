"""The mutation score: how many deliberately broken runs a check notices, of those that change more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from emu.equivalence.advice import say_survivors
from emu.equivalence.arithmetic import GRIDS, Arithmetic, Outcome
from emu.equivalence.compare import has_gradients
from emu.equivalence.judge import judge
from emu.equivalence.mutants import Broken, Mutant
from emu.equivalence.verdict import Verdict
from emu.equivalence.workers import each, worth
from emu.spmd import EmuError, Mesh
from emu.virtual.launch import Program
from emu.virtual.rendezvous import Rendezvous
from emu.virtual.scheduler import Scheduler

ENDLESS = 4  # times as many communications as the program's: a mutant that has more will not end
SAMPLE = 8  # mutants that "sampled" runs
KILLED, EQUIVALENT, SURVIVOR = "killed", "equivalent", "survivor"


def wanted(mutants: str | int) -> int | None:
    """How many mutants to run at most; None means all."""
    if isinstance(mutants, str) and mutants.isdecimal():
        mutants = int(mutants)
    if isinstance(mutants, int) and not isinstance(mutants, bool) and mutants >= 0:
        return mutants
    counts = {"all": None, "none": 0, "sampled": SAMPLE}
    if isinstance(mutants, str) and mutants in counts:
        return counts[mutants]
    raise EmuError(f"mutants={mutants!r}", 'use "none", "sampled", "all", or a number')


class _OnlyRounding:
    """Whether all that a mutant changes is rounding: in the exact tier's arithmetic no rank's state has another bit.

    Of a cross-entropy cut along the vocabulary, the maximum that all ranks agree on is such a communication: it keeps
    numbers small, and any other would do.
    """

    def __init__(self, program: Program, mesh: Mesh, args: Sequence[Any]) -> None:
        self._run = lambda place: Arithmetic("exact", *GRIDS[0]).run(program, mesh, args, place).states
        self._right: list[bytes] | None = None

    def is_all(self, broken: Callable[[Scheduler], Rendezvous]) -> bool:
        try:
            if self._right is None:
                self._right = self._run(Rendezvous)
            return self._run(broken) == self._right
        except Exception:  # a program that cannot run in that tier leaves the question open
            return False


def score(
    verdict: Verdict,
    chosen: Sequence[Mutant],
    program: Program,
    mesh: Mesh,
    args: Sequence[Any],
    base: Outcome,
    right: Mapping[str, Tensor],
    arithmetic: Arithmetic,
    progress: Callable[[str], None],
) -> Verdict:
    """Runs the mutants, on several processes where they take long. Whether one is equivalent is decided from states
    alone, before the check sees it.

    Raises:
        WorkerDied: a mutant ended the process that ran it.
    """
    rounding = _OnlyRounding(program, mesh, args)
    most = ENDLESS * base.meeting_place.count + 100  # a mutant that communicates far more often than the program hangs

    def fate(mutant: Mutant) -> str:
        def broken(scheduler: Scheduler) -> Rendezvous:
            return Broken(scheduler, mutant, most)

        try:
            outcome = arithmetic.run(program, mesh, args, broken)
        except Exception:  # a mutant that makes the program fail is noticed
            return KILLED
        if outcome.states == base.states:
            return EQUIVALENT
        if not judge(outcome.run, mesh, right, arithmetic).verdict.equivalent:
            return KILLED
        return EQUIVALENT if arithmetic.tier != "exact" and rounding.is_all(broken) else SURVIVOR

    fates = each(
        fate,
        chosen,
        worth(len(chosen), base.seconds),
        fit=lambda: arithmetic.run(program, mesh, args, Rendezvous).states == base.states,
        patience_s=30 + 20 * base.seconds,
        seconds=base.seconds,
        starting=lambda mutant: progress(f"mutant: {mutant}"),
    )
    survivors = [str(mutant) for mutant, its in zip(chosen, fates) if its == SURVIVOR]
    stepped = any(keeper.optimizers for keeper in base.keepers)
    why = say_survivors(len(survivors), stepped, has_gradients(base.run.results[0])) if survivors else ""
    return replace(
        verdict,
        mutants=len(chosen),
        mutants_killed=fates.count(KILLED),
        mutants_equivalent=fates.count(EQUIVALENT),
        survivors=survivors,
        why=why,
    )
