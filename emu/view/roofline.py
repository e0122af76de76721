"""The roofline: what a kernel reaches, against how much it computes for each byte that it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from emu.hardware import Chip
from emu.spmd import EmuError
from emu.view.labels import cut, text_width
from emu.view.style import CURVE_LOOKS, FAINT_INK, INK, drawing, new_figure
from emu.view.units import rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_POINTS = 140.0  # of a kernel's label


class Work(NamedTuple):
    """One kernel: what it is called in the picture, what it computes and moves at least, and how long it takes."""

    label: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOP for each byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        """What it reaches."""
        return self.flops / self.seconds


def ridge(chip: Chip, dtype: str = "bfloat16") -> float:
    """FLOP a byte from which on arithmetic takes longer than memory, by the chip's data sheet."""
    return chip.peak(dtype) / chip.hbm_bytes_per_s


def roofline_figure(
    chip: Chip,
    series: Mapping[str, Sequence[Work]],
    dtype: str = "bfloat16",
    width: float = 9.5,
    title: str | None = None,
) -> Figure:
    """Draws FLOP/s over FLOP a byte on logarithmic axes: the chip's roof, and each series of kernels as a curve below it.

    The roof by the data sheet is dashed; the one that large kernels keep up is drawn through. Where the two parts of the
    roof meet, memory and arithmetic take equally long.

    Args:
        chip: whose roof it is.
        series: name -> kernels, in the order in which the curve goes through them.
        dtype: of the arithmetic.
        width: of the figure in inches.
        title: above the picture; names the chip where not given.

    Raises:
        EmuError: there is no kernel, or one that computes, moves or takes nothing; HardwareError: no rate for the dtype.
    """
    works = [work for kernels in series.values() for work in kernels]
    if not works or min(min(work[1:]) for work in works) <= 0:
        raise EmuError("there is no kernel to draw", "give kernels that compute, move and take something")
    found = [work.intensity for work in works]
    low, high = min([*found, ridge(chip, dtype) / 20]) / 1.5, max([*found, ridge(chip, dtype) * 6]) * 1.5
    with drawing():
        figure = new_figure(width, 0.56 * width)
        axes = figure.subplots()
        _roofs(axes, chip, dtype, np.geomspace(low, high, 400))
        for i, (name, kernels) in enumerate(series.items()):
            colour, marker = CURVE_LOOKS[i % len(CURVE_LOOKS)]
            xs, ys = [work.intensity for work in kernels], [work.flops_per_s for work in kernels]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.3, label=name, zorder=3)
        _finish(axes, chip, dtype, works, title)
        _name_works(figure, axes, series)
    return figure


def _roofs(axes: Axes, chip: Chip, dtype: str, intensity: np.ndarray) -> None:
    sheet = np.minimum(chip.peak(dtype), chip.hbm_bytes_per_s * intensity)
    kept = np.minimum(chip.flops_per_s(dtype), chip.memory_bytes_per_s * intensity)
    axes.plot(intensity, sheet, color=FAINT_INK, linestyle="--", linewidth=1.0, label="roof by the data sheet")
    axes.plot(intensity, kept, color=INK, linewidth=1.8, label="kept up by large kernels")
    axes.axvline(ridge(chip, dtype), color=FAINT_INK, linewidth=0.7, zorder=0)
    axes.annotate(
        f"{ridge(chip, dtype):.3g} FLOP a byte", (ridge(chip, dtype), 0.3), xycoords=("data", "axes fraction"),
        xytext=(4, 6), textcoords="offset points", fontsize=8, color=FAINT_INK,
    )  # fmt: skip
    middle = intensity[len(intensity) // 8]
    axes.annotate(
        f"memory: {rate_text(chip.hbm_bytes_per_s, 'B/s')}", (middle, chip.hbm_bytes_per_s * middle), xytext=(-4, 8),
        textcoords="offset points", ha="right", fontsize=8.5, color=FAINT_INK,
    )  # fmt: skip
    axes.annotate(
        f"arithmetic: {rate_text(chip.peak(dtype), 'FLOP/s')}", (intensity[-1], chip.peak(dtype)), xytext=(0, 4),
        textcoords="offset points", ha="right", fontsize=8.5, color=FAINT_INK,
    )  # fmt: skip


def _name_works(figure: Figure, axes: Axes, series: Mapping[str, Sequence[Work]]) -> None:
    """Each kernel's label below and right of its point, where no other one is."""
    width, height = (72 * inches - 100 for inches in figure.get_size_inches())
    (left, right), (low, high) = np.log(axes.get_xlim()), np.log(axes.get_ylim())
    taken: list[tuple[float, float, float]] = []  # left, right and height in points
    for i, kernels in enumerate(series.values()):
        for work in kernels:
            x = (np.log(work.intensity) - left) / (right - left) * width
            y = (np.log(work.flops_per_s) - low) / (high - low) * height
            label = cut(work.label, MOST_POINTS, 7.5)
            wide = text_width(label, 7.5) + 4
            turned = x + wide > width  # it would run out of the picture: it stands left of its point
            x -= wide * turned
            end = x + wide
            if any(x < other_end and begin < end and abs(y - at) < 11 for begin, other_end, at in taken):
                continue
            taken.append((x, end, y))
            axes.annotate(
                label, (work.intensity, work.flops_per_s), xytext=(-6 if turned else 6, -9), textcoords="offset points",
                ha="right" if turned else "left", fontsize=7.5, color=CURVE_LOOKS[i % len(CURVE_LOOKS)][0], annotation_clip=False,
            )  # fmt: skip


def _finish(axes: Axes, chip: Chip, dtype: str, works: Sequence[Work], title: str | None) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = [work.flops_per_s for work in works]
    axes.set_ylim(min(rates) / 3, max(*rates, chip.peak(dtype)) * 2.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rate_text(value, "FLOP/s")))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOP for each byte of memory that is moved at least")
    axes.set_title(title or f"roofline of {chip.name}, {dtype}", loc="left")
    axes.set_ylabel("what a kernel reaches")
    axes.legend(loc="lower right")
