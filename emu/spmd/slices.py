"""Cuts that are not plain: each rank of an axis holds some ranges of a dimension, which others may hold, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index as whole_number
from typing import NamedTuple

from emu.spmd.errors import EmuError

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Slices:
    """Index i of the axis holds the ranges `ranges[i]` of `dim`, end to end.

    So a fused weight keeps every part cut for itself: `Slices(0, (((0, 6), (12, 15)), ((6, 12), (15, 18))))` is [Q_0|K_0]
    and [Q_1|K_1] of [Q|K]. Ranges may be uneven, empty, and overlap between indices: these elements are replicated.

    Args:
        dim: of the whole.
        ranges: for every index of the axis, (start, stop) pairs in the order in which they lie in the piece.

    Raises:
        EmuError: a range that is none.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        try:
            whole = tuple(
                tuple((whole_number(start), whole_number(stop)) for start, stop in some) for some in self.ranges
            )
        except (TypeError, ValueError):
            raise EmuError(
                f"Slices({self.dim}, {self.ranges!r:.80}) has no ranges of every index",
                "give every index of the axis a tuple of (start, stop) pairs: Slices(0, (((0, 2),), ((2, 4),)))",
            ) from None
        for index, some in enumerate(whole):
            for start, stop in some:
                if not 0 <= start <= stop:
                    raise EmuError(
                        f"index {index} of Slices({self.dim}, ...) holds {start} to {stop}, which is no range",
                        "give (start, stop) with 0 <= start <= stop",
                    )
        object.__setattr__(self, "ranges", whole)

    def length(self, index: int) -> int:
        """How long the piece of an index is along the dimension."""
        return sum(stop - start for start, stop in self.ranges[index])

    def cells(self) -> list[Cell]:
        """The dimension, from its start to the last range's end, cut wherever a range begins or ends."""
        points = sorted({0, *(point for some in self.ranges for pair in some for point in pair)})
        found = [Cell(start, stop, []) for start, stop in pairwise(points)]
        where = {point: number for number, point in enumerate(points)}
        for index, some in enumerate(self.ranges):
            at = 0
            for start, stop in some:
                for cell in found[where[start] : where[stop]]:
                    cell.holders.append((index, at + cell.start - start))
                at += stop - start
        return found

    def check(self, n: int, length: int | None = None, name: str = "the tensor", axis: str = "an axis") -> None:
        """Whether these are the pieces of a dimension over n ranks.

        Args:
            length: of the dimension; None where only the pieces are known.

        Raises:
            EmuError: another number of ranks, a range outside of the dimension, or a part that nobody holds.
        """
        where = f"dimension {self.dim} of {name} along {axis!r}"
        if len(self.ranges) != n:
            raise EmuError(
                f"{where}: the layout has ranges for {len(self.ranges)} ranks, and the axis has {n}",
                "give every index of the axis its ranges, () for none",
            )
        cells = self.cells()
        end = cells[-1].stop if cells else 0
        if length is not None and end > length:
            index, outside = next((i, r) for i, some in enumerate(self.ranges) for r in some if r[1] > length)
            raise EmuError(
                f"{where}: index {index} holds {outside[0]} to {outside[1]}, but it has {length} entries",
                f"let all ranges lie in 0 to {length}",
            )
        gaps = merged((cell.start, cell.stop) for cell in cells if not cell.holders)
        if length is not None and end < length:
            gaps = merged([*gaps, (end, length)])
        if gaps:
            raise EmuError(
                f"{where}: no index holds {', '.join(f'{a} to {b}' for a, b in gaps)}",
                "let the ranges of all indices together cover it",
            )


class Cell(NamedTuple):
    """A part of a dimension that any index holds all or nothing of, and those that do: (index, where in its piece)."""

    start: int
    stop: int
    holders: list[tuple[int, int]]


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same entries in the same order, as few ranges; empty ones are left out."""
    out: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def chosen(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Entries [start, stop) of what the ranges hold end to end, as ranges."""
    out, at = [], 0
    for a, b in ranges:
        low, high = max(start - at, 0), min(stop - at, b - a)
        if low < high:
            out.append((a + low, a + high))
        at += b - a
    return out
