"""A run as one HTML page that needs nothing else: its figures, its timeline, its memory. All names are escaped."""

from __future__ import annotations

from typing import Any


def run_page(run: Any) -> str:
    """The page.

    Args:
        run: with mesh, cluster, trace, memory, has_memory, metrics, timeline() and advice().
    """
    from emu.view.memory import memory_figure
    from emu.view.report import Heading, Picture, Text, report_html
    from emu.view.tables import metrics_table
    from emu.view.timeline import timeline_figure

    title = f"{run.mesh} on {run.cluster.name}"
    if not len(run.trace):
        return report_html(title, [Text("Nothing was recorded.")])
    sections: list[Any] = [metrics_table(run.metrics), Heading("Timeline")]
    sections.append(Picture(timeline_figure(run.timeline()), "What every stream does, and when"))
    sections.append(Heading("Memory"))
    if run.has_memory:
        sections.append(Picture(memory_figure(run.memory), "What lives in device memory, by category"))
    else:
        sections.append(Text("It was not recorded."))
    counts = [f"{n} × {name}" for name, n in run.trace.counts(run.trace.ranks[0]).most_common()]
    sections += [Heading(f"What rank {run.trace.ranks[0]} runs"), Text("\n\n".join(counts) or "Nothing.")]
    advice = [str(one) for one in run.advice()]
    if advice:
        sections += [Heading("Advice"), Text("\n\n".join(advice))]
    return report_html(title, sections)
