"""Predicted against measured: a point for each run, by source, and how the errors are spread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from emu.view.labels import legend_below
from emu.view.style import CURVE_LOOKS, FAINT_INK, drawing, new_figure
from emu.view.units import TIME_UNITS, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BAND, BAND_COLOUR = 0.08, "#dfe7f2"  # error that is promised in the median
BIN = 0.02  # of the histogram of errors
EDGE = 0.5  # errors beyond are drawn at the edge
NAME = 46  # characters of a source's name
TITLE = "Step time, predicted against measured"


@dataclass(frozen=True)
class Point:
    """A run: seconds measured and predicted, and where it was read."""

    source: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Signed and relative."""
        return self.predicted_s / self.measured_s - 1


Group = tuple[str, list[Point]]


def validated_figure(points: Iterable[Point], title: str = TITLE) -> Figure:
    """Seconds of a step, predicted over measured on logarithmic axes with a band of 8 %, and a histogram of errors.

    Args:
        points: one for each run; each source has a colour and a marker of its own, those with most runs first.
        title: above the picture; the median and mean error follow it.

    Raises:
        ValueError: there is no point.
    """
    points = list(points)
    if not points:
        raise ValueError("there is no run to draw")
    by_source: dict[str, list[Point]] = {}
    for point in points:
        by_source.setdefault(point.source, []).append(point)
    groups = sorted(by_source.items(), key=lambda item: -len(item[1]))
    sizes = [abs(point.error) for point in points]
    with drawing():
        figure = new_figure(11.5, 8.2)
        panels = figure.subplot_mosaic([["times", "errors"], ["times", "spread"]], width_ratios=(1.15, 1))
        _times(panels["times"], groups, points)
        _errors(panels["errors"], groups)
        _spread(panels["spread"], points)
        legend_below(figure, _legend(groups), side="center", size=7.5, title="sources, and how many runs")
        mean = sum(sizes) / len(sizes)
        said = f"{title}: {len(points)} runs, median error {percent_text(median(sizes))}, mean {percent_text(mean)}"
        figure.suptitle(said, x=0.01, ha="left", fontsize=11)
    return figure


def _times(axes: Axes, groups: Sequence[Group], points: Sequence[Point]) -> None:
    times = [time for point in points for time in (point.measured_s, point.predicted_s)]
    low, high = min(times) / 1.5, max(times) * 1.5
    ends = [low, high]
    axes.fill_between(ends, [x * (1 - BAND) for x in ends], [x * (1 + BAND) for x in ends], color=BAND_COLOUR, zorder=0)
    axes.plot(ends, ends, color=FAINT_INK, linewidth=0.8, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal", anchor="N")
    for axis in (axes.xaxis, axes.yaxis):
        _in_time(axis)
    _draw(axes, groups, lambda point: point.predicted_s)
    axes.set_xlabel("measured time of a step")
    axes.set_ylabel("predicted time of a step")
    axes.set_title(f"on the line: exact; shaded: within {100 * BAND:.0f} %", loc="left", fontsize=9)


def _errors(axes: Axes, groups: Sequence[Group]) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.axhspan(-BAND, BAND, color=BAND_COLOUR, zorder=0)
    axes.axhline(0, color=FAINT_INK, linewidth=0.8, zorder=1)
    axes.set_xscale("log")
    _in_time(axes.xaxis)
    _draw(axes, groups, lambda point: _seen(point.error))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.set_ylim(-EDGE * 1.04, EDGE * 1.04)
    axes.set_xlabel("measured time of a step")
    axes.set_ylabel("error")
    axes.set_title(f"error: predicted / measured - 1; beyond {100 * EDGE:.0f} % at the edge", loc="left", fontsize=9)


def _spread(axes: Axes, points: Sequence[Point]) -> None:
    from matplotlib.ticker import PercentFormatter

    errors = [_seen(point.error) for point in points]
    half = round(EDGE / BIN)
    axes.axvspan(-BAND, BAND, color=BAND_COLOUR, zorder=0)
    axes.hist(errors, bins=[i * BIN for i in range(-half, half + 1)], color="#234b87", edgecolor="white", linewidth=0.4)
    middle = median(point.error for point in points)
    axes.axvline(middle, color="#e07b28", linewidth=1.4, zorder=3)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    axes.set_xlim(-EDGE * 1.04, EDGE * 1.04)
    axes.set_xlabel("error")
    axes.set_ylabel("runs")
    within = sum(abs(point.error) <= BAND for point in points) / len(points)
    axes.set_title(
        f"{100 * within:.0f} % of runs within {100 * BAND:.0f} %; half of all errors lie below {100 * middle:+.1f} %",
        loc="left",
        fontsize=9,
    )


def _draw(axes: Axes, groups: Sequence[Group], height: Callable[[Point], float]) -> None:
    for i, (_, group) in enumerate(groups):  # sources with few runs lie on top
        colour, marker = CURVE_LOOKS[i % len(CURVE_LOOKS)]
        axes.plot(
            [point.measured_s for point in group],
            [height(point) for point in group],
            linestyle="",
            marker=marker,
            markersize=4.6,
            markerfacecolor=colour,
            markeredgecolor="white",
            markeredgewidth=0.35,
            zorder=2 + 0.01 * i,
            clip_on=False,
        )
    axes.grid(color="#eeeeee", linewidth=0.6, zorder=0)


def _legend(groups: Sequence[Group]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    looks = [CURVE_LOOKS[i % len(CURVE_LOOKS)] for i in range(len(groups))]
    return [
        Line2D(
            [], [], linestyle="", color=colour, marker=marker, markersize=5, label=f"{_short(source)} ({len(group)})"
        )
        for (colour, marker), (source, group) in zip(looks, groups)
    ]


def _seen(error: float) -> float:
    return min(max(error, -EDGE), EDGE)


def _short(title: str) -> str:
    """A title without its subtitle."""
    text = re.split(r": | \(", title, maxsplit=1)[0]
    return text if len(text) <= NAME else text[: NAME - 1].rstrip() + "…"


def _in_time(axis: Axis) -> None:
    """Labels a logarithmic axis of seconds: 0.1 is "100 ms"."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def label(seconds: float, _: object) -> str:
        name, length = next(((n, s) for n, s in TIME_UNITS if seconds >= 0.99 * s), TIME_UNITS[-1])
        return f"{seconds / length:g} {name}"

    axis.set_major_formatter(FuncFormatter(label))
    axis.set_minor_formatter(NullFormatter())
