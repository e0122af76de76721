"""Rings along all axes of a torus at once.

The message is cut into as many parts as the group has axes. Each part is gathered along one axis after the other, each
part in a turn of the axes that ends with an axis of its own, so that no axis is idle. Along an axis every piece goes
both ways round, and meets itself half-way. Most bytes move in the last turn, so parts are as large as the lanes of the
axis that they end with. In a cube of x devices an axis with wrap, and one lane a wire, this is the scaling book's form,
(n-1)/n S / (2 axes lane) (jax-ml/scaling-book@0819a7d sharding.md). An axis without wrap has half as many ports: devices
at its ends have one wire along it. Where axes are unlike, parts wait for each other between turns, and up to a quarter of
the lanes' time is lost.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from emu.cost.collectives.axes import Axis


def turns(axes: tuple[Axis, ...]) -> list[list[int]]:
    """For each part, its axes in the order in which it is gathered along them."""
    d = len(axes)
    return [[(part + 1 + turn) % d for turn in range(d)] for part in range(d)]


def parts(axes: tuple[Axis, ...]) -> list[float]:
    """Share of the message that each part is: part i ends with axis i."""
    total = sum(axis.ports for axis in axes)
    return [axis.ports / total for axis in axes]


@lru_cache(maxsize=1024)
def turns_of(axes: tuple[Axis, ...]) -> tuple[tuple[int, float], ...]:
    """Of each turn of an all-gather, its steps, and message over lanes: S bytes take S * this over a lane's bytes/s.

    A turn is over when all parts are through it.
    """
    order, shares = turns(axes), parts(axes)
    gathered = [1 / prod(axis.extent for axis in axes)] * len(axes)  # of each part, what a device holds
    found = []
    for turn in range(len(axes)):
        longest, slowest = 0, 0.0
        for part, along in enumerate(order):
            axis = axes[along[turn]]
            longest = max(longest, axis.hops)
            slowest = max(slowest, (axis.extent - 1) * gathered[part] * shares[part] / axis.ports)
            gathered[part] *= axis.extent
        found.append((longest, slowest))
    return tuple(found)
