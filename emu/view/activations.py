"""What activations each rank of a pipeline holds over time: counted in a pure schedule, in bytes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from emu.parallel.pipeline import Schedule, Timed, Times, activations
from emu.view.bars import sample_ranks
from emu.view.pipeline_bars import as_timed, held_bytes, pipeline_ranks, run_start_s, timed_run, unit_of
from emu.view.style import CATEGORY_PAINTS, FAINT_INK, INK, drawing, new_figure
from emu.view.units import byte_unit, bytes_text, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emu.cost.timeline import Timeline

STEPS = 4000  # of a line; more than a picture has columns
PANEL_INCHES = 0.62


class _Line(NamedTuple):
    rank: int
    at: np.ndarray  # in the axis's unit
    held: np.ndarray  # in the axis's unit


def activations_figure(
    what: Schedule | Timed | Any,
    weight_share: float = 0.5,
    width: float = 11.0,
    title: str | None = None,
    timeline: Timeline | None = None,
    times: Times | None = None,
) -> Figure:
    """Draws what activations every rank holds over time, a panel a rank on one scale, each with its peak.

    Of a schedule they are counted, in those of one microbatch on one stage; of a run they are the bytes of its memory's
    category "activations", on the time of the devices. Of more than 16 ranks 16 are shown.

    Args:
        what: a schedule, one with times, or a run (or a window of one) in which a Pipeline was at work.
        weight_share: of a microbatch's activations, what the backward of inputs leaves for that of weights; of schedules.
        width: of the figure in inches.
        title: what stands before the highest peak; None: the schedule's name, or the run's cluster.
        timeline: of the run; None: `what.timeline()`, on its own cluster.
        times: how long things take in a schedule; by default 1 for each of F, I and W, 2 for B. They move what is held,
            and change no peak.

    Raises:
        ValueError: no schedule, and no run of one; a run on real devices, which record no memory; or times for what has
            its own.
        ScheduleError: the schedule cannot run.
    """
    if isinstance(what, (Schedule, Timed)) or not hasattr(what, "timeline"):
        lines, end, name, unit = _counted(what, weight_share, times)
    elif times is not None:
        raise ValueError("a run has its times; give times with a Schedule, not with a run")
    else:
        lines, end, name, unit = _measured(what, timeline)
    return _figure(lines, end, name if title is None else title, unit, width)


class _Unit(NamedTuple):
    time: str
    held: str
    factor: float  # bytes of the unit; 0 where microbatches are counted

    def text(self, value: float) -> str:
        return bytes_text(value * self.factor) if self.factor else f"{value:.4g}"


def _counted(what: Schedule | Timed, weight_share: float, times: Times | None) -> tuple[list[_Line], float, str, _Unit]:
    timed = as_timed(what, times)
    series = activations(timed, weight_share)
    # Where one backward stops and a forward starts, only what is held from then on is seen.
    lines = [
        _Line(rank, *np.array(list(dict(row).items()) or [(0, 0)], dtype=float).T) for rank, row in enumerate(series)
    ]
    name = getattr(what, "name", "a schedule")
    return lines, timed.makespan, name, _Unit(f"time ({unit_of(what, times)})", "microbatches on a stage", 0.0)


def _measured(run: Any, timeline: Timeline | None) -> tuple[list[_Line], float, str, _Unit]:
    if not getattr(run, "has_memory", True):
        raise ValueError("real devices do not record their memory: run the same program on virtual ones")
    timeline = cast("Timeline", run.timeline()) if timeline is None else timeline
    timed, first_s = timed_run(timeline), run_start_s(timeline)
    unit, unit_s = time_unit(timed.makespan)
    found = {rank: held_bytes(run.memory, timeline, rank) for rank in pipeline_ranks(timeline)}
    name, unit_bytes = byte_unit(max((max(held, default=0) for _, held in found.values()), default=0))
    lines = []
    for rank, (times, held) in found.items():
        at = (np.array(times, dtype=float) - first_s) / unit_s
        lines.append(_Line(rank, at.clip(0.0), np.array(held, dtype=float) / unit_bytes))
    label = f"time from the first forward on ({unit})"
    return lines, timed.makespan / unit_s, f"the run on {timeline.cluster.name}", _Unit(label, name, unit_bytes)


def _figure(lines: Sequence[_Line], end: float, name: str, unit: _Unit, width: float) -> Figure:
    from matplotlib.ticker import MaxNLocator

    shown = sample_ranks(range(len(lines)))
    top = max((float(line.held.max(initial=0.0)) for line in lines), default=0.0)
    with drawing():
        figure = new_figure(width, PANEL_INCHES * max(len(shown), 2) + 0.9)
        panels = figure.subplots(max(len(shown), 1), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, place in zip(panels, shown):
            line = _thinned(lines[place])
            at, held = np.append(line.at, max(end, line.at[-1] if len(line.at) else 0.0)), np.append(line.held, 0.0)
            if len(line.held):
                held[-1] = line.held[-1]
            axes.fill_between(at, 0, held, step="post", facecolor=CATEGORY_PAINTS["activations"].colour, linewidth=0)
            axes.step(at, held, where="post", color=INK, linewidth=0.7, label=f"rank {line.rank}")
            axes.set_ylabel(f"rank {line.rank}", rotation=0, ha="right", va="center", labelpad=10, fontweight="bold")
            peak = float(lines[place].held.max(initial=0.0))
            axes.annotate(
                f"peak {unit.text(peak)}",
                (1.0, 0.5),
                xycoords="axes fraction",
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold" if peak == top else "normal",
            )
        panels[0].set_xlim(0, end or 1.0)
        panels[0].set_ylim(0, top * 1.08 or 1.0)
        panels[0].yaxis.set_major_locator(MaxNLocator(2, integer=not unit.factor))
        heading = f"{name}: activations, at most {unit.text(top)}" + ("" if unit.factor else f" {unit.held}")
        panels[0].set_title(heading, loc="left")
        if len(shown) < len(lines):
            said = f"{len(shown)} of {len(lines)} ranks shown"
            panels[0].set_title(said, loc="right", fontsize=8, color=FAINT_INK)
        panels[-1].set_xlabel(unit.time)
        figure.supylabel(f"held ({unit.held})", fontsize=9)
    return figure


def _thinned(line: _Line) -> _Line:
    """About STEPS points that keep every column's highest."""
    if len(line.at) <= STEPS:
        return line
    columns = np.array_split(np.arange(len(line.at)), STEPS // 3)
    kept = np.unique([i for column in columns for i in (column[0], column[np.argmax(line.held[column])], column[-1])])
    return _Line(line.rank, line.at[kept], line.held[kept])
