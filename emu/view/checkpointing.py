"""What checkpointing policies cost: peak memory against compute for one model, and how both grow with its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emu.parallel.checkpointing import Policy
from emu.view.labels import legend_below, text_width
from emu.view.style import CURVE_COLOURS, CURVE_MARKERS, FAINT_INK, INK, drawing, new_figure
from emu.view.units import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALONE = ("none", "full", "sqrt", "halving", "naive")
FAMILIES = {"every": "every:C, one level of segments", "repeated": "repeated:C, from the first input each time"}
GROWTH = ("none", "full", "every:4", "sqrt", "halving", "repeated:4", "naive")
LAYERS = (4, 8, 16, 32, 64, 128)
REACHED = "#f3f3f3"
COLOURS, MARKERS = (*CURVE_COLOURS, "#2a9db0"), ("", *CURVE_MARKERS[1:], "*")


class Cost(NamedTuple):
    """What one policy costs.

    Fields:
        compute: of a step, in that of a step without checkpointing, where backward takes twice a forward.
        memory: at the peak, of layers and kept inputs.
    """

    compute: float
    memory: float


def cost_of(policy: Policy, input_bytes: int, layer_bytes: int) -> Cost:
    return Cost(
        1 + policy.recomputed / (3 * policy.layers) if policy.layers else 1.0,
        policy.peak_bytes(input_bytes, layer_bytes),
    )


def frontier_figure(
    layers: int,
    input_bytes: int,
    layer_bytes: int,
    measured: Mapping[str, tuple[int, int]] | None = None,
    policies: Sequence[str | Policy] = ALONE,
    width: float = 8.5,
    title: str | None = None,
) -> Figure:
    """Draws peak activation memory against a step's compute, a point a policy; the best lie on the lower left edge.

    Args:
        layers: of the model, alike.
        input_bytes: of a layer's input, for one microbatch.
        layer_bytes: that a layer keeps without checkpointing, its input included.
        measured: policy -> layer forwards that were added, and peak bytes of layers, in a run.
        policies: which stand by their names, besides the two families every:C and repeated:C of all C that divide the layers.
        width: of the figure in inches.
        title: above the picture; None: says how many layers.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    made = [p if isinstance(p, Policy) else Policy.named(p, layers) for p in policies]
    points = {p.name: cost_of(p, input_bytes, layer_bytes) for p in made}
    sizes = [c for c in range(1, layers + 1) if layers % c == 0]
    lines = {
        family: {c: cost_of(Policy.named(f"{family}:{c}", layers), input_bytes, layer_bytes) for c in sizes}
        for family in FAMILIES
    }
    everything = [*points.values(), *(cost for line in lines.values() for cost in line.values())]
    unit, unit_bytes = byte_unit(min(cost.memory for cost in everything))
    with drawing():
        figure = new_figure(width, 5.0)
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        _edge(axes, everything, unit_bytes)
        named = {(cost.compute, cost.memory) for cost in points.values()}
        for i, (family, line) in enumerate(lines.items()):
            x, y = zip(*line.values())
            label, colour = FAMILIES[family], CURVE_COLOURS[i + 1]
            axes.plot(x, np.array(y) / unit_bytes, color=colour, linewidth=1.2, marker=".", zorder=2, label=label)
            for c, cost in line.items():
                own = (cost.compute, cost.memory) in named
                if c not in (1, layers) and not own:  # which have names: full and naive, or all layers at once
                    left = family == "every"
                    _name(axes, f"C={c}", cost, unit_bytes, (-7, -3) if left else (7, 1), colour, right=left)
        alike: dict[Cost, list[str]] = {}
        for name, cost in points.items():
            axes.plot(cost.compute, cost.memory / unit_bytes, "o", color=INK, markersize=5, zorder=3)
            alike.setdefault(cost, []).append(name)
        for cost, names in alike.items():
            side = _PLACES.get(names[0], (7, 4))
            _name(axes, ", ".join(names), cost, unit_bytes, side, INK, bold=True)
        for name, (forwards, peak) in (measured or {}).items():
            at = 1 + forwards / (3 * layers)
            look: Any = {"color": CURVE_COLOURS[3], "markersize": 9, "markeredgewidth": 1.6, "zorder": 4}
            label = "measured in a run" if name == next(iter(measured or {})) else None
            axes.plot(at, peak / unit_bytes, "x", label=label, **look)
        low, high = axes.get_xlim()
        longest = max(text_width(", ".join(names), 9.0, True) for names in alike.values()) + 12
        high = max(high, max(cost.compute for cost in alike) ** (1 + longest / (72 * width - 60 - longest)) * 1.05)
        axes.set_xlim(min(low, 0.93), high * 1.12)
        axes.set_xticks([t for t in (1, 4 / 3, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if t < high * 1.12])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
        _ticks_of_bytes(axes)
        axes.set_xlabel("compute of a step, against one without checkpointing (a backward is two forwards)")
        axes.set_ylabel(f"peak activation memory of the layers ({unit})")
        axes.legend(loc="upper right")
        said = f"checkpointing {layers} layer{'s' * (layers != 1)}: memory against compute"
        axes.set_title(said if title is None else title, loc="left")
    return figure


def _ticks_of_bytes(axes: Axes) -> None:
    """Powers of two where they are few enough to be told apart; in a small range 1, 2 and 5 of every power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    if high < 8 * low:
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"))


_PLACES = {"full": (8, 2), "sqrt": (8, -11), "halving": (7, 5), "naive": (7, 5), "none": (8, 2)}


def _name(
    axes: Axes,
    text: str,
    cost: Cost,
    unit_bytes: float,
    offset: tuple[int, int],
    colour: str,
    bold: bool = False,
    right: bool = False,
) -> None:
    axes.annotate(
        text,
        (cost.compute, cost.memory / unit_bytes),
        xytext=offset,
        textcoords="offset points",
        color=colour,
        fontsize=9 if bold else 7.5,
        fontweight="bold" if bold else "normal",
        ha="right" if right else "left",
    )


def best(costs: Sequence[Cost]) -> list[Cost]:
    """Those that no other beats in both, by rising compute."""
    found: list[Cost] = []
    for cost in sorted(costs):
        if not found or cost.memory < found[-1].memory:
            found.append(cost)
    return found


def _edge(axes: Axes, costs: Sequence[Cost], unit_bytes: float) -> None:
    """Shades what can be had: to the upper right of the best."""
    edge = best(costs)
    far, top = 2 * max(cost.compute for cost in costs), 2 * max(cost.memory for cost in costs)
    x = [edge[0].compute, *(cost.compute for cost in edge), far]
    y = [top, *(cost.memory for cost in edge), edge[-1].memory]
    axes.fill_between(x, np.array(y) / unit_bytes, top / unit_bytes, step="post", color=REACHED, zorder=0, linewidth=0)
    axes.step(x, np.array(y) / unit_bytes, where="post", color=FAINT_INK, linewidth=0.8, linestyle=":", zorder=1)
    axes.set_ylim(edge[-1].memory / unit_bytes / 1.5, max(cost.memory for cost in costs) / unit_bytes * 1.5)
    axes.set_xlim(edge[0].compute / 1.07, max(cost.compute for cost in costs) * 1.1)


def _name_alike(axes: Axes, layers: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Of curves that hide each other, a note of all their names."""
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, values in curves.items():
        alike.setdefault(tuple(values), []).append(name)
    for values, names in alike.items():
        if len(names) > 1 and any(values):
            middle = len(layers) // 2
            axes.annotate(
                ", ".join(names),
                (layers[middle], values[middle]),
                xytext=(8, -13),
                textcoords="offset points",
                fontsize=8.5,
            )


def checkpointing_growth_figure(
    input_bytes: int,
    layer_bytes: int,
    policies: Sequence[str] = GROWTH,
    layers: Sequence[int] = LAYERS,
    width: float = 9.5,
    title: str = "what checkpointing costs as models grow deeper",
) -> Figure:
    """Draws peak memory on the left, and forwards that are computed again on the right, over the number of layers.

    Args:
        input_bytes, layer_bytes: as for frontier_figure.
        policies: their names.
        layers: numbers of layers.
        width: of the figure in inches.
        title: above the pictures.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    ordered = sorted(layers)
    made = {name: [Policy.named(name, n) for n in ordered] for name in policies}
    memory = {name: [p.peak_bytes(input_bytes, layer_bytes) for p in some] for name, some in made.items()}
    unit, unit_bytes = byte_unit(min(map(min, memory.values())))
    with drawing():
        figure = new_figure(width, 4.6)
        left, right = figure.subplots(1, 2)
        drawn: dict[str, tuple[list[float], list[float]]] = {
            name: ([m / unit_bytes for m in memory[name]], [float(p.recomputed) for p in some])
            for name, some in made.items()
        }
        for i, (name, both) in enumerate(drawn.items()):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            look: Any = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.4, "label": name}
            for axes, values in zip((left, right), both):
                if any(values):
                    axes.plot(ordered, values, **look)
        for place, axes in enumerate((left, right)):
            _name_alike(axes, ordered, {name: both[place] for name, both in drawn.items()})
        for axes, about in (
            (left, f"peak activation memory of the layers ({unit})"),
            (right, "layer forwards computed again in a step"),
        ):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(ordered)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
            )
            axes.set_xlabel("layers")
            axes.set_title(about, loc="left")
        legend_below(figure, *left.get_legend_handles_labels(), side="center")
        figure.suptitle(title, x=0.008, ha="left", fontsize=11.5, fontweight="bold")
    return figure
