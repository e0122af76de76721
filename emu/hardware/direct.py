"""Topologies without switches: full mesh, hypercube, hybrid cube mesh, torus and grid. See emu.hardware.topology."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import prod
from typing import TYPE_CHECKING

from .wires import Wire

if TYPE_CHECKING:
    from .topology import Topology

KINDS = ("full mesh", "hypercube", "hybrid cube mesh", "torus", "grid")

# NVIDIA DGX-1 System Architecture (WP-08437-001): a cube with all 12 edges, some of them double, and the diagonals of two
# faces; six lanes at every V100. Unverified: which edges are double, from memory of nvidia-smi topo on such a machine.
_DGX1 = {
    **dict.fromkeys(((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)), 1),
    **dict.fromkeys(((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)), 2),
}


def n_switches(topology: Topology) -> int:
    return 0


def wires(topology: Topology) -> Iterator[Wire]:
    n = topology.n_devices
    if topology.kind == "full mesh":
        yield from (Wire(a, b) for a, b in combinations(range(n), 2))
    elif topology.kind == "hypercube":
        yield from (Wire(a, a | bit) for a in range(n) for bit in _bits(topology) if not a & bit)
    elif topology.kind == "hybrid cube mesh":
        yield from (Wire(a, b, _dgx1(topology, a, b)) for a, b in sorted(_DGX1) if b < n)
    else:
        for device in range(n):
            for size, stride, lanes in _axes(topology):
                place = device // stride % size
                if place + 1 < size:
                    yield Wire(device, device + stride, lanes)
                elif topology.kind == "torus" and size > 2:  # two devices on an axis have one wire, not two
                    yield Wire(device - place * stride, device, lanes)


def path(topology: Topology, source: int, target: int) -> Iterator[Wire]:
    if topology.kind == "full mesh":
        yield Wire(source, target)
    elif topology.kind == "hypercube":
        here = source
        for bit in _bits(topology):
            if (source ^ target) & bit:
                yield Wire(here, here ^ bit)
                here ^= bit
    elif topology.kind == "hybrid cube mesh":
        direct = _dgx1(topology, source, target)
        stops = (source, target) if direct else (source, _between(topology, source, target), target)
        yield from (Wire(a, b, _dgx1(topology, a, b)) for a, b in pairwise(stops))
    else:
        here = source
        for size, stride, lanes in _axes(topology):
            place, goal = here // stride % size, target // stride % size
            step = 1 if goal > place else -1
            if topology.kind == "torus":
                step = 1 if (goal - place) % size <= (place - goal) % size else -1
            while place != goal:
                after = (place + step) % size
                following = here + (after - place) * stride
                yield Wire(here, following, lanes)
                here, place = following, after


def ports(topology: Topology) -> int:
    if topology.kind == "full mesh":
        return max(1, topology.n_devices - 1)
    if topology.kind == "hypercube":
        return topology.sizes[0]
    if topology.kind == "hybrid cube mesh":
        n = topology.n_devices
        return max(1, *(sum(_dgx1(topology, a, b) for b in range(n)) for a in range(n)))
    return max(1, sum(min(size - 1, 2) * lanes for size, _, lanes in _axes(topology)))


def diameter(topology: Topology) -> int:
    if topology.kind == "full mesh":
        return 1
    if topology.kind == "hypercube":
        return topology.sizes[0]
    if topology.kind == "hybrid cube mesh":
        return 1 if topology.n_devices <= 4 else 2
    return sum(size // 2 if topology.kind == "torus" else size - 1 for size in topology.sizes)


def bisection_lanes(topology: Topology) -> float:
    n = topology.n_devices
    if topology.kind == "full mesh":
        return (n // 2) * (n - n // 2)
    if topology.kind == "hypercube":
        return n // 2
    if topology.kind == "hybrid cube mesh":
        halves = combinations(range(n), n // 2)
        return min(
            sum(wire.lanes for wire in topology.wires if (wire.source in half) != (wire.target in half))
            for half in halves
        )
    cuts = (
        lanes * (n // size) * (2 if topology.kind == "torus" and size > 2 else 1)
        for size, _, lanes in _axes(topology)
        if size > 1
    )
    return min(cuts)


def coordinates(sizes: tuple[int, ...], device: int) -> tuple[int, ...]:
    """Where a device lies along each size, outermost first."""
    return tuple(device // prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def _axes(topology: Topology) -> list[tuple[int, int, int]]:
    """Size, stride and lanes of each axis, outermost first."""
    sizes = topology.sizes
    lanes = topology.lanes or (1,) * len(sizes)
    return [(size, prod(sizes[i + 1 :]), lanes[i]) for i, size in enumerate(sizes)]


def _bits(topology: Topology) -> list[int]:
    return [1 << i for i in range(topology.sizes[0])]


def _most(topology: Topology) -> int:
    """Lanes of the fattest wire of a hybrid cube mesh."""
    return topology.lanes[0] if topology.lanes else 2


def _dgx1(topology: Topology, a: int, b: int) -> int:
    return min(_most(topology), _DGX1.get((min(a, b), max(a, b)), 0))


def _between(topology: Topology, a: int, b: int) -> int:
    """The device that joins two without a wire: the one with most lanes to both, the lowest of these."""
    return max(range(topology.n_devices), key=lambda v: (min(_dgx1(topology, a, v), _dgx1(topology, b, v)), -v))
