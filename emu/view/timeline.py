"""The timeline as a picture: what every stream of every rank does, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.view.bars import COMMUNICATION, COMPUTE, WAITING, Look, Row, busiest_share, sample_ranks, timeline_rows
from emu.view.labels import cut, legend_below, text_width
from emu.view.style import FAINT_INK, INK, PHASE_COLOURS, Paint, communication_paint, drawing, new_figure
from emu.view.units import time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.cost.timeline import Timeline

COLUMNS = 3000  # about two to a pixel of a picture of ordinary width
BAR_HEIGHT = 0.74
RANK_GAP = 0.35  # extra room between the rows of two ranks, in rows
# A legend explains what is seen. Of columns as wide as a letter, one must be covered to this share; grey needs more.
LETTERS = 200
STRETCHED = "longer by sharing"
VEIL: dict[str, Any] = {"facecolors": (1.0, 1.0, 1.0, 0.6), "edgecolors": INK, "hatch": "||||||"}
SEEN, GREY_SEEN = 0.02, 0.3
NAME_ROOM, MARK_ROOM, MARK_SIZE = 150.0, 130.0, 7.5  # in points


def timeline_figure(
    timeline: Timeline,
    ranks: Sequence[int] | None = None,
    width: float = 11.0,
    title: str | None = None,
    window: tuple[float, float] | None = None,
) -> Figure:
    """Draws streams x ranks over time: kernels coloured by phase, communication hatched, idle time left empty.

    A collective that holds its stream but waits for other ranks is outlined in grey. The end of a bar is veiled and
    striped by as much as it lasts longer because it shares its device or its links with others. More than 16 ranks are
    sampled, and the picture says so; name `ranks` to see others. Any number of kernels can be drawn.

    Args:
        timeline: a priced trace.
        ranks: which ranks, top to bottom; None means all, or 16 of them.
        width: of the figure in inches.
        title: None writes the step time and the cluster.
        window: show only from this to that time, in seconds.

    Raises:
        ValueError: a rank that the trace does not have, or a window that ends before it begins.
    """
    from matplotlib.ticker import StrMethodFormatter

    have = list(timeline.trace.events)
    missing = [rank for rank in ranks or () if rank not in timeline.trace.events]
    if missing:
        raise ValueError(f"the timeline has no rank {missing[0]}; it has {_some(have)}")
    if window is not None and not window[0] < window[1]:
        raise ValueError(f"the window {window} ends before it begins; give (start_s, end_s) with start_s < end_s")
    shown = list(ranks) if ranks is not None else sample_ranks(have)
    start_s, end_s = window or (0.0, timeline.step_time_s or 1e-6)
    rows = timeline_rows(timeline, shown, np.linspace(start_s, end_s, COLUMNS + 1))  # clipped to the window
    with drawing():
        places = places_of(rows)
        height = (max(places) + 1 if places else 1) * (0.24 if len(rows) <= 16 else 0.17)
        figure = new_figure(width, height + 1.55)
        axes = figure.add_subplot()
        unit, unit_s = time_unit(end_s)  # absolute time, so that a window finds itself in the whole picture
        looks = draw_bars(axes, rows, places, unit_s)
        _draw_stretched(axes, rows, places, unit_s)
        marked = _draw_marks(axes, timeline, rows, places, unit_s, (start_s, end_s), 72 * width)
        axes.set_xlim(start_s / unit_s, end_s / unit_s)
        axes.set_ylim((max(places) + 0.6) if places else 1, -0.6)
        axes.set_xlabel(f"time ({unit})")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        label_rows(axes, rows, places)
        if not looks:
            axes.text(0.5, 0.5, "nothing ran on any stream", transform=axes.transAxes, ha="center", color=FAINT_INK)
        heading = title
        if heading is None:
            part = f"{time_text(start_s)} to {time_text(end_s)} of " if window else ""
            heading = f"{part}{time_text(timeline.step_time_s)} on {timeline.cluster.name}"
            if len(shown) < len(have):
                heading += f": {len(shown)} of {len(have)} ranks shown"
        axes.set_title(heading, loc="left", pad=16)
        if _blurred(rows, start_s, end_s):
            note = "pale bars: kernels too short for this picture; the shade is the share of time that they run"
            axes.set_title(note, loc="right", fontsize=8, color=FAINT_INK, pad=16)
        letters_s = np.linspace(start_s, end_s, LETTERS + 1)
        stretched = any(busiest_share(row.stretched, letters_s) >= SEEN for row in rows)
        bars_legend(figure, [look for look in looks if _is_seen(look, rows, letters_s)], marked, stretched)
    return figure


def _some(ranks: Sequence[int]) -> str:
    if not ranks:
        return "none"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, {min(ranks)} to {max(ranks)}"


def places_of(rows: Sequence[Row]) -> list[float]:
    """The height of each row from the top, with some room between ranks."""
    places: list[float] = []
    for i, row in enumerate(rows):
        step = 0.0 if i == 0 else 1.0 + (RANK_GAP if row.rank != rows[i - 1].rank else 0.0)
        places.append((places[-1] if places else 0.0) + step)
    return places


def _blurred(rows: Sequence[Row], start_s: float, end_s: float) -> bool:
    """Whether somewhere a hundred bars or more are, for the most part, too narrow to be seen one by one."""
    column_s = (end_s - start_s) / (COLUMNS / 2)
    crowds = [bars for row in rows for bars in row.bars.values() if len(bars) >= 100]
    return any(np.median(bars[:, 1] - bars[:, 0]) < 2 * column_s for bars in crowds)


def _is_seen(look: Look, rows: Sequence[Row], edges_s: np.ndarray) -> bool:
    least = GREY_SEEN if look == Look(COMPUTE, "") else SEEN
    return any(busiest_share(row.bars[look], edges_s) >= least for row in rows if look in row.bars)


def _paint(look: Look) -> Paint:
    if look.part == COMPUTE:
        return Paint(PHASE_COLOURS.get(look.label, PHASE_COLOURS[""]), "")
    return communication_paint(look.label)


def draw_bars(axes: Axes, rows: Sequence[Row], places: Sequence[float], unit_s: float) -> list[Look]:
    """One collection of rectangles per look, in the order of the legend, which is returned."""
    from matplotlib.collections import PolyCollection

    corners: dict[Look, list[np.ndarray]] = {}
    for row, place in zip(rows, places, strict=True):
        axes.axhline(place + BAR_HEIGHT / 2, color="#e6e6e6", linewidth=0.5, zorder=0)
        for look, bars in row.bars.items():
            corners.setdefault(look, []).append(_boxes(bars, place, unit_s))
    looks = sorted(corners, key=_rank_of_look)
    for look in looks:
        style = {"facecolors": "none", "edgecolors": "#9a9a9a", "linewidths": 0.6}
        if look.part != WAITING:
            paint = _paint(look)
            style = {"facecolors": paint.colour, "edgecolors": "none" if not paint.hatch else INK, "linewidths": 0.0}
            if paint.hatch:
                style["hatch"] = paint.hatch
        boxes = PolyCollection(np.concatenate(corners[look]), label=_name(look), **style)  # type: ignore[arg-type]
        # Bars narrower than a pixel must shade it by their share, not be rounded to all or nothing.
        boxes.set_snap(False)
        axes.add_collection(boxes, autolim=False)
    return looks


def _boxes(bars: np.ndarray, place: float, unit_s: float) -> np.ndarray:
    """The corners of bars, [n, 4, 2]."""
    left, right = bars[:, 0] / unit_s, bars[:, 1] / unit_s
    top, bottom = np.full_like(left, place - BAR_HEIGHT / 2), np.full_like(left, place + BAR_HEIGHT / 2)
    return np.stack([left, bottom, left, top, right, top, right, bottom], axis=1).reshape(-1, 4, 2)


def _draw_stretched(axes: Axes, rows: Sequence[Row], places: Sequence[float], unit_s: float) -> None:
    """A veil over the ends of bars: their colour and hatch are still to be seen below it."""
    from matplotlib.collections import PolyCollection

    boxes = [
        _boxes(row.stretched, place, unit_s) for row, place in zip(rows, places, strict=True) if len(row.stretched)
    ]
    if boxes:
        veil = PolyCollection(np.concatenate(boxes), label=STRETCHED, zorder=2, linewidths=0.0, **VEIL)  # type: ignore[arg-type]
        veil.set_snap(False)
        axes.add_collection(veil, autolim=False)


def _rank_of_look(look: Look) -> tuple[int, int, str]:
    """Compute in the order of a step, then communication by name, then waiting."""
    phases = list(PHASE_COLOURS)
    phase = phases.index(look.label) if look.part == COMPUTE and look.label in phases else len(phases)
    return (COMPUTE, COMMUNICATION, WAITING).index(look.part), phase, look.label


def _name(look: Look) -> str:
    if look.part == WAITING:
        return "waiting for other ranks"
    return look.label or "outside any phase"


def _draw_marks(
    axes: Axes,
    timeline: Timeline,
    rows: Sequence[Row],
    places: Sequence[float],
    unit_s: float,
    window: tuple[float, float],
    width: float,
) -> bool:
    """A thin line at every mark, across the rows of its rank; names above the first rank, where there is room."""
    marked = False
    free_from = -np.inf
    point_s = (window[1] - window[0]) / (width - 110)  # of time, to one point of the axis or a little less
    for rank in dict.fromkeys(row.rank for row in rows):
        own = [place for row, place in zip(rows, places, strict=True) if row.rank == rank]
        marks = [(name, at) for name, at in timeline.marks(rank) if window[0] <= at <= window[1]]
        if not marks:
            continue
        marked = True
        times = np.array([at for _, at in marks]) / unit_s
        axes.vlines(times, min(own) - 0.55, max(own) + 0.55, colors=INK, linewidths=0.6, label="_marks", zorder=3)
        if rank != rows[0].rank:
            continue
        for name, at in sorted(marks, key=lambda mark: mark[1]):
            shown = cut(name, MARK_ROOM, MARK_SIZE)
            long_s = point_s * (text_width(shown, MARK_SIZE) + 6)
            right = at + long_s > window[1]  # it would run out of the picture: write it to the left
            if at - long_s * right < free_from:
                continue
            axes.annotate(
                shown,
                (at / unit_s, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-2 if right else 2, 2),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=MARK_SIZE,
                color=FAINT_INK,
            )
            free_from = at if right else at + long_s
    return marked


def label_rows(axes: Axes, rows: Sequence[Row], places: Sequence[float]) -> None:
    names = [cut(row.stream or "no work", NAME_ROOM, 8.5) for row in rows]
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    room = 16 + max((text_width(name, 8.5) for name in names), default=0.0)
    for rank in dict.fromkeys(row.rank for row in rows):
        own = [place for row, place in zip(rows, places, strict=True) if row.rank == rank]
        axes.annotate(
            f"rank {rank}",
            (0, sum(own) / len(own)),
            xycoords=("axes fraction", "data"),
            xytext=(-room, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontweight="bold",
        )
    axes.spines["left"].set_visible(False)


def bars_legend(
    figure: Figure, looks: Sequence[Look], marked: bool, stretched: bool = False, share: float = 1.0
) -> None:
    """What the bars of a timeline mean, below the figure, in as much of its width as is given."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = []
    for look in looks:
        if look.part == WAITING:
            handles.append(Patch(facecolor="none", edgecolor="#9a9a9a", linewidth=0.6, label=_name(look)))
        else:
            paint = _paint(look)
            handles.append(
                Patch(facecolor=paint.colour, hatch=paint.hatch, edgecolor=INK, linewidth=0.3, label=_name(look))
            )
    if stretched:
        handles.append(
            Patch(facecolor=VEIL["facecolors"], hatch=VEIL["hatch"], edgecolor=INK, linewidth=0.3, label=STRETCHED)
        )
    if marked:
        handles.append(Line2D([], [], color=INK, linewidth=0.6, label="mark (when the host passed it)"))
    legend_below(figure, handles, share=share)
