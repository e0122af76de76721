"""How runs, timelines, traces, memory, meshes, plans, layouts, schedules, deadlocks and clusters show themselves in a notebook.

Those classes lie below the view and may not know it: it gives them their representations from here. Nothing is
imported for it until a notebook asks for a picture.
"""

from __future__ import annotations

from html import escape
from typing import Any

from emu.trace.events import Collective, Transfer

MOST_RANKS = 4096  # of a plan that draws itself
MOST_TENSORS = 60


def attach(run_class: type | None = None) -> None:
    """Gives the classes below the view, and a Run class if one is passed, their representations.

    Calling it again changes nothing.

    Args:
        run_class: a class with mesh, cluster, trace, memory, metrics and timeline().
    """
    from emu.cost import Timeline
    from emu.hardware import Cluster, Summary
    from emu.parallel import Plan
    from emu.parallel.pipeline import Schedule, Timed
    from emu.spmd import Deadlock, Grads, Layout, Mesh
    from emu.trace.memory import Memory
    from emu.trace.trace import Trace

    Timeline._repr_png_ = _timeline_png  # type: ignore[attr-defined]
    Memory._repr_png_ = _memory_png  # type: ignore[attr-defined]
    Mesh._repr_html_ = _mesh_html  # type: ignore[attr-defined]
    Schedule._repr_png_ = Timed._repr_png_ = _schedule_png  # type: ignore[attr-defined]
    Deadlock._repr_html_ = _deadlock_html  # type: ignore[attr-defined]
    Summary._repr_html_ = _summary_html  # type: ignore[attr-defined]
    Trace._repr_html_ = _trace_html  # type: ignore[attr-defined]
    Cluster._repr_html_ = _cluster_html  # type: ignore[attr-defined]
    Layout._repr_html_ = _layout_html  # type: ignore[attr-defined]
    Grads._repr_html_ = _grads_html  # type: ignore[attr-defined]
    Plan._repr_png_ = _plan_png  # type: ignore[attr-defined]
    if run_class is not None:
        run_class._repr_html_ = _run_html


# One representation each: a notebook stores every one that it is given, and would draw and keep the picture twice.


def _timeline_png(timeline: Any) -> bytes:
    from emu.view.style import NOTEBOOK_DPI, png_bytes
    from emu.view.timeline import timeline_figure

    return png_bytes(timeline_figure(timeline), NOTEBOOK_DPI)


def _memory_png(memory: Any) -> bytes:
    from emu.view.memory import memory_figure
    from emu.view.style import NOTEBOOK_DPI, png_bytes

    return png_bytes(memory_figure(memory), NOTEBOOK_DPI)


def _schedule_png(schedule: Any) -> bytes | None:
    """None, and so its text, where it cannot run: looking at a wrong schedule is no mistake."""
    from emu.spmd import EmuError
    from emu.view.pipeline import schedule_figure
    from emu.view.style import NOTEBOOK_DPI, png_bytes

    try:
        return png_bytes(schedule_figure(schedule), NOTEBOOK_DPI)
    except EmuError:
        return None


def _mesh_html(mesh: Any) -> str:
    from emu.view.mesh import mesh_html

    return mesh_html(mesh)


def _trace_html(trace: Any) -> str:
    from emu.view.records import trace_table

    return trace_table(trace).html()


def _plan_png(plan: Any) -> bytes | None:
    """Who holds which tokens, stages and heads; None, and so its text, of more ranks than can be told apart."""
    from emu.parallel import mesh_of
    from emu.view.holding import holding_figure
    from emu.view.style import NOTEBOOK_DPI, png_bytes

    return png_bytes(holding_figure(plan), NOTEBOOK_DPI) if mesh_of(plan).size <= MOST_RANKS else None


def _cluster_html(cluster: Any) -> str:
    """What it has together, its ladder of memories and links, and its wiring where that can be drawn."""
    from emu.view.computer import summary_tables
    from emu.view.ladder import ladder_figure
    from emu.view.wiring import MOST_DEVICES, wiring_figure

    summary = cluster.summary()
    wires = {"a node": cluster.node.shape, "the network": cluster.network if cluster.nodes > 1 else None}
    drawn = {name: shape for name, shape in wires.items() if shape is not None and shape.n_devices <= MOST_DEVICES}
    parts = [table.html() for table in summary_tables(summary)]
    parts.append(_picture(ladder_figure(summary), "ladder of memories and links"))
    if drawn:
        parts.append(_picture(wiring_figure(drawn, columns=2, width=8.0), "wiring"))
    return "<div>" + "\n".join(parts) + "</div>"


def _layout_html(layout: Any) -> str:
    """A row an axis, and a small tensor that is laid out so."""
    from emu.spmd import EmuError
    from emu.view.layouts import layout_figure, placement_text, schematic
    from emu.view.tables import Table

    rows = [(str(axis), placement_text(placed)) for axis, placed in layout.placements.items()]
    table = Table(("axis", "along it"), rows, "Layout", "Axes that are not named hold the same.", left=(0, 1)).html()
    try:
        shape, mesh = schematic(layout)
        picture = _picture(layout_figure(layout, shape, mesh, name="an example:", width=5.5), "who holds what")
    except EmuError:  # a layout that fits no small mesh, or none at all
        return table
    return f"<div>{table}{picture}</div>"


def _grads_html(grads: Any) -> str:
    """A row a tensor: its shape here, its dtype, and how it relates to the whole."""
    from emu.view.layouts import layout_text
    from emu.view.tables import Table

    rows = []
    for name, value in list(grads.items())[:MOST_TENSORS]:
        layout = grads.layouts.get(name)
        said = layout_text(layout) if layout is not None else "replicated: every rank holds all of it"
        dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        rows.append((str(name), str(list(getattr(value, "shape", ()))), dtype, said))
    note = f"and {len(grads) - len(rows):,} more" if len(grads) > len(rows) else ""
    return Table(("tensor", "shape here", "dtype", "layout"), rows, "Grads", note, left=(0, 1, 2, 3)).html()


def _summary_html(summary: Any) -> str:
    from emu.view.computer import summary_html

    return summary_html(summary)


def _deadlock_html(error: Any) -> str | None:
    """What a caught one says, and who waits for whom; None, and so its text, where nobody could tell."""
    from emu.spmd import EmuError
    from emu.view.waiting import graph_of, nodes_of, waiting_figure

    try:
        few = len(nodes_of(graph_of(error))) <= 2  # they leave a wide picture empty, and on a page its letters small
        picture = _picture(waiting_figure(error, width=7.5 if few else 11.0), "who waits for whom")
    except EmuError:
        return None
    return f'<div><pre style="white-space:pre-wrap">{escape(str(error))}</pre>{picture}</div>'


def _run_html(run: Any) -> str:
    """What it was, its metrics, its timeline, its memory and the traffic of its links."""
    from emu.view.memory import memory_figure
    from emu.view.tables import metrics_table
    from emu.view.timeline import timeline_figure
    from emu.view.traffic import traffic_figure

    parts = [f"<b>{escape(str(run.mesh))} on {escape(run.cluster.name)}</b>"]
    if not len(run.trace):
        return parts[0] + "<p>nothing was recorded</p>"
    timeline = run.timeline()
    parts.append(metrics_table(run.metrics).html())
    parts.append(_picture(timeline_figure(timeline), "timeline"))
    if getattr(run, "has_memory", True):  # real devices do not record theirs
        parts.append(_picture(memory_figure(run.memory), "memory over time"))
    if any(True for _ in run.trace.of(Collective, Transfer)):
        parts.append(_picture(traffic_figure(timeline), "traffic of every link"))
    return "<div>" + "\n".join(parts) + "</div>"


def _picture(figure: Any, alt: str) -> str:
    from emu.view.style import NOTEBOOK_DPI, png_data_uri

    return f'<img style="max-width:100%;background:#fff" alt="{alt}" src="{png_data_uri(figure, NOTEBOOK_DPI)}">'
