"""Where a program stands between two steps, as a picture: streams of every rank up to now with a cursor, and memory.

Drawn from plain data (`Stepper.state()`) and the record so far, priced: provisional, since what comes may contend for the
same links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.view.bars import Row, sample_ranks, timeline_rows
from emu.view.labels import cut
from emu.view.memory import STACK, category_legend
from emu.view.style import CATEGORY_PAINTS, FAINT_INK, INK, OTHER_CATEGORY, drawing, new_figure
from emu.view.timeline import COLUMNS, bars_legend, draw_bars, label_rows, places_of
from emu.view.units import byte_unit, bytes_text, time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.cost.timeline import Timeline

RECENT = 120  # spans of the busiest rank that are shown: earlier ones are left out
CURSOR = "#c0392b"
ROW_INCHES = 0.46


def stepping_figure(state: Mapping[str, Any], timeline: Timeline | None, width: float = 13.0) -> Figure:
    """Draws ranks x streams up to now, where every rank's host stands, and its memory by category.

    Args:
        state: what `Stepper.state()` or `Moment.state()` says.
        timeline: the record so far, priced (`Moment.timeline()`); None where it cannot be.
        width: of the figure in inches.
    """
    ranks = _shown(state)
    window = _window(timeline, ranks)
    rows = _rows(timeline, ranks, window)
    with drawing():
        places = places_of(rows)
        height = (max(places) + 1 if places else 1) * ROW_INCHES
        figure = new_figure(width, max(height, 1.2) + 1.7)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.2, 1.0))
        unit, unit_s = time_unit(window[1])
        looks = draw_bars(left, rows, places, unit_s)
        left.set_xlim(window[0] / unit_s, (window[1] + 0.04 * (window[1] - window[0])) / unit_s)
        left.set_ylim((max(places) + 0.75) if places else 1, -0.75)
        left.set_xlabel(f"time so far ({unit}), provisional; the lines are where each rank's host stands")
        label_rows(left, rows, places)
        left.set_title(_title(state), loc="left")
        if timeline is None:
            left.text(0.5, 0.5, "no time can be told yet", transform=left.transAxes, ha="center", color=FAINT_INK)
        else:
            _draw_cursors(left, state, rows, places, unit_s, window)
        _draw_memory(right, state, rows, places)
        bars_legend(figure, looks, False, share=0.55)  # two legends share what is below
        held = [c for c in STACK if any(r["hbm"].get(c) for r in state["ranks"])]
        category_legend(figure, held, side="right", share=0.45)
    return figure


def _shown(state: Mapping[str, Any]) -> list[int]:
    """At most 16 ranks, among them the one that is next."""
    ranks = [r["rank"] for r in state["ranks"]]
    shown = sample_ranks(ranks)
    coming = state["op"]["rank"] if state["op"] else None
    if coming is not None and coming not in shown:
        shown = sorted([*shown[:-1], coming])
    return shown


def _window(timeline: Timeline | None, ranks: Sequence[int]) -> tuple[float, float]:
    """The latest part of the time so far."""
    if timeline is None or not timeline.step_time_s:
        return 0.0, 1e-6
    starts = [[span.start_s for span in timeline.spans[r]] for r in ranks]
    busiest = max(starts, key=len, default=[])
    start_s = min(busiest[-RECENT:]) if len(busiest) > RECENT else 0.0
    return start_s, max(timeline.step_time_s, start_s + 1e-9)


def _rows(timeline: Timeline | None, ranks: Sequence[int], window: tuple[float, float]) -> list[Row]:
    if timeline is None:
        return [Row(rank, "", {}) for rank in ranks]
    return timeline_rows(timeline, ranks, np.linspace(*window, COLUMNS + 1))


def _title(state: Mapping[str, Any]) -> str:
    if state["error"]:
        return f"step {state['index']}: ended by {state['error']['kind']}"
    if state["ended"]:
        return f"step {state['index']}: the program has ended"
    op = state["op"]
    time = (
        "" if state["provisional_s"] is None else f", {time_text(state['provisional_s'])} so far on {state['cluster']}"
    )
    return f"before step {state['index']}: rank {op['rank']} {_cut(op['label'], 40)} ({op['line']}){time}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _own(rows: Sequence[Row], places: Sequence[float], rank: int) -> list[float]:
    return [place for row, place in zip(rows, places, strict=True) if row.rank == rank]


def _draw_cursors(
    axes: Axes,
    state: Mapping[str, Any],
    rows: Sequence[Row],
    places: Sequence[float],
    unit_s: float,
    window: tuple[float, float],
) -> None:
    """A line where every rank's host stands; thick and with a triangle at the rank that is next."""
    for r in state["ranks"]:
        own, at = _own(rows, places, r["rank"]), r["host_s"] or 0.0
        if not own or r["state"] == "not begun":
            continue
        at = max(at, window[0]) / unit_s
        coming = r["state"] == "next"
        axes.vlines(
            [at],
            min(own) - 0.52,
            max(own) + 0.52,
            colors=CURSOR if coming else FAINT_INK,
            linewidths=2.2 if coming else 1.0,
            linestyles="solid" if coming else (0, (3, 2)),
            zorder=4,
        )
        if coming:
            axes.plot([at], [min(own) - 0.56], "v", color=CURSOR, markersize=6, zorder=5, clip_on=False)


def _draw_memory(axes: Axes, state: Mapping[str, Any], rows: Sequence[Row], places: Sequence[float]) -> None:
    """A stacked bar for every rank, and above it what the rank did last and does next."""
    drawn = [r for r in state["ranks"] if _own(rows, places, r["rank"])]
    top = max((sum(r["hbm"].values()) for r in drawn), default=0)
    unit, unit_bytes = byte_unit(top)
    for r in drawn:
        own = _own(rows, places, r["rank"])
        at, begins = sum(own) / len(own), 0.0
        for name in STACK:
            size = r["hbm"].get(name, 0) / unit_bytes
            colour, hatch = CATEGORY_PAINTS.get(name, OTHER_CATEGORY)
            axes.barh(
                at + 0.12, size, 0.42, begins, color=colour, hatch=hatch or None, edgecolor="#ffffff", linewidth=0.0
            )
            begins += size
        axes.annotate(
            f" {bytes_text(sum(r['hbm'].values()))}", (begins, at + 0.12), va="center", fontsize=8.0, color=INK
        )
        coming = r["state"] == "next"
        axes.annotate(
            cut(_doing(r), 230.0, 7.5, coming),
            (0, at - 0.3),
            va="center",
            fontsize=7.5,
            fontweight="bold" if coming else "normal",
            color=CURSOR if coming else INK,
            annotation_clip=False,
        )
    axes.set_xlim(0, 1.3 * top / unit_bytes or 1.0)
    axes.set_xlabel(f"device memory ({unit}) of {bytes_text(state['capacity_bytes'])}")
    axes.set_title("last, then next", loc="left")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelleft=False)


def _doing(r: Mapping[str, Any]) -> str:
    last = r["last"]["label"] if r["last"] else ""
    if r["state"] == "waiting":
        return _cut(f"waits in {r['waits_in']}", 52)
    if r["state"] in ("failed", "ended", "not begun"):
        return r["state"]
    coming = r["next"]["label"] if r["next"] else "…"
    return f"{_cut(last, 24) or 'begins'} → {_cut(coming, 28)}"
