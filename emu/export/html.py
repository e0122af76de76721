"""A run as one HTML page that needs nothing else: it steps through the run; figures, timeline, memory. All names are escaped."""

from __future__ import annotations

from typing import Any

MOST_EVENTS = 400_000  # about 25 MB of record; with more, a browser is slow to open the page


def run_page(run: Any) -> str:
    """The page.

    Args:
        run: with mesh, cluster, trace, memory, has_memory, metrics, timeline() and advice().
    """
    from emu.canvas import page_html, run_record
    from emu.view.report import Text, report_html, sections_html

    title = f"{run.mesh} on {run.cluster.name}"
    if not len(run.trace):
        return report_html(title, [Text("Nothing was recorded.")])
    sections = _sections(run)
    if len(run.trace) > MOST_EVENTS:
        sections.insert(0, Text(f"It has {len(run.trace):,} events, more than a page can step through."))
        return report_html(title, sections)
    return page_html(title, run_record(run).whole(), sections_html(sections))


def _sections(run: Any) -> list[Any]:
    """What stands on the page whether or not it can run scripts."""
    from emu.view.memory import memory_figure
    from emu.view.report import Heading, Picture, Text
    from emu.view.tables import metrics_table
    from emu.view.timeline import timeline_figure

    sections: list[Any] = [metrics_table(run.metrics), Heading("Timeline")]
    sections.append(Picture(timeline_figure(run.timeline()), "What every stream does, and when"))
    sections.append(Heading("Memory"))
    if run.has_memory:
        sections.append(Picture(memory_figure(run.memory), "What lives in device memory, by category"))
    else:
        sections.append(Text("It was not recorded."))
    counts = [f"{n} × {name}" for name, n in run.trace.counts(run.trace.ranks[0]).most_common()]
    sections += [Heading(f"What rank {run.trace.ranks[0]} runs"), Text("\n\n".join(counts) or "Nothing.")]
    advice = [str(one).replace("\n  hint: ", ". Hint: ") for one in run.advice()]
    if advice:
        sections += [Heading("Advice"), Text("\n\n".join(advice))]
    return sections
