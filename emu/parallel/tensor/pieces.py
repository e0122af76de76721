"""State of a model that is cut inside its layers, as pieces of the whole tensors: so it loads under any other cut.

A rank's parameter is a part of the whole, and what it holds of that, say under ZeRO, is a run of the flattened part. Rows
of the whole that it holds stay runs of the flattened whole, all of them together if they are neighbours; of columns there
is a run for every row. Neighbouring runs are joined, so there are no more pieces than gaps ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from emu.parallel.state.errors import StateError
from emu.parallel.state.piece import Piece
from emu.spmd import Layout, Mesh, Rank, Shard, Slices

Numbers = npt.NDArray[np.int64]


class Cut(Protocol):
    """What is asked of a model's cut, as Sharding is: layouts are in `held[name].layout`."""

    @property
    def rank(self) -> Rank: ...

    @property
    def held(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


class Runs(NamedTuple):
    """Runs of a flattened whole, which end to end are a flattened part of it: where each begins, and its length."""

    starts: Numbers
    lengths: Numbers


def pieces_of_wholes(pieces: Sequence[Piece], cut: Cut) -> list[Piece]:
    """Pieces of what a rank holds as pieces of the wholes; parameters that the cut does not name are whole already.

    Args:
        pieces: of parameters, or of an optimizer's states of one kind.

    Raises:
        StateError: a state of another shape than its parameter, which is cut.
    """
    out: list[Piece] = []
    for piece in pieces:
        if (held := cut.held.get(piece.name)) is None:
            out.append(piece)
        else:
            out += whole_pieces(piece, cut.shapes[piece.name], held.layout, cut.rank.mesh, cut.rank.id)
    return out


def whole_pieces(piece: Piece, whole_shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int | Rank) -> list[Piece]:
    """A run of a rank's flattened part of a tensor as runs of the flattened whole. Their tensors are views, to be loaded into.

    A state that is one number for the parameter, of shape (), stays as it is. Where a rank holds nothing, one empty piece
    says that the tensor is there.

    Args:
        piece: its shape is that of the part.
        whole_shape, layout: of the whole, and what of it `rank` holds.

    Raises:
        StateError: a piece of another shape than the part that the layout says.
    """
    shape = tuple(int(n) for n in whole_shape)
    if not piece.shape or not _cuts(layout, mesh):
        return [piece]
    held = layout.held(shape, mesh, int(rank), piece.name)
    local = tuple(sum(stop - start for start, stop in ranges) for ranges in held)
    if (given := tuple(piece.shape)) != local:
        raise StateError(
            f"{piece.name!r}: rank {int(rank)} holds {list(local)} of the whole {list(shape)}, and has a state of shape "
            f"{list(given)} for it, which is not cut alike",
            "use an optimizer that works element by element (SGD, AdamW, ...) with tensor parallelism",
        )
    starts, lengths = _clipped(_runs(shape, held), piece.start, piece.start + len(piece.tensor))
    if not len(starts):
        return [Piece(piece.name, shape, 0, piece.tensor)]
    return [
        Piece(piece.name, shape, start, view)
        for start, view in zip(starts.tolist(), piece.tensor.split(lengths.tolist()))
    ]


def _cuts(layout: Layout, mesh: Mesh) -> bool:
    """Whether ranks may hold other than the whole: the same answer on all of them, so that all raise the same errors."""
    sizes = {**mesh.sizes(), **mesh.sizes(folded=True)}
    for axis, placement in layout.placements.items():
        several = sizes.get(axis, 2) > 1  # of an axis that there is not, `held` will tell
        if isinstance(placement, Shard) and several:
            return True
        if isinstance(placement, Slices) and (several or any(len(some) > 1 for some in placement.ranges)):
            return True
    return False


def _runs(shape: tuple[int, ...], held: Sequence[Sequence[tuple[int, int]]]) -> Runs:
    """All of a part that consists of some ranges of every dimension."""
    cut = [dim for dim, ranges in enumerate(held) if tuple(ranges) != ((0, shape[dim]),)]
    last = max(cut, default=0)  # after it the whole is kept, in one run
    rows = np.zeros(1, np.int64)  # where each kept row of the dimensions before begins
    for dim in range(last):
        entries = np.concatenate([np.arange(*r, dtype=np.int64) for r in ((0, 0), *held[dim])])
        rows = (rows[:, None] + entries * prod(shape[dim + 1 :])).reshape(-1)
    block = prod(shape[last + 1 :])
    ranges = np.array(held[last], np.int64).reshape(-1, 2) * block
    starts = (rows[:, None] + ranges[:, 0]).reshape(-1)
    return _joined(Runs(starts, np.tile(ranges[:, 1] - ranges[:, 0], len(rows))))


def _joined(runs: Runs) -> Runs:
    """The same, where no run begins at the end of the one before."""
    starts, lengths = runs
    keep = lengths > 0
    starts, lengths = starts[keep], lengths[keep]
    if not len(starts):
        return Runs(starts, lengths)
    first = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))
    return Runs(starts[first], np.add.reduceat(lengths, first))


def _clipped(runs: Runs, start: int, stop: int) -> Runs:
    """Elements [start, stop) of the part."""
    ends = np.cumsum(runs.lengths)
    begins = ends - runs.lengths
    some = slice(np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop, "left"))
    low, high = np.maximum(begins[some], start), np.minimum(ends[some], stop)
    return _joined(Runs(runs.starts[some] + low - begins[some], high - low))
