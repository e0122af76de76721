"""Which rank attends to what in which step, before anything is drawn: as a cut says, and as a run did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emu.parallel.context.cut import Block, Cut
from emu.trace.events import Collective, Kernel, Wait

if TYPE_CHECKING:
    from emu.trace.trace import Trace

AXIS = "cp"
KERNELS = ("attention", "ring_attention")
TRAVELS = "keys and values"  # what the shifts of a ring are named
NAMES = {
    "ring": "contiguous",
    "zigzag": "zigzag",
    "striped": "striped",
    "all-gather": "all-gather",
    "ulysses": "Ulysses",
    "usp": "Ulysses and ring",
}


class Share(NamedTuple):
    """What one place of the ring attends to in one step.

    Fields:
        holder: the place whose keys and values lie here; None: all keys and values do.
        block: which of these its queries see.
    """

    holder: int | None
    block: Block

    @property
    def pairs(self) -> int:
        """Of a query and a key: in one row, or with documents in all rows together."""
        return sum(piece.pairs for piece in self.block.pieces)


def ring_of(cut: Cut) -> list[list[Share]]:
    """shares[place][step], a place being a rank or, where neighbours exchange heads, all of these together."""
    if cut.kind == "all-gather":
        return [[Share(None, cut.block_of_all(i))] for i in range(cut.ranks)]
    n = cut.ring.ranks
    return [[Share((i - step) % n, cut.ring.block(i, (i - step) % n)) for step in range(n)] for i in range(n)]


def planned(cut: Cut) -> np.ndarray:
    """Attended pairs of every rank in every step, [ranks, steps]; of ranks that exchange heads, for their share of these."""
    pairs = np.array([[share.pairs for share in row] for row in ring_of(cut)], dtype=float)
    return np.repeat(pairs, cut.ulysses, axis=0) / cut.ulysses


def context_ranks(trace: Trace) -> list[int]:
    """The ranks of one group along cp, in its order: those at 0 along all other axes of the mesh."""
    stride, size = 1, 1
    for axis, n in reversed(list(trace.axes.items())):
        if axis == AXIS:
            size = n
            break
        stride *= n
    return [rank for rank in range(0, stride * size, stride) if rank in trace.events]


def measured(what: Any) -> np.ndarray:
    """FLOPs of the attention kernels of every rank of one cp group in every step of the ring, [ranks, steps], forward alone.

    Args:
        what: a run or a window of one, its timeline, or its trace. Layers, microbatches and steps of training are summed.

    Raises:
        ValueError: no attention across ranks in it.
    """
    trace = getattr(what, "trace", what)
    rows = [_of_rank(trace.events[rank]) for rank in context_ranks(trace)]
    steps = max((step + 1 for row in rows for step in row), default=0)
    if not steps:
        raise ValueError(
            "no kernel of attention across ranks is recorded here: it needs a run, or a window of one, whose mesh has cp, "
            "and which computed a batch with DataParallel(model, rank, 'dp', 'cp') or Pipeline"
        )
    return np.array([[row.get(step, 0) for step in range(steps)] for row in rows], dtype=float)


def _of_rank(events: Sequence[Any]) -> dict[int, int]:
    """Step -> FLOPs.

    A call's step s < steps - 1 comes after s arrivals and with one more under way; the last one after all, with none.
    """
    under_way: set[int] = set()
    sent, arrived, turns = 0, 0, 1
    found: dict[int, int] = {}
    for event in events:
        if type(event) is Collective and event.kind == "ring_shift" and event.name == TRAVELS:
            under_way.add(event.work)
            sent += 1
            turns = len(event.members) - 1
        elif type(event) is Wait and event.work in under_way:
            under_way.discard(event.work)
            arrived += 1
        elif type(event) is Kernel and event.name in KERNELS and event.phase == "forward":
            # Keys travel by one shift and values by another.
            step = arrived // 2 - (sent // 2 - 1) // turns * turns if sent else 0
            found[step] = found.get(step, 0) + event.flops
    return found


def check_cuts(cuts: Sequence[Any]) -> None:
    """Refuses what is no cut."""
    for cut in cuts or [None]:
        if not isinstance(cut, Cut):
            raise ValueError(f"{type(cut).__name__} is no cut: give one, as of make_cut('zigzag', 64, 4)")


def percent(work: np.ndarray) -> np.ndarray:
    """Of the sum."""
    return 100 * work / max(float(work.sum()), 1.0)


def name_of(cut: Cut) -> str:
    return NAMES[cut.kind] + (" by documents" if cut.documents is not None else "")


def imbalance(work: np.ndarray) -> float:
    """The busiest rank's work over the mean."""
    loads = work.sum(1)
    return float(loads.max()) / float(loads.mean()) if loads.any() else 1.0
