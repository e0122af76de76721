"""Pipelines as pictures: who does what when, of a pure schedule and of a run, and what activations each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emu.parallel.pipeline import Schedule, Timed, Times
from emu.parallel.pipeline.actions import COMPUTE, B, F, I, W
from emu.view.bars import merge
from emu.view.labels import legend_below
from emu.view.pipeline_bars import (
    as_timed,
    as_timeline,
    check_ran,
    chunks_of,
    measured_times,
    pipeline_ranks,
    timed_run,
    unit_of,
)
from emu.view.style import FAINT_INK, INK, drawing, ink_on, new_figure
from emu.view.units import percent_text, time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.cost.timeline import Timeline

# The first and the last stage of a rank; of every two kinds all shades differ in luminance.
SHADES = {
    F: ("#d3e8f7", "#a9cdea"),
    W: ("#8bbc86", "#6ca269"),
    I: ("#c0672f", "#96501f"),
    B: ("#274884", "#132a54"),
}
NAMES = {F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights"}
BAR_HEIGHT = 0.84
DIGIT_POINTS, MOST_POINTS = 3.2, 8.0  # the narrowest digit that can be read, the largest size of letters
DIGIT_WIDTH = 0.64  # of a letter's size
EDGE_POINTS = 2.5  # narrower bars have no edges: nothing would be left between


class Box(NamedTuple):
    """A bar: from left to right, top and bottom as shares of the row."""

    left: float
    right: float
    top: float
    bottom: float
    row: int
    kind: str
    chunk: int
    microbatch: int | None


def schedule_figure(
    schedule: Schedule | Timed, times: Times | None = None, width: float = 11.0, title: str | None = None
) -> Figure:
    """Draws what every rank does when, if each action starts as soon as it can. Idle time is left empty.

    Pale and dark shades of a colour are the stages of a rank, first to last. What runs as a pair is split: one above the
    other. Numbers are microbatches, where there is room.

    Args:
        schedule: a schedule, or one with times.
        times: how long things take; by default 1 for each of F, I and W, 2 for B.
        width: of the figure in inches.
        title: what stands before makespan and bubble; None: the schedule's name.

    Raises:
        ValueError: no schedule, or times for one that has its own.
        ScheduleError: the schedule cannot run.
    """
    one = as_timed(schedule, times)
    name = title if title is not None else getattr(schedule, "name", "a schedule")
    return _figure([_Panel(one, name, f"time ({unit_of(schedule, times)})", 1.0, range(len(one.rows)), False)], width)


def run_schedule_figure(
    timeline: Timeline | Any, ranks: Sequence[int] | None = None, width: float = 11.0, title: str | None = None
) -> Figure:
    """Draws the same of a run: when each action was done, with what kernels, transfers and waiting really cost.

    An action's bar goes from the start of its first kernel to the end of its last one; idle time is what lies between.

    Args:
        timeline: of a run, or of a window of one, in which a Pipeline was at work; or that run or window itself.
        ranks: those of a pipeline, in its order; None: of the first one.
        width: of the figure in inches.
        title: what stands before makespan and bubble; None: the cluster.

    Raises:
        ValueError: it is no timeline, or nothing in it is an action of a pipeline.
    """
    return _figure([_run_panel(as_timeline(timeline), ranks, title)], width)


def side_by_side(
    schedule: Schedule,
    timeline: Timeline | Any,
    times: Times | None = None,
    width: float = 11.0,
    title: str | None = None,
) -> Figure:
    """Draws what a schedule says above what a run of it did, on one axis of time.

    Args:
        schedule: what was run: `pipe.schedule`, or the same made again.
        timeline: of the run, or of a window of it, of one step; or that run or window itself.
        times: in seconds; None measures them in the run, the median of each stage's, with communication free. What the
            two pictures differ in is then what transfers cost, and microbatches that are unlike the others.
        width: of the figure in inches.
        title: what stands before makespan and bubble of the schedule; None: its name.

    Raises:
        ValueError: no Schedule; nothing in the timeline is an action of a pipeline; or its ranks did something else than
            the schedule says.
    """
    timeline = as_timeline(timeline)
    check_ran(schedule, timeline)
    run = _run_panel(timeline, None, None)
    said = as_timed(schedule, measured_times(run.timed, schedule) if times is None else times)
    what = "with the run's times, communication free" if times is None else "with the given times"
    name = f"{schedule.name if title is None else title}, {what}"
    return _figure([_Panel(said, name, run.label, run.unit, run.ranks), run], width)


class _Panel(NamedTuple):
    timed: Timed
    name: str
    label: str  # of the axis
    unit: float  # of it, in what times are given in
    ranks: Sequence[int]
    in_seconds: bool = True


def _run_panel(timeline: Timeline, ranks: Sequence[int] | None, title: str | None) -> _Panel:
    run = timed_run(timeline, ranks)
    unit, unit_s = time_unit(run.makespan)
    label = f"time from the first forward on ({unit})"
    name = f"the run on {timeline.cluster.name}" if title is None else title
    return _Panel(run, name, label, unit_s, ranks if ranks is not None else pipeline_ranks(timeline))


def heading(panel: _Panel) -> str:
    """Name, makespan and bubble."""
    timed = panel.timed
    length = time_text(timed.makespan) if panel.in_seconds else f"{timed.makespan:,.6g}"
    return f"{panel.name}: makespan {length}, bubble {percent_text(timed.bubble_fraction)}"


def _figure(panels: Sequence[_Panel], width: float) -> Figure:
    with drawing():
        rows = sum(max(len(panel.timed.rows), 1) for panel in panels)
        row_inches = 0.3 if rows <= 10 else 0.22
        heights = [max(len(panel.timed.rows), 1) * row_inches + 0.1 for panel in panels]
        figure = new_figure(width, sum(heights) + 0.62 * len(panels) + 0.6)
        many = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        end = max(panel.timed.makespan / panel.unit for panel in panels) or 1.0
        seen: dict[str, int] = {}
        for axes, panel in zip(many, panels):
            boxes = _boxes(panel.timed, panel.unit)
            for box in boxes:
                seen[box.kind] = max(seen.get(box.kind, 0), box.chunk + 1)
            axes.set_xlim(0, end)
            axes.set_ylim(len(panel.timed.rows) - 0.5, -0.5)
            axes.set_yticks(range(len(panel.timed.rows)), [f"rank {rank}" for rank in panel.ranks])
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            axes.set_title(heading(panel), loc="left")
            points = (width - 0.9) * 72 / end  # of a unit of time
            chunks = max(seen.values(), default=1)
            numbered = _draw(axes, boxes, points, row_inches, chunks)
            notes = ["numbers: microbatches"] * numbered + ["shades: a rank's stages, first to last"] * (chunks > 1)
            axes.set_title("; ".join(notes), loc="right", fontsize=8, color=FAINT_INK)
            if not boxes:
                axes.text(0.5, 0.5, "no rank computes", transform=axes.transAxes, ha="center", color=FAINT_INK)
        many[-1].set_xlabel(panels[-1].label)
        _legend(figure, seen)
    return figure


def _boxes(timed: Timed, unit: float) -> list[Box]:
    boxes = []
    for place, row in enumerate(timed.rows):
        chunk = chunks_of(row)
        for start, stop, action in row:
            parts = [part for part in action.each() if part.kind in COMPUTE]
            for i, part in enumerate(parts):
                top, bottom = place - BAR_HEIGHT / 2, place + BAR_HEIGHT / 2
                top, bottom = (top + (bottom - top) * (i + of) / len(parts) for of in (0, 1))
                boxes.append(
                    Box(start / unit, stop / unit, top, bottom, place, part.kind, chunk[part.stage], part.microbatch)
                )
    return boxes


def shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of an action on the chunk-th of a rank's stages."""
    first, last = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in SHADES[kind])
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(first, last))


def _draw(axes: Axes, boxes: Sequence[Box], points: float, row_inches: float, chunks: int) -> bool:
    """Whether there was room for numbers."""
    from matplotlib.collections import PolyCollection

    numbered = False
    groups: dict[tuple[str, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.kind, box.chunk), []).append(box)
    for (kind, chunk), some in groups.items():
        sides = np.array([(b.left, b.right, b.top, b.bottom) for b in some], dtype=float)
        left, right, top, bottom = sides.T
        corners = _corners(left, right, top, bottom)
        colour = shade(kind, chunk, chunks)
        edged = float(np.median(right - left)) * points >= EDGE_POINTS
        if not edged:
            corners = _joined(left, right, top, bottom)
        bars = PolyCollection(
            corners,  # type: ignore[arg-type]
            facecolors=colour,
            edgecolors="#ffffff" if edged else "none",
            linewidths=0.5 if edged else 0.0,
            label=f"{kind}{chunk}",
        )
        bars.set_snap(edged)
        axes.add_collection(bars, autolim=False)
        numbered |= _number(axes, some, colour, points, row_inches)
    return numbered


def _corners(left: np.ndarray, right: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """[n, 4, 2]"""
    return np.stack([left, bottom, left, top, right, top, right, bottom], axis=1).reshape(-1, 4, 2)


def _joined(left: np.ndarray, right: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """The corners of bars, those that touch made one: seams between bars of a pixel's width would be stripes."""
    parts = []
    for low, high in sorted({*zip(top, bottom)}):
        own = (top == low) & (bottom == high)
        bars = merge(left[own], right[own])
        parts.append(_corners(bars[:, 0], bars[:, 1], np.full(len(bars), low), np.full(len(bars), high)))
    return np.concatenate(parts)


def _number(axes: Axes, boxes: Sequence[Box], colour: str, points: float, row_inches: float) -> bool:
    """The microbatches' numbers where they can be read, all as large as the narrowest of these bars lets them be."""
    digits = max(len(str(box.microbatch)) for box in boxes) + 0.4
    boxes = [box for box in boxes if points * (box.right - box.left) >= DIGIT_POINTS * digits]
    if not boxes:
        return False
    room = min(points * (box.right - box.left) for box in boxes) / digits
    tall = min((box.bottom - box.top) * row_inches * 72 for box in boxes)
    size = min(room / DIGIT_WIDTH, 0.9 * tall, MOST_POINTS)
    ink = ink_on(colour)
    for box in boxes:
        text = axes.text(
            (box.left + box.right) / 2,
            (box.top + box.bottom) / 2,
            str(box.microbatch),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color=ink,
        )
        text.set_in_layout(False)  # else every number is measured
    return True


def _legend(figure: Figure, seen: dict[str, int]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    chunks = max(seen.values(), default=1)
    kinds = [kind for kind in (F, B, I, W) if kind in seen]
    shown = range(chunks) if chunks <= 4 else (0, chunks - 1)
    handles = [
        tuple(Patch(facecolor=shade(kind, c, chunks), edgecolor=INK, linewidth=0.3) for c in shown) for kind in kinds
    ]
    labels = [f"{kind}: {NAMES[kind]}" for kind in kinds]
    if not handles:
        return
    legend_below(
        figure,
        handles,
        labels,
        handlelength=1.6 * len(shown),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
    )
