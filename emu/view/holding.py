"""Who holds what: the batch x sequence x hidden x layers cube cut by the axes of a mesh, and a model by stages of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from emu.parallel import Plan
from emu.spmd import Mesh
from emu.trace.units import percent_text, ranks_text
from emu.view.cells import Cell, draw_cells
from emu.view.labels import fold
from emu.view.shares import KINDS, Share, Shares, shares_of
from emu.view.style import FAINT_INK, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CALLED = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
MOST_ROWS = 24  # of different layers
LONGEST = 32  # characters of ranks that are listed


def holding_figure(
    plan: Plan | Mesh | Shares, model: Any = None, rank: int = 0, width: float = 11.0, title: str | None = None
) -> Figure:
    """Draws what every rank holds under a plan: its tokens, its layers and heads and, of a model, its parts of the states.

    Activations are a cube of batch x sequence x hidden x layers; every cut is along one of these, so two faces tell all: what
    a rank holds is its part of the first face times its part of the second. States are drawn unit by unit of the model, as
    wide as the elements that the same ranks hold. One rank's parts are dark, and every part names its ranks.

    Args:
        plan: a Plan; a Mesh, which is taken for one with nothing else said; or what `shares_of` returned.
        model: a name ("gpt-tiny"), a Config, or a function without arguments that makes a plain module; None draws
            activations only.
        rank: whose parts are dark.
        width: of the figure in inches.
        title: above the picture; None names mesh and rank.

    Raises:
        PlanError: no plan, or one that does not fit the model; EmuError: no such model or rank, or more than 64 ranks with
            a model.
    """
    if isinstance(plan, Mesh):
        plan = Plan(plan)
    shares = plan if isinstance(plan, Shares) else shares_of(plan, model)
    shares.mesh.coords(rank)  # refuses one that is none
    kinds = _kinds(shares)
    faces = 3 if shares.plan.sp else 2
    with drawing():
        lines = {kind: _lines(shares, kind) for kind, _ in kinds}
        high = max((0.19 * len(some) for some in lines.values()), default=0.0)
        figure = new_figure(width, 3.4 + (high + 0.9 if kinds else 0.0))
        parts: Any = figure.subfigures(2, 1, height_ratios=[2.6, high + 0.9]) if kinds else [figure]
        above = parts[0].subplots(1, faces)
        face = 0.85 * width / faces, 1.9
        _draw_tokens(above[0], shares, rank, "tokens", "batch x sequence", face)
        if faces == 3:
            _draw_tokens(above[1], shares, rank, "between_tokens", "the same between cut modules (sp)", face)
            above[1].set_ylabel("")
        _draw_layers(above[-1], shares, rank, face)
        if kinds:
            panels = parts[1].subplots(1, len(kinds), squeeze=False)[0]
            for axes, (kind, name) in zip(panels, kinds):
                _draw_states(axes, lines[kind], rank, name, 0.75 * width / len(kinds))
        figure.suptitle(title if title is not None else _title(shares, rank), x=0.008, ha="left", fontweight="bold")
        figure.supxlabel(fold(_note(shares, rank), 72 * width - 12, 8), x=0.008, ha="left", fontsize=8, color=FAINT_INK)
    return figure


def _title(shares: Shares, rank: int) -> str:
    zero = f", zero={shares.plan.zero}" if shares.plan.zero and shares.pieces else ""  # it cuts no activations
    coords = " ".join(f"{axis}={i}" for axis, i in shares.mesh.coords(rank).items())
    return f"who holds what on {shares.mesh}{zero}; dark: rank {rank}" + (f" ({coords})" if coords else "")


def _note(shares: Shares, rank: int) -> str:
    idle = [r for r, share in shares.shares.items() if not share.rows]
    plan = shares.plan
    notes = [
        "numbers in the picture are ranks, and shades tell neighbours apart",
        "activations of a rank: its tokens, of its layers and hidden units",
        f"the batch is the plan's: global_batch={plan.global_batch}, seq={plan.seq}",
    ]
    if not shares.pieces:
        cut = f", which zero={plan.zero} cuts" if plan.zero else ""
        notes.append(
            f"not drawn: parameters, gradients and optimizer states{cut}; to see them name a model, as in "
            'emu.view.holding_figure(plan, "gpt-tiny")'
        )
    if idle:
        notes.append(f"no rows for {named(idle)}")
    whole = sum(shares.elements.values())
    notes += [
        f"{CALLED[kind]} of rank {rank}: {percent_text(shares.held(kind, rank) / whole)}"
        for kind in shares.pieces
        if whole
    ]
    return "; ".join(notes)


def _together(shares: Mapping[int, Share], part: Any) -> list[tuple[Any, list[int]]]:
    """What several ranks have alike, with these ranks, in the order of the first."""
    found: dict[Any, list[int]] = {}
    for rank, share in shares.items():
        found.setdefault(part(share), []).append(rank)
    return list(found.items())


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, some of them where they are many."""
    said = ranks_text(list(ranks))
    return said if len(said) <= LONGEST else f"{', '.join(map(str, ranks[:3]))}, … ({len(ranks):,})"


def token_cells(shares: Shares, rank: int, tokens: str = "tokens") -> list[Cell]:
    """Rows and tokens of a batch with the ranks that work on them."""
    return [
        Cell(columns, rows, named(ranks), rank in ranks)
        for (row_ranges, token_ranges), ranks in _together(shares.shares, lambda s: (s.rows, getattr(s, tokens)))
        for rows in row_ranges
        for columns in token_ranges
    ]


def layer_cells(shares: Shares, rank: int) -> list[Cell]:
    """Layers, and shares of what is inside them, with the ranks that hold them."""
    return [
        Cell(columns, (run[0], run[-1] + 1), named(ranks), rank in ranks)
        for (layers, width), ranks in _together(shares.shares, lambda s: (s.layers, s.width))
        for run in _runs(layers)
        for columns in width
    ]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    return [[n for _, n in some] for _, some in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]


def _draw_tokens(axes: Axes, shares: Shares, rank: int, tokens: str, title: str, inches: tuple[float, float]) -> None:
    draw_cells(axes, token_cells(shares, rank, tokens), shares.plan.seq, shares.plan.global_batch, inches)
    axes.set_title(title, loc="left")
    axes.set_xlabel("token of a sequence")
    axes.set_ylabel("sequence of the batch")


def _draw_layers(axes: Axes, shares: Shares, rank: int, inches: tuple[float, float]) -> None:
    draw_cells(axes, layer_cells(shares, rank), 1.0, len(shares.layers), inches)
    axes.set_title("layers x hidden", loc="left")
    axes.set_xlabel("share of heads and hidden units inside layers")
    axes.set_ylabel("layer" if shares.pieces else "stage")


def _kinds(shares: Shares) -> list[tuple[str, str]]:
    """Which kinds are drawn, those that are held alike once: (kind, title)."""
    drawn: dict[tuple, list[str]] = {}
    for kind in KINDS:
        if shares.pieces.get(kind):
            drawn.setdefault(tuple(shares.pieces[kind]), []).append(kind)
    found = []
    for some in drawn.values():
        *first, last = (CALLED[kind] for kind in some)
        found.append((some[0], f"{', '.join(first)} and {last}" if first else last))
    return found


Line = tuple[str, list[tuple[tuple[int, ...], int]]]  # name, and (ranks, elements) from left to right


def _lines(shares: Shares, kind: str) -> list[Line]:
    """Every unit of a model with who holds how many of its elements; neighbours that are alike become one line."""
    units: dict[str, dict[tuple[int, ...], int]] = {}
    for piece in shares.pieces[kind]:
        own = units.setdefault(piece.unit, {})
        own[piece.ranks] = own.get(piece.ranks, 0) + piece.elements
    lines: list[Line] = []
    for _, alike in groupby(units.items(), lambda item: tuple(sorted(item[1].items()))):
        some = list(alike)
        names = [name or "the model itself" for name, _ in some]
        held = sorted(some[0][1].items())
        called = names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rpartition('.')[2]}"
        lines.append((called, held))
    if len(lines) > MOST_ROWS:
        half = MOST_ROWS // 2
        lines = [*lines[:half], (f"… {len(lines) - 2 * half} more", []), *lines[-half:]]
    return lines


def _draw_states(axes: Axes, lines: Sequence[Line], rank: int, title: str, wide: float) -> None:
    cells = []
    for row, (_, held) in enumerate(lines):
        whole, at = sum(size for _, size in held), 0.0
        for ranks, size in held:
            cells.append(Cell((at, at + size / whole), (row + 0.06, row + 0.94), named(ranks), rank in ranks))
            at += size / whole
    draw_cells(axes, cells, 1.0, len(lines), (wide, 0.19 * len(lines)), ticks=False)
    axes.set_yticks([row + 0.5 for row in range(len(lines))], [_cut(name) for name, _ in lines])
    axes.set_xticks([0, 0.5, 1], ["0", "half", "all"])
    axes.set_xlabel("of the elements of each")
    axes.set_title(title, loc="left")


def _cut(name: str, most: int = 26) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]
