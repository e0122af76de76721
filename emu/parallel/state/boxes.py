"""Boxes of a tensor: torch.distributed.checkpoint cuts tensors along their dimensions, emu along their flattened elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor: where it begins along every dimension, and how far it reaches."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where in a tensor that holds the outer box this one lies."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, outer.offsets, self.sizes))

    def common(self, other: Box) -> Box | None:
        """What two boxes share."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = [min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes)]
        sizes = tuple(b - a for a, b in zip(starts, stops))
        return Box(starts, sizes) if all(n > 0 for n in sizes) else None


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The fewest boxes whose elements, one box after the other, are [start, stop) of the flattened tensor.

    For two dimensions: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one row
        return [_at(last, box) for box in boxes(shape[1:], start - last * row, stop - last * row)]
    found = [_at(first - 1, box) for box in boxes(shape[1:], start % row, row)] if start % row else []
    if first < last:
        found.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + [_at(last, box) for box in boxes(shape[1:], 0, stop % row)]


def _at(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.sizes))


def stacked(found: Sequence[Box]) -> list[tuple[Box, int]]:
    """Boxes that lie on each other as larger ones, and of how many each is made.

    What they hold, one after the other, stays what the larger ones hold: a column of a matrix, a box a row, is one box.
    """
    out = [(box, 1) for box in found]
    for dim in reversed(range(len(found[0].offsets) if found else 0)):
        below, out = out, []
        for box, count in below:
            if out and (both := _stacked(out[-1][0], box, dim)) is not None:
                out[-1] = both, out[-1][1] + count
            else:
                out.append((box, count))
    return out


def _stacked(first: Box, second: Box, dim: int) -> Box | None:
    """Two boxes as one, if the second goes on along the dimension where the first ends, and dimensions before have size 1."""
    beside = [*range(dim), *range(dim + 1, len(first.sizes))]
    if (
        first.offsets[dim] + first.sizes[dim] != second.offsets[dim]
        or any(n != 1 for n in first.sizes[:dim])
        or any(first.offsets[d] != second.offsets[d] or first.sizes[d] != second.sizes[d] for d in beside)
    ):
        return None
    sizes = list(first.sizes)
    sizes[dim] += second.sizes[dim]
    return Box(first.offsets, tuple(sizes))
