"""The wires of a part of a node: what so many of its devices have between them."""

from __future__ import annotations

from collections.abc import Iterator

from .topology import Topology

# Slices of TPU pods: "All 4x4x4 and larger slices (one cube) have full 3D tori" (docs.cloud.google.com/tpu/docs/v5p), as
# optical switches join whole cubes any way round; smaller ones, and those of the 2D pods that are not whole, have no wrap.
CUBE = 4


def part_of(whole: Topology, devices: int) -> Topology | None:
    """The wires between that many devices of a node; None if a part of such a node is not known.

    A switch and a full mesh stay what they are with fewer devices, or more. A hybrid cube mesh keeps its first ones. A hypercube
    has parts of a power of two. Of a torus or grid it is the most compact box of its axes: a torus if every axis goes
    round, else a grid.
    """
    if devices == whole.n_devices:
        return whole
    if whole.kind in ("switch", "full mesh") or (whole.kind == "hybrid cube mesh" and devices < whole.n_devices):
        return Topology(whole.kind, (devices,), whole.lanes)
    if whole.kind == "hypercube":
        bits = devices.bit_length() - 1
        return Topology(whole.kind, (bits,)) if bits and devices == 2**bits else None
    if whole.kind not in ("torus", "grid"):
        return None
    box = min(_boxes(whole.sizes, devices), key=lambda sizes: (sum(sizes), sizes), default=None)
    if box is None:
        return None
    return Topology("torus" if whole.kind == "torus" and _goes_round(box, whole.sizes) else "grid", box, whole.lanes)


def _boxes(whole: tuple[int, ...], devices: int) -> Iterator[tuple[int, ...]]:
    """All boxes of so many devices that fit into the whole one."""
    if not whole:
        if devices == 1:
            yield ()
        return
    for size in range(1, min(whole[0], devices) + 1):
        if devices % size == 0:
            for rest in _boxes(whole[1:], devices // size):
                yield (size, *rest)


def _goes_round(box: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether every axis of a box is wrapped, or too short for that to matter; a single wrapped axis does not count."""
    cubes = len(box) == 3 and all(size % CUBE == 0 for size in box)
    return cubes or (max(box) > 2 and all(size == all_ or size <= 2 for size, all_ in zip(box, whole, strict=True)))
