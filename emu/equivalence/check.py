"""Checking a program against a reference: both run again, in the tier's arithmetic, and everything is compared.

The reference is a program, too, run on one device: nothing of what distributes the work is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from emu.equivalence.advice import (
    common_factor,
    may_be_rounding,
    say_factor,
    say_names,
    say_rounding,
    say_survivors,
    say_where,
)
from emu.equivalence.compare import TOLERANCES, Difference, has_gradients, whole_results
from emu.equivalence.exact import Certificate, ExactMode, round_to_grid
from emu.equivalence.judge import Judged, is_input, judge
from emu.equivalence.mutants import Broken, Mutant, Observed, mutants_of, sample
from emu.equivalence.state import Keeper, digest_of, keeping, kept
from emu.equivalence.verdict import Verdict
from emu.equivalence.widening import Float64Mode
from emu.spmd import BufferInFlight, CrossRankAccess, EmuError, FreedMemory, Mesh, Rank
from emu.virtual.launch import Program, VirtualRun, run_virtual
from emu.virtual.rendezvous import Rendezvous
from emu.virtual.scheduler import Scheduler

TIERS = ("exact", "float64", "float32")
GRIDS = ((16, 28), (12, 26))  # (values, gradients): the finer first; the coarser leaves room for longer sums
ENDLESS = 4  # times as many communications as the program's: a mutant that has more will not end
SAMPLE = 8  # mutants that "sampled" runs


def check(
    program: Program,
    mesh: Mesh,
    reference: Program,
    *,
    args: Sequence[Any] = (),
    tier: str = "exact",
    mutants: str | int = "sampled",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Whether `program` on `mesh` computes what `reference` computes on one device.

    Args:
        program: `program(rank, *args)`; what it returns is compared: tensors, numbers, `emu.grads(model)`, or dicts and
            lists of them. A tensor without a layout is a replica: every rank must return the same.
        reference: `reference(rank, *args)` on a mesh of one rank with the same axes; or `reference(*args)` without rank.
        tier: "exact", "float64" or "float32".
        mutants: "none", "sampled", "all", or how many.

    Raises:
        EmuError: an unknown tier, a reference that is none, or results that cannot be compared; whatever either raises.
        BufferInFlight, CrossRankAccess, FreedMemory: the program has a race, its ranks share memory, or it uses memory
            that it freed, whatever its results are.
    """
    if tier not in TIERS:
        raise EmuError(f"there is no tier {tier!r}", f"use one of {', '.join(TIERS)}")
    if not callable(reference):
        raise EmuError(
            f"the reference is a {type(reference).__name__}, not a program",
            "pass a function reference(rank) that computes the same on one device",
        )
    wanted = _wanted(mutants)
    alone = Mesh(**dict.fromkeys(mesh.axes, 1))
    single = _with_rank(reference, len(args))
    with keeping():
        for values, gradients in GRIDS if tier == "exact" else ((0, 0),):
            arithmetic = _Arithmetic(tier, values, gradients)
            progress("reference")
            right, certificate = arithmetic.certified(single, alone, args)
            if certificate is None or certificate.holds:
                break
        else:
            raise EmuError(
                f"sums are too long for the exact tier: they need {GRIDS[-1]}-grids and {certificate.limit} bits, "
                f"{-certificate.margin:.1f} too many",
                'use a smaller batch or model, or tier="float64"',
            )
        progress("program")
        _refuse_races(program, mesh, args)  # first: what is not watched may take the process down
        base = arithmetic.run(program, mesh, args, Observed)
        judged = judge(base.run, mesh, right, arithmetic)
        verdict = replace(
            judged.verdict, certificate_bits=max(certificate.bits.values(), default=0.0) if certificate else None
        )
        if verdict.equivalent:
            every = mutants_of(list(base.meeting_place.sites))
            chosen = every if wanted is None else sample(every, wanted)
            verdict = _score(verdict, chosen, program, mesh, args, base, right, arithmetic, progress)
        else:
            drops_out = next((keeper.random for keeper in base.keepers if keeper.random), None)
            hint = _advice(
                judged,
                arithmetic.comparable(right),
                mesh,
                drops_out,
                lambda: _in_float64(single, alone, program, mesh, args) if tier == "exact" else "",
            )
            verdict = replace(verdict, why=f"{verdict.why}\n  hint: {hint}" if hint else verdict.why)
    return verdict


class _Outcome:
    """A run, the bits that every rank left behind, where its ranks met, and what they made on the way."""

    def __init__(self, run: VirtualRun, states: list[bytes], meeting_place: Any, keepers: list[Keeper]) -> None:
        self.run, self.states, self.meeting_place, self.keepers = run, states, meeting_place, keepers


class _Arithmetic:
    """How a tier computes, and how it compares."""

    def __init__(self, tier: str, values: int, gradients: int) -> None:
        self.tier, self.values, self.gradients = tier, values, gradients
        self.dtype = torch.float32 if tier == "float32" else torch.float64

    def certified(
        self, single: Program, alone: Mesh, args: Sequence[Any]
    ) -> tuple[dict[str, Tensor], Certificate | None]:
        """The reference's results, and in the exact tier the proof that its sums were exact."""
        modes: list[ExactMode] = []
        outcome = self.run(single, alone, args, Rendezvous, modes)
        return whole_results(outcome.run.results, alone), modes[0].certificate() if modes else None

    def run(
        self,
        program: Program,
        mesh: Mesh,
        args: Sequence[Any],
        meeting_place: Callable[[Scheduler], Rendezvous],
        certifying: list[ExactMode] | None = None,
    ) -> _Outcome:
        places: list[Rendezvous] = []
        keepers: dict[int, Keeper] = {}
        states: dict[int, bytes] = {}

        def meet(scheduler: Scheduler) -> Rendezvous:
            places.append(meeting_place(scheduler))
            return places[0]

        @contextmanager
        def within(rank: Rank) -> Iterator[None]:
            with kept() as keeper:
                keepers[rank.id] = keeper
                if self.tier == "exact":
                    mode = ExactMode(self.values, self.gradients, certify=certifying is not None)
                    if certifying is not None:
                        certifying.append(mode)
                    device: Any = rank._device  # a virtual one
                    device.inside_kernel = mode.kernel
                    with mode:
                        yield
                elif self.tier == "float64":
                    with Float64Mode():
                        yield
                else:
                    yield
                states[rank.id] = Keeper.digest(keeper)

        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            run = run_virtual(program, mesh, track=False, args=args, within=within, rendezvous=meet)
        finally:
            torch.set_default_dtype(before)
        ranks = range(mesh.size)
        bits = [states[r] + digest_of(run.results[r]) for r in ranks]
        return _Outcome(run, bits, places[0], [keepers[r] for r in ranks])

    def agrees(self, difference: Difference) -> bool:
        if difference.equal:
            return True
        return self.tier != "exact" and difference.error <= TOLERANCES[self.tier]

    def comparable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses and input gradients mix sums of grid numbers, and so are compared on the grid (exact tier)."""
        if self.tier != "exact":
            return dict(tensors)
        return {
            name: round_to_grid(t, self.gradients) if t.is_floating_point() and (not t.dim() or is_input(name)) else t
            for name, t in tensors.items()
        }


def _refuse_races(program: Program, mesh: Mesh, args: Sequence[Any]) -> None:
    """Runs the program once more, tracked: in a tier's arithmetic nobody watches who uses which buffer when.

    Raises:
        BufferInFlight, CrossRankAccess, FreedMemory: what the tracker finds.
    """
    before = torch.get_default_dtype()
    # A program may run in one dtype only (a number from outside that is float64); how it fails is for its tier to say.
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            run_virtual(program, mesh, args=args)
        except (BufferInFlight, CrossRankAccess, FreedMemory):
            raise
        except Exception:
            continue
        finally:
            torch.set_default_dtype(before)
        return


def _with_rank(reference: Program, n_args: int) -> Program:
    """A reference may leave out the rank: it does if with one, an argument is too many or lands in a default."""
    try:
        signature = inspect.signature(reference)
    except ValueError:  # a builtin, which says nothing about itself
        return reference
    try:
        filled = signature.bind(None, *[None] * n_args).arguments
        spare = any(signature.parameters[name].default is not inspect.Parameter.empty for name in filled)
    except TypeError:
        spare = True
    if spare and next(iter(signature.parameters), "") != "rank":
        return lambda rank, *args: reference(*args)
    return reference


def _advice(
    judged: Judged,
    right: Mapping[str, Tensor],
    mesh: Mesh,
    drops_out: str | None,
    rounding: Callable[[], str],
) -> str:
    """What to do about results that differ; the first of the causes below that fits."""
    wrong, ours = judged.wrong, judged.ours
    if not wrong:
        return ""
    if drops_out is not None:
        return (
            f"{drops_out} draws random numbers, and a whole batch draws others than its pieces do: "
            "call model.eval() in both, or make the model without dropout"
        )
    if names := say_names(wrong, ours, right):
        return names
    if any(d.why for d in wrong):  # not finite
        return "find the first operation that overflows, or use a batch and weights that do not"
    if factor := common_factor(wrong, ours, right):
        return say_factor(factor, mesh)
    return (rounding() if may_be_rounding(wrong) else "") or say_where(wrong, right)


def _in_float64(single: Program, alone: Mesh, program: Program, mesh: Mesh, args: Sequence[Any]) -> str:
    """Whether a small difference in the exact tier is rounding: whether float64 sees it, too."""
    arithmetic = _Arithmetic("float64", 0, 0)
    try:
        right, _ = arithmetic.certified(single, alone, args)
        judged = judge(arithmetic.run(program, mesh, args, Rendezvous).run, mesh, right, arithmetic)
    except Exception:  # a program that cannot run in that tier leaves the question open; its own result stands
        return ""
    return say_rounding(judged.verdict.max_rel_err if judged.verdict.equivalent else None)


def _wanted(mutants: str | int) -> int | None:
    """How many mutants to run at most; None means all."""
    if isinstance(mutants, str) and mutants.isdecimal():
        mutants = int(mutants)
    if isinstance(mutants, int) and not isinstance(mutants, bool) and mutants >= 0:
        return mutants
    counts = {"all": None, "none": 0, "sampled": SAMPLE}
    if isinstance(mutants, str) and mutants in counts:
        return counts[mutants]
    raise EmuError(f"mutants={mutants!r}", 'use "none", "sampled", "all", or a number')


def _score(
    verdict: Verdict,
    chosen: Sequence[Mutant],
    program: Program,
    mesh: Mesh,
    args: Sequence[Any],
    base: _Outcome,
    right: Mapping[str, Tensor],
    arithmetic: _Arithmetic,
    progress: Callable[[str], None],
) -> Verdict:
    """Runs the mutants. Whether one is equivalent is decided from states alone, before the check sees it."""
    killed = equivalent = 0
    survivors = []
    most = ENDLESS * base.meeting_place.count + 100  # a mutant that communicates far more often than the program hangs
    for mutant in chosen:
        progress(f"mutant: {mutant}")

        def broken(scheduler: Scheduler, mutant: Mutant = mutant) -> Rendezvous:
            return Broken(scheduler, mutant, most)

        try:
            outcome = arithmetic.run(program, mesh, args, broken)
        except Exception:  # a mutant that makes the program fail is noticed
            killed += 1
            continue
        if outcome.states == base.states:
            equivalent += 1
        elif judge(outcome.run, mesh, right, arithmetic).verdict.equivalent:
            survivors.append(str(mutant))
        else:
            killed += 1
    stepped = any(keeper.optimizers for keeper in base.keepers)
    why = say_survivors(len(survivors), stepped, has_gradients(base.run.results[0])) if survivors else ""
    return replace(
        verdict,
        mutants=len(chosen),
        mutants_killed=killed,
        mutants_equivalent=equivalent,
        survivors=survivors,
        why=why,
    )
