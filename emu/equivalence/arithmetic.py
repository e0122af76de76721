"""How a tier computes, and how it compares: a run in its arithmetic, and everything it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from emu.equivalence.compare import TOLERANCES, Difference, whole_results
from emu.equivalence.exact import Certificate, ExactMode, round_to_grid
from emu.equivalence.judge import is_input
from emu.equivalence.state import Keeper, digest_of, kept
from emu.equivalence.widening import Float64Mode
from emu.spmd import Mesh, Rank
from emu.virtual.launch import Program, VirtualRun, run_virtual
from emu.virtual.rendezvous import Rendezvous
from emu.virtual.scheduler import Scheduler

GRIDS = ((16, 28), (12, 26))  # (values, gradients): the finer first; the coarser leaves room for longer sums


class Outcome:
    """A run, the bits that every rank left behind, where its ranks met, what they made on the way, and how long it took."""

    def __init__(
        self, run: VirtualRun, states: list[bytes], meeting_place: Any, keepers: list[Keeper], seconds: float
    ) -> None:
        self.run, self.states, self.meeting_place, self.keepers = run, states, meeting_place, keepers
        self.seconds = seconds


class Arithmetic:
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
        watching: Callable[[Rank], AbstractContextManager[None]] = nullcontext,
    ) -> Outcome:
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
                    with Float64Mode(), watching(rank):
                        yield
                else:
                    yield
                states[rank.id] = Keeper.digest(keeper)

        before, start = torch.get_default_dtype(), time.perf_counter()
        torch.set_default_dtype(self.dtype)
        try:
            run = run_virtual(program, mesh, track=False, args=args, within=within, rendezvous=meet)
        finally:
            torch.set_default_dtype(before)
        ranks = range(mesh.size)
        bits = [states[r] + digest_of(run.results[r]) for r in ranks]
        return Outcome(run, bits, places[0], [keepers[r] for r in ranks], time.perf_counter() - start)

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
