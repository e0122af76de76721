"""How runs, timelines, memory, meshes, schedules, deadlocks and summaries of clusters show themselves in a notebook.

Those classes lie below the view and may not know it: it gives them their representations from here. Nothing is
imported for it until a notebook asks for a picture.
"""

from __future__ import annotations

from html import escape
from typing import Any


def attach(run_class: type | None = None) -> None:
    """Gives Timeline, Memory, Mesh, Schedule, Timed, Deadlock, Summary and a Run class if one is passed, their representations.

    Calling it again changes nothing.

    Args:
        run_class: a class with mesh, cluster, trace, memory, metrics and timeline().
    """
    from emu.cost import Timeline
    from emu.hardware import Summary
    from emu.parallel.pipeline import Schedule, Timed
    from emu.spmd import Deadlock, Mesh
    from emu.trace.memory import Memory

    Timeline._repr_png_ = _timeline_png  # type: ignore[attr-defined]
    Memory._repr_png_ = _memory_png  # type: ignore[attr-defined]
    Mesh._repr_html_ = _mesh_html  # type: ignore[attr-defined]
    Schedule._repr_png_ = Timed._repr_png_ = _schedule_png  # type: ignore[attr-defined]
    Deadlock._repr_html_ = _deadlock_html  # type: ignore[attr-defined]
    Summary._repr_html_ = _summary_html  # type: ignore[attr-defined]
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


def _summary_html(summary: Any) -> str:
    from emu.view.computer import summary_html

    return summary_html(summary)


def _deadlock_html(error: Any) -> str | None:
    """What a caught one says, and who waits for whom; None, and so its text, where nobody could tell."""
    from emu.spmd import EmuError
    from emu.view.style import NOTEBOOK_DPI, png_data_uri
    from emu.view.waiting import waiting_figure

    try:
        picture = png_data_uri(waiting_figure(error), NOTEBOOK_DPI)
    except EmuError:
        return None
    shown = f'<img style="max-width:100%;background:#fff" alt="who waits for whom" src="{picture}">'
    return f"<div><pre>{escape(str(error))}</pre>{shown}</div>"


def _run_html(run: Any) -> str:
    """What it was, its metrics, its timeline and its memory."""
    from emu.view.memory import memory_figure
    from emu.view.style import NOTEBOOK_DPI, png_data_uri
    from emu.view.tables import metrics_table
    from emu.view.timeline import timeline_figure

    def picture(figure: Any, alt: str) -> str:
        return f'<img style="max-width:100%;background:#fff" alt="{alt}" src="{png_data_uri(figure, NOTEBOOK_DPI)}">'

    parts = [f"<b>{escape(str(run.mesh))} on {escape(run.cluster.name)}</b>"]
    if not len(run.trace):
        return parts[0] + "<p>nothing was recorded</p>"
    parts.append(metrics_table(run.metrics).html())
    parts.append(picture(timeline_figure(run.timeline()), "timeline"))
    if getattr(run, "has_memory", True):  # real devices do not record theirs
        parts.append(picture(memory_figure(run.memory), "memory over time"))
    return "<div>" + "\n".join(parts) + "</div>"
