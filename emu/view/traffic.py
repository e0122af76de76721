"""Topology with traffic: what every link of a cluster carries in a run, how much of it that is, and which is busiest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emu.cost.routes import ABOVE, OUT, UP, WIRE
from emu.cost.timeline import Timeline
from emu.cost.traffic import Carried, carried
from emu.view.labels import fold
from emu.view.style import FAINT_INK, INK, drawing, new_figure
from emu.view.tables import Table
from emu.view.traffic_drawn import can_be_drawn, draw_cluster, draw_key, is_busiest, mixed
from emu.view.units import bytes_text, count_text, percent_text, rate_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = {
    "node": "device to its node",
    "wire": "wires inside nodes",
    "network": "device to the network",
    "above pod": "up from pods",
    "host": "device to its host",
}
SENT = ("out", "up", "to_host", "from_host", "")  # the ways in which a byte on a link is counted once


def traffic_figure(source: Any, width: float = 11.0, title: str | None = None) -> Figure:
    """Draws the wiring with the bytes that each link carries, and below it, level by level, how busy all links are.

    Links are darker the larger the share of the step is that they would be busy at the bandwidth that large messages reach,
    and thicker the nearer they are to the busiest one, which is named. Clusters of which more than 32 devices (or nodes of
    more than 64) are used are drawn level by level only.

    Args:
        source: a Run, or a Timeline.
        width: of the figure in inches.
        title: above the picture; None names the cluster and the step.

    Raises:
        EmuError: a run that cannot be priced.
    """
    timeline = timeline_of(source)
    links = carried(timeline)
    step_s = timeline.step_time_s
    levels = [level for level in LEVELS if any(link.level == level for link in links)]
    drawn = can_be_drawn(timeline, links)
    with drawing():
        heights = [drawn * width, 0.34 * max(len(levels), 1) + 0.75]
        figure = new_figure(width, sum(heights) + 0.35)
        if drawn:
            parts: Any = figure.subfigures(2, 1, height_ratios=heights)
            above, below = parts
            draw_cluster(above.subplots(), timeline, links, 72 * width)
            draw_key(above, timeline, links)
        else:
            below = figure
        _draw_levels(below.subplots(), levels, links, step_s)
        if note := _note(timeline, links):
            figure.supxlabel(fold(note, 72 * width - 12, 8), x=0.008, ha="left", fontsize=8, color=FAINT_INK)
        figure.suptitle(title if title is not None else _title(timeline, links), x=0.008, ha="left", fontweight="bold")
    return figure


def traffic_table(source: Any, title: str = "") -> Table:
    """What the links of each level carry together, and the busiest of each, as a table.

    Args:
        source: a Run, or a Timeline.
    """
    timeline = timeline_of(source)
    links, rows = carried(timeline), []
    for level, name in LEVELS.items():
        own = [link for link in links if link.level == level]
        if not own:
            continue
        most = busiest(own)
        together = bytes_text(sum(link.bytes for link in own if link.way in SENT))
        share = percent_text(most.utilisation(timeline.step_time_s))
        rows.append((name, rate_text(most.bytes_per_s, "B/s"), together, said(most), bytes_text(most.bytes), share))
    note = _note(timeline, links) if rows else "no link carried anything"
    headers = ("links", "each reaches", "all carry", "busiest", "it carries", "of the step, at what it reaches")
    return Table(headers, rows, title, note, left=(0, 3))


def timeline_of(source: Any) -> Timeline:
    """A Timeline itself, or a run's."""
    return source if isinstance(source, Timeline) else source.timeline()


def busiest(links: Sequence[Carried]) -> Carried:
    """The link that would be busy longest; the first of those that are alike."""
    return next(link for link in links if is_busiest(link, links))


def said(link: Carried) -> str:
    """A link in words."""
    if link.level == "wire":
        node, here, there = link.place
        return f"node {node}: {here} to {there}"
    if link.level == "above pod":
        pod, rail = link.place
        return f"pod {pod}, rail {rail}, {link.way}"
    return f"device {link.place}, {link.way.replace('_', ' ')}"


def _title(timeline: Timeline, links: Sequence[Carried]) -> str:
    where = f"traffic on {timeline.cluster.name} in {time_text(timeline.step_time_s)}"
    if not links:
        return f"{where}: no link carried anything"
    alike = sum(is_busiest(link, links) for link in links) - 1
    return f"{where}; busiest: {said(busiest(links))}" + (f" ({count_text(alike)} more alike)" if alike else "")


def _left_out(timeline: Timeline) -> str:
    ran, devices = len(timeline.trace.events), 1
    for size in timeline.trace.axes.values():
        devices *= size
    if ran >= devices:
        return ""
    return f"{count_text(ran)} of {count_text(devices)} ranks have a record; only their devices' own links are counted"


def _note(timeline: Timeline, links: Sequence[Carried]) -> str:
    """What the rates are beside those of data sheets, and what is left out."""
    node, notes = timeline.cluster.node, []
    levels = [level for level in LEVELS if any(link.level == level for link in links)]
    of = {UP: node.scale_up, WIRE: node.scale_up, OUT: timeline.cluster.scale_out, ABOVE: timeline.cluster.scale_out}
    used = dict.fromkeys(of.get(level, node.host_link) for level in levels)
    rates = [
        f"{link.name}, {rate_text(link.bytes_per_s, 'B/s')} of {rate_text(link.bandwidth_bytes_per_s, 'B/s')} a device"
        for link in used
        if link is not None
    ]
    if rates:
        notes.append(f"bandwidth is what large messages reach of the data sheet's ({'; '.join(rates)})")
    if any(link.utilisation(timeline.step_time_s) > 1 for link in links):
        notes.append("above 100 %: a collective is counted as one ring here, and priced as several over other wires")
    return "; ".join(filter(None, [*notes, _left_out(timeline)]))


def _draw_levels(axes: Axes, levels: Sequence[str], links: Sequence[Carried], step_s: float) -> None:
    """A line for each level, with a stroke for each link at its utilisation."""
    from matplotlib.ticker import FuncFormatter

    shares = {level: [link.utilisation(step_s) for link in links if link.level == level] for level in levels}
    top = max((max(own) for own in shares.values()), default=0.0) or 1.0
    for row, level in enumerate(levels):
        own = [link for link in links if link.level == level]
        axes.axhline(row, color="#e6e6e6", linewidth=0.6, zorder=0)
        axes.scatter(
            shares[level], [row] * len(own), marker="|", s=150, linewidths=1.6,
            color=[mixed(share) for share in shares[level]], zorder=2,
        )  # fmt: skip
        most = busiest(own)
        axes.annotate(
            f" {said(most)}: {bytes_text(most.bytes)}, {percent_text(most.utilisation(step_s))}",
            (most.utilisation(step_s), row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
            color=INK, fontweight="bold" if most == busiest(links) else "normal",
        )  # fmt: skip
    names = [f"{LEVELS[level]} ({rate_text(_rate(level, links), 'B/s')})" for level in levels]
    axes.set_yticks(range(len(levels)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(levels) - 0.4, -0.6)
    axes.set_xlim(0, 1.5 * top)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    axes.set_xlabel(
        "share of the step that each link would be busy at what it reaches; a stroke for each link and direction"
    )
    axes.spines["left"].set_visible(False)
    if not levels:
        axes.set_xticks([])
        axes.set_xlabel("")
        axes.text(0.5, 0.5, "no link carried anything", transform=axes.transAxes, ha="center", color=FAINT_INK)


def _rate(level: str, links: Sequence[Carried]) -> float:
    return max(link.bytes_per_s for link in links if link.level == level)
