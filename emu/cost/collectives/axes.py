"""Groups inside a torus, a grid or a hypercube: along which axes they extend, and how busy wires are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from emu.hardware import Topology


class Axis(NamedTuple):
    """One axis of a group in a torus.

    Args:
        extent: members along it.
        lanes: of each wire along it.
        wrapped: whether the last member is next to the first.
    """

    extent: int
    lanes: float
    wrapped: bool

    @property
    def ports(self) -> float:
        """Lanes that lead from each member along the axis; at the ends of a line, one way alone."""
        return self.lanes * (2 if self.wrapped else 1)

    @property
    def hops(self) -> int:
        """Wires to the member that is farthest."""
        return self.extent // 2 if self.wrapped else self.extent - 1


def axes_of(shape: Topology, places: Sequence[int]) -> tuple[Axis, ...]:
    """The axes along which a regular part of a shape extends; () if the places are none.

    Regular is what holds, along each axis, members at equal distances, in all combinations. Members that are several
    wires apart use all the wires between them.
    """
    sizes = (2,) * shape.sizes[0] if shape.kind == "hypercube" else shape.sizes
    lanes = shape.lanes or (1,) * len(sizes)
    along: list[set[int]] = [set() for _ in sizes]
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    for place in places:
        for seen, size, stride in zip(along, sizes, strides):
            seen.add(place // stride % size)
    if prod(map(len, along)) != len(places):
        return ()
    axes = []
    for seen, size, lane in zip(along, sizes, lanes):
        if len(seen) == 1:
            continue
        ordered = sorted(seen)
        gaps = {b - a for a, b in pairwise(ordered)}
        if len(gaps) != 1:
            return ()
        all_round = gaps.pop() * len(seen) == size
        axes.append(Axis(len(seen), lane, shape.kind == "torus" and all_round and len(seen) > 2))
    return tuple(axes)


def busiest_wire(shape: Topology, places: Sequence[int]) -> float:
    """Messages on the busiest wire, over its lanes, if each place sends one to the next."""
    load: dict[tuple[int, int], float] = defaultdict(float)
    for source, target in zip(places, [*places[1:], places[0]]):
        for wire in shape.path(source, target):
            load[wire.source, wire.target] += 1 / wire.lanes
    return max(load.values())
