"""A decade of FLOP/s per device: what each chip peaks at in each number format, by year."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emu.hardware import chip as chip_of
from emu.hardware import chip_names
from emu.spmd import EmuError
from emu.view.style import FAINT_INK, INK, drawing, new_figure
from emu.view.units import rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.hardware import Chip


class Format(NamedTuple):
    """How one number format is drawn: its dtypes, and a colour, a marker and dashes, each of which tells it apart."""

    name: str
    dtypes: tuple[str, ...]
    colour: str
    marker: str
    dashes: Any


FORMATS = (
    Format("float8", ("float8",), "#c0392b", "D", "-"),
    Format("float16, bfloat16", ("bfloat16", "float16"), "#1f3b73", "o", (0, (6, 2))),
    Format("tf32", ("tf32",), "#1b8a5a", "^", (0, (4, 1.5, 1, 1.5))),
    Format("float32", ("float32",), "#e07b28", "s", (0, (2, 1.5))),
    Format("float64", ("float64",), "#8f8f8f", "v", (0, (1, 2))),
)


class Peak(NamedTuple):
    """One drawn point: FLOP/s, whether the matrix unit reaches it, and whether no good source was found for it."""

    flops_per_s: float
    matrix: bool
    unverified: bool


def flops_decade_figure(
    chips: Mapping[str, Chip] | None = None, width: float = 12.0, title: str = "peak of one device"
) -> Figure:
    """Draws each chip as a column at its year: a marker for each number format, filled where the matrix unit reaches it.

    Lines follow the best chip so far in each format. Chips of one year stand side by side, in order of their best peak.

    Args:
        chips: label -> chip; all that emu knows if not given. Those without a year are left out.
        width: of the figure in inches.
        title: above the picture, before how much the best peak grew.

    Raises:
        EmuError: no chip with a year.
    """
    chips = {name: chip_of(name) for name in chip_names()} if chips is None else chips
    dated = {label: chip for label, chip in chips.items() if chip.year is not None}
    if not dated:
        raise EmuError("there is no chip with a year to draw", "give year in the chip's TOML file, or no chips for all")
    columns = _columns(dated)
    with drawing():
        figure = new_figure(width, 0.56 * width)
        axes = figure.subplots()
        for label, x in columns.items():
            _draw_chip(axes, label, dated[label], x)
        ends = [end for style in FORMATS if (end := _draw_best(axes, style, dated, columns))]
        _finish(axes, dated, columns, title)
        _name_ends(axes, ends, 72 * 0.56 * width - 70)
    return figure


def peak_of(chip: Chip, style: Format) -> Peak | None:
    """A chip's best peak in a number format; None if it has none of its own there."""
    rates = [(chip.peak_flops[d], d) for d in style.dtypes if d in chip.peak_flops]
    if not rates:
        return None
    rate, dtype = max(rates)
    unverified = chip.sources.get(f"peak_flops.{dtype}", "").startswith("unverified")
    return Peak(rate, dtype in chip.flops_by_unit()["matrix"], unverified)


def _columns(chips: Mapping[str, Chip]) -> dict[str, float]:
    """Where each chip stands: its year, those of one year spread over most of it."""
    by_year: dict[int, list[str]] = {}
    for label, chip in sorted(chips.items(), key=lambda item: max(item[1].peak_flops.values())):
        by_year.setdefault(chip.year or 0, []).append(label)
    return {
        label: year + 0.9 * ((i + 0.5) / len(labels) - 0.5)
        for year, labels in sorted(by_year.items())
        for i, label in enumerate(labels)
    }


def _draw_chip(axes: Axes, label: str, chip: Chip, x: float) -> None:
    from matplotlib.patheffects import withStroke

    peaks = {style: peak for style in FORMATS if (peak := peak_of(chip, style))}
    rates = [peak.flops_per_s for peak in peaks.values()]
    axes.plot([x, x], [min(rates), max(rates)], color="#c8c8c8", linewidth=0.9, zorder=1)
    for style, peak in peaks.items():
        axes.plot(
            [x],
            [peak.flops_per_s],
            style.marker,
            color=style.colour,
            markersize=5.5,
            markerfacecolor=style.colour if peak.matrix else "white",
            zorder=3,
        )
    star = "*" if any(peak.unverified for peak in peaks.values()) else ""
    named = axes.annotate(
        label + star, (x, max(rates)), xytext=(0, 6), textcoords="offset points", rotation=90, ha="center", fontsize=6.8
    )
    named.set_path_effects([withStroke(linewidth=2.2, foreground="white")])  # read over lines that pass behind it
    named.set_zorder(4)


class End(NamedTuple):
    """Where a format's line ends, at the best of its chips."""

    name: str
    x: float
    flops_per_s: float


def _name_ends(axes: Axes, ends: Sequence[End], height: float) -> None:
    """The formats' names beside their lines' ends, moved apart where these lie close. `height` of the axes is in points."""
    low, high = np.log(axes.get_ylim())
    free = -np.inf
    for name, x, rate in sorted(ends, key=lambda end: end.flops_per_s):
        own = (np.log(rate) - low) / (high - low) * height
        free = max(own, free)
        axes.annotate(
            name, (x, rate), xytext=(4, free - own), textcoords="offset points", color=INK, va="center", fontsize=8.5
        )
        free += 12


def _draw_best(axes: Axes, style: Format, chips: Mapping[str, Chip], columns: Mapping[str, float]) -> End | None:
    """A step for each chip that beats all before it in this format."""
    xs, best = [], []
    for label, x in columns.items():
        peak = peak_of(chips[label], style)
        if peak and (not best or peak.flops_per_s > best[-1]):
            xs.append(x)
            best.append(peak.flops_per_s)
    if not best:
        return None
    end = max(columns.values()) + 0.3
    axes.step(
        [*xs, end], [*best, best[-1]], where="post", color=style.colour, linestyle=style.dashes, linewidth=1.1, zorder=2
    )
    return End(style.name, end, best[-1])


def _finish(axes: Axes, chips: Mapping[str, Chip], columns: Mapping[str, float], title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullFormatter

    years = [chip.year or 0 for chip in chips.values()]
    best = {label: max(chip.peak_flops.values()) for label, chip in chips.items()}
    axes.set_yscale("log")
    low = min(min(chip.peak_flops.values()) for chip in chips.values())
    axes.set_ylim(low / 1.6, max(best.values()) * 5)  # room for the labels
    axes.set_xlim(min(years) - 0.6, max(years) + 2.1)
    axes.set_xticks(range(min(years), max(years) + 1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rate_text(value, "FLOP/s")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6, zorder=0)
    axes.set_xlabel("year of announcement")
    axes.set_ylabel("peak")
    axes.set_title(f"{title}: {growth(chips)}", loc="left")
    handles = [
        Line2D([], [], color=s.colour, marker=s.marker, linestyle=s.dashes, markersize=5.5, linewidth=1.1, label=s.name)
        for s in FORMATS
        if any(peak_of(chip, s) for chip in chips.values())
    ]
    for fill, words in ((FAINT_INK, "filled: on the matrix unit"), ("white", "hollow: on the vector unit")):
        handles.append(
            Line2D([], [], color=FAINT_INK, marker="o", linestyle="", markerfacecolor=fill, markersize=5.5, label=words)
        )
    axes.legend(handles=handles, loc="upper left", ncols=1)
    axes.annotate(
        "dense rates by data sheets, without sparsity; lines follow the best so far; * a rate without a good source",
        (1, 0.012),
        xycoords="axes fraction",
        ha="right",
        fontsize=7.5,
        color=FAINT_INK,
    )


def growth(chips: Mapping[str, Chip]) -> str:
    """How much the best peak of the first year's chips grew to the best of all, and how much of it in one format."""
    first_year = min(chip.year or 0 for chip in chips.values())
    before = {label: chip for label, chip in chips.items() if chip.year == first_year}
    first = max(before, key=lambda label: max(before[label].peak_flops.values()))
    last = max(chips, key=lambda label: max(chips[label].peak_flops.values()))
    (old, old_dtype), (new, new_dtype) = (
        max((rate, dtype) for dtype, rate in chips[label].peak_flops.items()) for label in (first, last)
    )
    years = (chips[last].year or 0) - first_year
    said = f"{new / old:,.0f} x in {years} years, from {first} ({old_dtype}) to {last} ({new_dtype})"
    same = max((chip.peak_flops.get(old_dtype, 0.0) for chip in chips.values()), default=0.0)
    return said if new_dtype == old_dtype else f"{said}; {old_dtype} alone {same / old:,.0f} x"
