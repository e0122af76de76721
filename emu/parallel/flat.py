"""Parameters end to end in one vector, cut over ranks: the layout that buckets and shards share. Pure arithmetic.

One vector makes one collective of what would be many, and cuts evenly what no single parameter could: parameters of any
size, more ranks than elements. Its cut need not respect parameters: a shard may hold the end of one and the start of
the next. The last ranks' shards may be part or all padding, on several ranks if the vector is short (deepspeed's
PR 6974 is about code that took it to sit on the last rank alone); padding is never sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Span(NamedTuple):
    """A run of elements of one parameter within a shard.

    Fields:
        index: which parameter of the vector.
        start: first element, within the flattened parameter.
        at: where it lies in the shard.
        length: elements.
    """

    index: int
    start: int
    at: int
    length: int


@dataclass(frozen=True)
class Flat:
    """Some parameters in one vector, cut over `parts` ranks.

    Args:
        names, shapes: of the parameters, in the order in which they lie.
        parts: ranks that share it.
        align: the padded length is a multiple of this, and of parts.
        owner: the one rank that holds all of it, where shards are not cut but owned.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: int = 1
    align: int = 1
    owner: int | None = None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins; the last entry is the length of the vector."""
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + math.prod(shape))
        return tuple(ends)

    @property
    def numel(self) -> int:
        """Elements of the vector, without padding."""
        return self.offsets[-1]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """How many real elements each rank holds."""
        if self.owner is not None:
            return tuple(self.numel if part == self.owner else 0 for part in range(self.parts))
        slots = self.slots(0)
        return tuple(min(max(self.numel - part * slots, 0), slots) for part in range(self.parts))

    def slots(self, part: int) -> int:
        """How many elements a rank's shard has room for; what is not real is padding."""
        if self.owner is not None:
            return self.cuts[part]
        step = math.lcm(self.parts, self.align)
        return -(-self.numel // step) * step // self.parts

    def first(self, part: int) -> int:
        """Where in the vector a rank's shard begins."""
        return sum(self.cuts[:part])

    def spans(self, part: int) -> list[Span]:
        """What of which parameter a rank holds; parameters of which it holds nothing are left out."""
        low = self.first(part)
        high = low + self.cuts[part]
        found = []
        for i, (start, end) in enumerate(zip(self.offsets, self.offsets[1:])):
            a, b = max(start, low), min(end, high)
            if a < b:
                found.append(Span(i, a - start, a - low, b - a))
        return found
