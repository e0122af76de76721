"""Attention across ranks: the ring as it turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emu.parallel.attention.pieces import Piece
from emu.parallel.attention.tokens import values
from emu.parallel.context.cut import Cut
from emu.view.bars import sample_ranks
from emu.view.context_work import Share, check_cuts, imbalance, name_of, percent, planned, ring_of
from emu.view.labels import legend_below
from emu.view.mesh import COORDINATES
from emu.view.style import FAINT_INK, INK, Paint, drawing, ink_on, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 8  # ranks and steps that one picture of a ring has
MOST_SIDE = 1.7  # inches of a panel
MOST_PIXELS = 240  # of a score matrix, across
MOST_STEPS_DRAWN = 64  # of a causal staircase; a longer one is a slope
PIECES = {
    "whole": Paint("#234b87", ""),
    "causal": Paint("#8cc5ea", "////"),
    "by a mask": Paint("#e07b28", ""),
}
BEFORE, LATER = "#c4c4c4", "#ededed"
BUSY = "#35456c"


def ring_figure(cut: Cut, row: int = 0, width: float = 10.0, title: str | None = None) -> Figure:
    """Draws who attends to what, a column a step of the ring.

    Above, the score matrix in order of positions, queries down and keys across: what is attended to in this step, coloured
    by rank, what was before and what comes later. Below, for every rank, its own queries and the keys that lie with it
    now, as the kernels get them: rectangles that attend whole, causal, or by a mask; where nothing is seen no kernel runs.
    Edges have the colours of the ranks whose tokens these are: so one sees keys and values go round. Bars: the share of
    all attended pairs that a rank has. Where neighbours exchange heads they stand together.

    Args:
        cut: of a sequence, as make_cut gives it. Of more than 8 ranks, 8 are shown.
        row: of a batch, where the cut knows documents.
        width: of the figure in inches.
        title: above the picture; None: the kind, and what the busiest rank has to do.

    Raises:
        ValueError: no cut, or no such row.
    """
    check_cuts([cut])
    rows = 1 if cut.documents is None else len(cut.documents)
    if not rows:
        raise ValueError("the cut's documents have no rows, so there is none to draw: make the cut of one row or more")
    if not 0 <= row < rows:
        raise ValueError(f"there is no row {row} among {rows}: give one from 0 to {rows - 1}")
    shares = ring_of(cut)
    places, steps = sample_ranks(range(len(shares)), MOST_PANELS), sample_ranks(range(len(shares[0])), MOST_PANELS)
    totals = percent(planned(cut)).reshape(len(shares), -1).sum(1)
    seen, owners = _scores(cut, row, len(shares))
    along = len(steps) == 1  # then ranks stand beside each other
    columns = len(places) + 1 if along else len(steps) + 0.55
    side = min(width / (columns + 0.4), MOST_SIDE)
    with drawing():
        lines = 1 if along else len(places) + 1
        figure = new_figure(max(side * (columns + 0.4), 6.8), (side + 0.26) * lines + 1.0)
        if along:
            grid = figure.subplots(1, len(places) + 1, squeeze=False)[0]
            first, panels = grid[:1], {(place, 0): axes for place, axes in zip(places, grid[1:])}
        else:
            grid = figure.subplots(lines, len(steps) + 1, width_ratios=[1.0] * len(steps) + [0.55])
            first = grid[0][:-1]
            panels = {(place, s): axes for place, line in zip(places, grid[1:]) for s, axes in zip(steps, line)}
            grid[0][-1].axis("off")
            grid[0][-1].text(0, 0, "of all pairs\n(dashed: mean)", fontsize=8)
            for place, line in zip(places, grid[1:]):
                _draw_total(line[-1], totals[place], max(totals), float(np.mean(totals)))
        first[0].set_ylabel("queries")
        for axes, step in zip(first, steps):
            _draw_scores(axes, cut, seen, owners, step, len(shares))
        used: set[str] = set()
        for (place, step), axes in panels.items():
            used |= _draw_share(axes, cut, shares[place][step], place, row, len(shares))
            if step == 0:
                share = f": {totals[place]:.1f} %" if along else ""
                axes.set_ylabel(_who(cut, place) + share, fontweight="bold")
        _ring_legend(figure, used, len(steps) > 1)
        figure.suptitle(
            _said(cut, row) if title is None else title, x=0.008, ha="left", fontsize=11.5, fontweight="bold"
        )
    return figure


def _said(cut: Cut, row: int) -> str:
    """What stands above the picture of a ring."""
    shared = f", {cut.ulysses} share heads" if cut.ulysses > 1 else ""
    said = f"{name_of(cut)}{shared}: who attends to what; busiest rank {imbalance(planned(cut)):.2f} x mean"
    if cut.documents is not None and len(cut.documents) > 1:
        said += f"; row {row} of {len(cut.documents)}"
    places = len(ring_of(cut))
    return said + (f"; {MOST_PANELS} of {places} shown" if places > MOST_PANELS else "")


def rank_colour(rank: int, ranks: int) -> str:
    """From dark to light."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    return to_hex(LinearSegmentedColormap.from_list("ranks", COORDINATES)(rank / max(ranks - 1, 1)))


def _who(cut: Cut, place: int) -> str:
    n = cut.ulysses
    return f"rank {place}" if n == 1 else f"ranks {place * n}–{place * n + n - 1}"


def _scores(cut: Cut, row: int, places: int) -> tuple[np.ndarray, np.ndarray]:
    """[pixels, pixels], whether a query sees a key; [pixels], whose tokens these are."""
    ring = cut.ring
    owners = np.zeros(cut.length, dtype=np.int64)
    for place in range(places):
        positions = values(ring.tokens(place).positions)
        owners[positions[row] if positions.ndim == 2 else positions] = place
    at = np.arange(cut.length)
    if cut.length > MOST_PIXELS:
        at = np.arange(MOST_PIXELS) * cut.length // MOST_PIXELS
        # Stripes finer than pixels are drawn as wide as pixels, and not as whatever every so many tokens happen to be.
        at = np.minimum(at + (np.arange(MOST_PIXELS) - at) % places, cut.length - 1)
    seen = at[None, :] <= at[:, None]
    if cut.documents is not None:
        documents = values(cut.documents)[row]
        seen = seen & (documents[at][None, :] == documents[at][:, None])
    return seen, owners[at]


def _draw_scores(axes: Axes, cut: Cut, seen: np.ndarray, owners: np.ndarray, step: int, places: int) -> None:
    """One step's part of the score matrix."""
    from matplotlib.colors import to_rgb

    axes.set_title(f"step {step}", loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel("keys", fontsize=8, labelpad=2)
    _bare(axes)
    if not seen.size:
        return
    ahead = (
        (owners[:, None] - owners[None, :]) % places if cut.kind != "all-gather" else np.zeros(seen.shape, dtype=int)
    )
    image = np.ones((*seen.shape, 3))
    image[seen & (ahead < step)] = to_rgb(BEFORE)
    image[seen & (ahead > step)] = to_rgb(LATER)
    for place in range(places):
        here = seen & (ahead == step) & (owners == place)[:, None]
        image[here] = to_rgb(rank_colour(place, places))
        if (at := _inside(here)) is not None:
            ink = ink_on(rank_colour(place, places))
            axes.text(at[1], at[0], f"{place}", ha="center", va="center_baseline", fontsize=7, color=ink)
    axes.imshow(image, interpolation="nearest", aspect="equal")


def _inside(mask: np.ndarray) -> tuple[int, int] | None:
    """A place well inside of an area, near to its middle; None where it has no room for a number."""
    room, inner = max(len(mask) // 28, 1), mask.copy()
    for axis in (0, 1):
        stacked = inner.copy()
        for by in range(-room, room + 1):
            moved = np.roll(inner, by, axis)
            edge = slice(0, by) if by > 0 else slice(by, None) if by < 0 else slice(0, 0)
            moved[edge if axis == 0 else (slice(None), edge)] = False
            stacked &= moved
        inner = stacked
    at = np.argwhere(inner)
    if not len(at):
        return None
    middle = np.argwhere(mask).mean(0)
    y, x = at[np.abs(at - middle).sum(1).argmin()]
    return int(y), int(x)


def _draw_share(axes: Axes, cut: Cut, share: Share, place: int, row: int, places: int) -> set[str]:
    """One rank's queries and the keys that lie with it. Returns which kinds of pieces there are."""
    block = share.block
    n_queries = len(cut.ring.tokens(place))
    _bare(axes)
    axes.set_xlim(0, max(block.n_keys, 1))
    axes.set_ylim(max(n_queries, 1), 0)
    axes.set_box_aspect(1)
    _edge(axes, "left", rank_colour(place, places))
    if share.holder is not None:
        _edge(axes, "top", rank_colour(share.holder, places))
    whose = "all K, V" if share.holder is None or places == 1 else f"K, V of {_who(cut, share.holder).split()[1]}"
    axes.set_title(whose, loc="left", fontsize=8, pad=4)
    if not block.pieces:
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", va="center", color=FAINT_INK, fontsize=8)
    return {_draw_piece(axes, piece, block.q.start, block.k.start, row) for piece in block.pieces}


def _draw_piece(axes: Axes, piece: Piece, first_query: int, first_key: int, row: int) -> str:
    """Returns its kind. Local indices of a block's pieces count from the block's first query and key."""
    from matplotlib.patches import Polygon

    q0, q1 = piece.q.start + first_query, piece.q.stop + first_query
    k0, k1 = piece.k.start + first_key, piece.k.stop + first_key
    if piece.mask is not None:
        mask = values(piece.mask)[row % len(piece.mask)]
        faint = np.ones((*mask.shape, 4))
        faint[mask] = [int(PIECES["by a mask"].colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] + [1.0]
        axes.imshow(faint, extent=(k0, k1, q1, q0), aspect="auto", interpolation="nearest", zorder=1.5)
        corners = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
        axes.add_patch(Polygon(corners, facecolor="none", edgecolor=FAINT_INK, linewidth=0.6, linestyle=":"))
        return "by a mask"
    kind = "causal" if piece.causal else "whole"
    if not piece.causal:
        corners = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
    elif min(q1 - q0, k1 - k0) <= MOST_STEPS_DRAWN:
        corners = [(k0, q0)]
        for i in range(min(q1 - q0, k1 - k0)):
            corners += [(k0 + i + 1, q0 + i), (k0 + i + 1, q0 + i + 1)]
        corners += [(corners[-1][0], q1), (k0, q1)]
    else:
        corners = [(k0, q0), (k1, q0 + k1 - k0), (k1, q1), (k0, q1)] if q1 - q0 >= k1 - k0 else [
            (k0, q0), (k0 + q1 - q0, q1), (k0, q1)
        ]  # fmt: skip
    paint = PIECES[kind]
    axes.add_patch(
        Polygon(
            corners,
            facecolor=paint.colour,
            hatch=paint.hatch,
            edgecolor="white" if kind == "whole" else BUSY,
            linewidth=0.5,
        )
    )
    return kind


def _edge(axes: Axes, side: str, colour: str) -> None:
    axes.spines[side].set_color(colour)
    axes.spines[side].set_linewidth(4.0)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)


def _draw_total(axes: Axes, percent: float, most: float, even: float) -> None:
    axes.barh([0], [percent], height=0.5, color=BUSY)
    axes.axvline(even, color=INK, linewidth=1.0, linestyle="--")
    axes.set_xlim(0, max(most, even) * 1.15 or 1.0)
    axes.set_ylim(-1.2, 1.2)
    axes.text(0, 0.42, f"{percent:.1f} %", ha="left", va="bottom", fontsize=8.5)
    axes.axis("off")


def _ring_legend(figure: Figure, used: set[str], turns: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = [name for name in PIECES if name in used]
    handles: list[Any] = [
        Patch(facecolor=PIECES[name].colour, hatch=PIECES[name].hatch, edgecolor=BUSY, linewidth=0.5) for name in drawn
    ]
    labels = [f"attends {name}" for name in drawn]
    if turns:
        handles += [Patch(facecolor=colour, edgecolor=FAINT_INK, linewidth=0.3) for colour in (BEFORE, LATER)]
        labels += ["in an earlier step", "in a later step"]
        handles.append(Line2D([], [], color=BUSY, linewidth=4.0, solid_capstyle="butt"))
        labels.append("edges: whose queries (left) and keys (top)")
    legend_below(figure, handles, labels)
