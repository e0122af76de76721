"""Who holds which part of one tensor: its Layout over the ranks of a mesh, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from emu.spmd import EmuError, Layout, Mesh, Only, Partial, Shard, Slices
from emu.spmd.mesh import FOLDED
from emu.trace.units import ranks_text
from emu.view.cells import Cell, draw_cells
from emu.view.labels import fold
from emu.view.style import FAINT_INK, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Range = tuple[int, int]
MOST_PANELS = 12


class Part(NamedTuple):
    """A part of a tensor that the same ranks hold all of.

    Fields:
        box: (start, stop) of it along every dimension.
        sums: the ranks that hold it; together those whose pieces add up (or are multiplied, ...) to it.
    """

    box: tuple[Range, ...]
    sums: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for some in self.sums for rank in some))


def layout_parts(layout: Layout, shape: Sequence[int], mesh: Mesh) -> list[Part]:
    """The parts of a tensor with those who hold them, as `Layout.held` says, in order of position.

    Args:
        shape: of the whole.

    Raises:
        EmuError: a layout that does not fit the mesh or the shape.
    """
    held = {rank: layout.held(shape, mesh, rank) for rank in range(mesh.size) if layout.holds(mesh, rank)}
    points = [
        sorted({0, int(n), *(end for of_rank in held.values() for pair in of_rank[dim] for end in pair)})
        for dim, n in enumerate(shape)
    ]
    cells: list[list[Range]] = [list(pairwise(some)) for some in points]
    found: dict[tuple[Range, ...], list[int]] = {}
    for rank, ranges in held.items():
        inside = [
            [cell for cell in own if any(start <= cell[0] and cell[1] <= stop for start, stop in pairs)]
            for own, pairs in zip(cells, ranges)
        ]
        for box in product(*inside):
            found.setdefault(box, []).append(rank)
    partial = [axis for axis, placed in layout.placements.items() if isinstance(placed, Partial)]
    return [Part(box, _sums(found[box], mesh, partial)) for box in sorted(found)]


def _sums(ranks: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    if not axes:
        return tuple((rank,) for rank in ranks)
    return tuple(dict.fromkeys(tuple(m for m in mesh.members(rank, *axes) if m in ranks) for rank in ranks))


def layout_figure(
    layout: Layout,
    shape: Sequence[int],
    mesh: Mesh,
    rank: int | None = None,
    name: str = "tensor",
    width: float = 7.0,
) -> Figure:
    """Draws a tensor as a matrix cut into what ranks hold; each part names its ranks, "0+1" where pieces add up to it.

    The first two dimensions that are cut (or that there are) are drawn, rows downwards; of a third one that is cut, every
    piece is a picture of its own.

    Args:
        shape: of the whole tensor.
        rank: whose parts are drawn dark; None: nobody's.
        name: what the tensor is called.
        width: of the figure in inches.

    Raises:
        EmuError: a layout that does not fit the mesh or the shape, no such rank, or more than 12 pictures.
    """
    if rank is not None:
        mesh.coords(rank)  # refuses one that is none
    parts = layout_parts(layout, shape, mesh)
    dims = _drawn_dims(layout, shape)
    others = sorted({tuple(r for d, r in enumerate(part.box) if d not in dims) for part in parts}) or [()]
    if len(others) > MOST_PANELS:
        raise EmuError(
            f"{name} is cut in {len(others)} pieces along further dimensions than the two that can be drawn",
            f"draw a layout that cuts at most two dimensions, or a third one in at most {MOST_PANELS} pieces",
        )
    with drawing():
        figure = new_figure(width, 0.35 + 2.6 * len(others))
        panels = figure.subplots(len(others), 1, squeeze=False)[:, 0]
        for axes, where in zip(panels, others):
            own = [part for part in parts if tuple(r for d, r in enumerate(part.box) if d not in dims) == where]
            ends = [int(shape[d]) for d in dims]
            cells = [
                Cell(*_edges(part.box, dims), _said(part.sums), rank in part.ranks, any(len(s) > 1 for s in part.sums))
                for part in own
            ]
            draw_cells(axes, cells, ends[1] if len(ends) > 1 else 1, ends[0] if ends else 1, (0.9 * width, 1.8))
            axes.set_ylabel(f"dimension {dims[0]}" if dims else "")
            axes.set_xlabel(f"dimension {dims[1]}" if len(dims) > 1 else "")
            if len(dims) < 2:
                axes.set_xticks([])
            if not dims:
                axes.set_yticks([])
            further = [d for d in range(len(shape)) if d not in dims]
            cut = [f"dimension {d}: {a} to {b}" for d, (a, b) in zip(further, where) if (a, b) != (0, shape[d])]
            axes.set_title(", ".join(cut), loc="left", fontsize=8.5)
            if not own:
                axes.text(0.5, 0.5, "empty", transform=axes.transAxes, ha="center", color=FAINT_INK)
        shown = f"{name} {list(map(int, shape))} over {mesh}"
        figure.suptitle(shown, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        holders = {r for part in parts for r in part.ranks}
        absent = [r for r in range(mesh.size) if not (r in holders if prod(shape) else layout.holds(mesh, r))]
        dark = f"dark: rank {rank}" if rank is not None else ""
        notes = [
            said for said in (layout_text(layout), "numbers in the picture are ranks", dark, _nothing(absent)) if said
        ]
        figure.supxlabel(fold("; ".join(notes), 72 * width - 12, 8), x=0.01, ha="left", fontsize=8, color=FAINT_INK)
    return figure


def _nothing(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"nothing on rank{'s' if len(ranks) > 1 else ''} {ranks_text(list(ranks))}"


def _drawn_dims(layout: Layout, shape: Sequence[int]) -> list[int]:
    """At most two dimensions, in order: those that are cut first, then the first that are not."""
    n = len(shape)
    placed = (p for p in layout.placements.values() if isinstance(p, (Shard, Slices)))
    cut = [d for d in dict.fromkeys(p.dim % n if n else 0 for p in placed) if d < n]
    return sorted([*cut, *(d for d in range(n) if d not in cut)][:2])


def _edges(box: tuple[Range, ...], dims: Sequence[int]) -> tuple[Range, Range]:
    """Columns and rows of a part."""
    rows = box[dims[0]] if dims else (0, 1)
    return (box[dims[1]] if len(dims) > 1 else (0, 1)), rows


def _said(sums: tuple[tuple[int, ...], ...]) -> str:
    if all(len(some) == 1 for some in sums):
        ranks = [rank for (rank,) in sums]
        return ranks_text(ranks)
    return ", ".join(
        "+".join(map(str, some)) if len(some) <= 4 else f"sum of {ranks_text(list(some))}" for some in sums[:3]
    ) + (", …" if len(sums) > 3 else "")


def layout_text(layout: Layout) -> str:
    """A layout in words: an axis after the other."""
    said = [f"{axis}: {placement_text(placed)}" for axis, placed in layout.placements.items()]
    return "; ".join(said) or "replicated: every rank holds all of it"


def placement_text(placed: object) -> str:
    """A placement in words."""
    if isinstance(placed, Shard):
        return f"cut along dimension {placed.dim}"
    if isinstance(placed, Slices):
        return f"ranges of dimension {placed.dim}"
    if isinstance(placed, Partial):
        return f"each rank a part of the {placed.op}"
    if isinstance(placed, Only):
        return f"only at index {ranks_text(list(placed.at))}"
    return "replicated"


def schematic(layout: Layout) -> tuple[tuple[int, ...], Mesh]:
    """A small shape and mesh that a layout fits: two ranks along an axis, unless it says how many there are."""
    axes: dict[str, int] = {}
    lengths: dict[int, int] = {}
    for axis, placed in layout.placements.items():
        axes[axis] = 2
        if isinstance(placed, Only):
            axes[axis] = max([*placed.at, 0]) + 2
        if isinstance(placed, Slices):
            axes[axis] = len(placed.ranges)
            lengths[placed.dim] = max([stop for some in placed.ranges for _, stop in some], default=1)
        if isinstance(placed, Shard):
            lengths[placed.dim] = lengths.get(placed.dim, 2) * 2
    return _shape(lengths), _mesh(axes)


def _shape(lengths: Mapping[int, int]) -> tuple[int, ...]:
    n = max([2, *(d + 1 if d >= 0 else -d for d in lengths)])
    by_dim = {d % n: length for d, length in lengths.items()}
    return tuple(by_dim.get(d, 4) for d in range(n))


def _mesh(axes: Mapping[str, int]) -> Mesh:
    """Expert axes fold ranks along dp, which has as many as they need."""
    folds = {axis: n for axis, n in axes.items() if axis in ("ep", "etp")}
    dense = {axis: n for axis, n in axes.items() if axis not in FOLDED}
    if len(dense) < len(axes) and "dp" not in dense:
        dense["dp"] = prod(folds.values()) * axes.get("edp", 1)
    return Mesh(**dense, **folds)
