"""Any meshes, layouts on them, and wholes that they fit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from emu.spmd import Layout, Mesh, Replicate, Shard, Slices

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


def numbered(*shape: int) -> Tensor:
    """Every element differs from every other."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def ranges_of(draw: Any, length: int, n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """A dimension's entries for n ranks: in any order, uneven, some for several ranks, some for all that a rank has none."""
    points = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=5))})
    given_to: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for part in pairwise(points):
        for index in draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)):
            given_to[index].append(part)
    if draw(st.booleans()):
        given_to[draw(st.integers(0, n - 1))].append((length, length))
    return tuple(tuple(draw(st.permutations(some))) for some in given_to)


MESHES = [
    ("tp",),
    ("dp", "tp"),
    ("tp", "dp"),
    ("pp", "dp", "tp"),
    ("dp", "pp", "tp"),
]


@st.composite
def dense(draw: Any, shape: tuple[int, ...] | None = None) -> tuple[Mesh, Layout, Tensor]:
    mesh = Mesh(**{axis: draw(st.integers(1, 4)) for axis in draw(st.sampled_from(MESHES))})
    return (mesh, *drawn(draw, mesh.axes, shape))


@st.composite
def folded(draw: Any, shape: tuple[int, ...] | None = None) -> tuple[Mesh, Layout, Tensor]:
    """ep x etp over dp x tp, with pp outside or in the middle."""
    ep, etp, edp = (draw(st.integers(1, 3)) for _ in range(3))
    whole = ep * etp * edp
    dp = draw(st.sampled_from([n for n in range(1, whole + 1) if not whole % n]))
    order = draw(st.permutations(["pp", "dp", "tp"]))
    sizes = {"pp": draw(st.integers(1, 2)), "dp": dp, "tp": whole // dp}
    mesh = Mesh(**{axis: sizes[axis] for axis in order}, ep=ep, etp=etp)
    axes = {"ep": ep, "etp": etp}
    if draw(st.booleans()):
        axes = {"pp": sizes["pp"], **axes}
    return (mesh, *drawn(draw, axes, shape))


def drawn(draw: Any, axes: dict[str, int], shape: tuple[int, ...] | None) -> tuple[Layout, Tensor]:
    """A placement for every axis that fits a whole, of the shape or any, which comes with it."""
    whole = numbered(*(draw(shapes) if shape is None else shape))
    placements: dict[str, Any] = {}
    lengths = dict(enumerate(whole.shape))  # of the pieces that the outer axes leave; they must be alike to be named
    for axis, n in axes.items():
        kind = draw(st.sampled_from(["slices", "shard", "same"]))
        dim = draw(st.integers(0, whole.dim() - 1))
        if kind == "slices" and dim in lengths:
            ranges = ranges_of(draw, lengths.pop(dim), n)
            placements[axis] = Slices(draw(st.sampled_from([dim, dim - whole.dim()])), ranges)
        elif kind == "shard":
            placements[axis] = Shard(dim)
            if dim in lengths and lengths[dim] % n:
                del lengths[dim]
            elif dim in lengths:
                lengths[dim] //= n
        elif draw(st.booleans()):
            placements[axis] = Replicate()
    return Layout(placements), whole
