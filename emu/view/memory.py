"""Memory over time as a picture: what the bytes of a device are held by, stacked by category."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from emu.view.labels import legend_below
from emu.view.style import FAINT_INK, INK, category_paints, drawing, hatch_ink, new_figure
from emu.view.units import byte_unit, bytes_text, percent_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.cost.timeline import Timeline
    from emu.trace.memory import Memory

# From the bottom up: what stays for the whole run lies under what comes and goes.
STACK = ("parameters", "optimizer", "gradients", "communication", "activations", "temporary")
STEPS = 4000  # more steps than a picture has columns are thinned
IN_SIGHT = 0.5  # the capacity is drawn where the peak reaches this share of it: else it would flatten everything
MOST_PANELS = 8


def memory_figure(
    memory: Memory,
    rank: int | Sequence[int] | None = None,
    timeline: Timeline | None = None,
    width: float = 11.0,
    title: str | None = None,
    only: Sequence[str] | None = None,
) -> Figure:
    """Draws the bytes a device holds, stacked by category, with the peak and, where it is in sight, the capacity.

    Args:
        memory: a run's `Memory`: series(rank), capacity_bytes.
        rank: one rank or several, a panel each; None means the rank with the highest peak.
        timeline: of the same trace: draws over the host's time. None draws over the number of the event.
        width: of the figure in inches.
        title: None names the rank and its peak.
        only: categories that are drawn; None draws all.

    Raises:
        ValueError: a rank that the trace does not have, or more than 8 ranks.
    """
    from matplotlib.ticker import StrMethodFormatter

    have = list(memory.trace.events)
    if rank is None:
        ranks = [max(have, key=lambda r: (memory.peak_bytes(r), -r))] if have else []
    else:
        ranks = [rank] if isinstance(rank, int) else list(rank)
    missing = [r for r in ranks if r not in memory.trace.events]
    if missing:
        raise ValueError(f"there is no memory of rank {missing[0]}; this trace has ranks {min(have)} to {max(have)}")
    if len(ranks) > MOST_PANELS:
        raise ValueError(f"{len(ranks)} ranks are too many for one picture; name at most {MOST_PANELS}")
    capacity = memory.capacity_bytes
    with drawing():
        figure = new_figure(width, 1.0 + (3.2 if len(ranks) < 2 else 1.9 * len(ranks)))
        panels = figure.subplots(max(len(ranks), 1), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        series = {r: stacked_steps(memory, r, only=only) for r in ranks}
        top = max((sizes.sum(axis=0).max() for _, sizes, _ in series.values() if sizes.size), default=0.0)
        unit, unit_bytes = byte_unit(top)
        names: dict[str, None] = {}
        for axes, r in zip(panels, ranks, strict=False):
            events, sizes, categories = series[r]
            names.update(dict.fromkeys(categories))
            x, x_end, label = _axis(memory, r, events, timeline)
            _draw_stack(axes, x, x_end, sizes / unit_bytes, categories)
            axes.set_ylabel(f"memory ({unit})")
            which = f"memory of rank {r}" + (
                f", the highest peak of {len(have)} ranks" if rank is None and len(have) > 1 else ""
            )
            axes.set_title(title if title is not None else which, loc="left")
            if events.size:
                _annotate_peak(axes, x, sizes, unit_bytes)
            own_top = float(sizes.sum(axis=0).max()) if sizes.size else 0.0
            _draw_capacity(axes, capacity, own_top, top, unit_bytes)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            panels[len(ranks) - 1].set_xlabel(label)
        if not top:
            panels[0].text(
                0.5, 0.5, "nothing was allocated", transform=panels[0].transAxes, ha="center", color=FAINT_INK
            )
        _set_height(panels[0], capacity, top, unit_bytes)
        category_legend(figure, list(names))
    return figure


def stacked_steps(
    memory: Memory, rank: int, steps: int = STEPS, only: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The bytes by category after each event, thinned to about `steps` events that keep every column's highest total.

    Returns:
        Event numbers, [n]; bytes, [categories, n], from the bottom of the stack up; the categories that are ever held.
    """
    events, by_category = memory.series(rank)
    if only is not None:
        by_category = {name: line for name, line in by_category.items() if name in only}
    order = [name for name in STACK if name in by_category] + [name for name in by_category if name not in STACK]
    held = [name for name in order if any(by_category[name])]
    at = np.asarray(events, dtype=np.int64)
    sizes = np.array([by_category[name] for name in held], dtype=float).reshape(len(held), len(at))
    if len(at) <= steps:
        return at, sizes, held
    columns = np.array_split(np.arange(len(at)), steps // 3)
    total = sizes.sum(axis=0)
    kept = np.unique([i for column in columns for i in (column[0], column[np.argmax(total[column])], column[-1])])
    return at[kept], sizes[:, kept], held


def _axis(memory: Memory, rank: int, events: np.ndarray, timeline: Timeline | None) -> tuple[np.ndarray, float, str]:
    """Where each step lies, where the axis ends, and what the axis is called."""
    if timeline is None:
        return events.astype(float), float(max(len(memory.trace.events[rank]), 1)), "event number, in program order"
    hosts = np.asarray(timeline.event_times(rank), dtype=float)
    last = [timeline.event_times(r)[-1] for r in timeline.trace.events if len(timeline.event_times(r))]
    end_s = float(max(last, default=0.0)) or 1e-6
    unit, unit_s = time_unit(end_s)
    at = hosts[events] if len(events) else np.empty(0)
    return at / unit_s, end_s / unit_s, f"time of the host ({unit}), which runs ahead of its device"


def _draw_stack(axes: Axes, x: np.ndarray, x_end: float, sizes: np.ndarray, categories: Sequence[str]) -> None:
    """Areas with steps: between two events nothing changes."""
    axes.set_xlim(0, x_end)
    if not len(x):
        return
    x = np.append(x, x_end)
    below = np.zeros(len(x))
    paints = category_paints(categories)
    for name, size in zip(categories, sizes, strict=True):
        above = below + np.append(size, size[-1])
        colour, hatch = paints[name]
        axes.fill_between(
            x,
            below,
            above,
            step="post",
            facecolor=colour,
            hatch=hatch or None,
            edgecolor=hatch_ink(colour),
            linewidth=0.0,
            label=name,
        )
        below = above
    axes.step(x, below, where="post", color=INK, linewidth=0.7)


def _annotate_peak(axes: Axes, x: np.ndarray, sizes: np.ndarray, unit_bytes: float) -> None:
    total = sizes.sum(axis=0)
    peak = int(np.argmax(total))
    right_half = x[peak] > 0.6 * axes.get_xlim()[1]
    axes.plot([x[peak]], [total[peak] / unit_bytes], "o", color=INK, markersize=4, clip_on=False)
    axes.annotate(
        f"peak {bytes_text(float(total[peak]))}",
        (x[peak], total[peak] / unit_bytes),
        xytext=(-7 if right_half else 7, 5),
        textcoords="offset points",
        ha="right" if right_half else "left",
        fontweight="bold",
    )


def _draw_capacity(axes: Axes, capacity: int | None, own_top: float, top: float, unit_bytes: float) -> None:
    if not capacity or not top:
        return
    if top >= IN_SIGHT * capacity:
        axes.axhline(capacity / unit_bytes, color="#b00020", linewidth=1.2, linestyle=(0, (6, 3)))
        axes.annotate(
            f"capacity {bytes_text(capacity)}",
            (0.998, capacity / unit_bytes),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color="#b00020",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    else:
        note = f"capacity {bytes_text(capacity)}: the peak takes {percent_text(own_top / capacity)} of it"
        axes.set_title(note, loc="right", fontsize=8.5, color=FAINT_INK)


def _set_height(axes: Axes, capacity: int | None, top: float, unit_bytes: float) -> None:
    height = max(top, capacity if capacity and top >= IN_SIGHT * capacity else 0.0)
    axes.set_ylim(0, 1.16 * height / unit_bytes or 1.0)


def category_legend(
    figure: Figure, categories: Sequence[str], side: Literal["left", "right"] = "left", share: float = 1.0
) -> None:
    """The colours of memory's categories, below the figure, at its left or right side, in this share of its width."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=hatch_ink(colour), linewidth=0.0, label=name)
        for name, (colour, hatch) in category_paints(categories).items()
    ]
    legend_below(figure, handles, side=side, share=share)
