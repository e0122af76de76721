"""What validation found, at a terminal: figures, errors by source and by axis, the worst cases, what was left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from emu.view.report import Section
from emu.view.report import Text as Paragraph
from emu.view.tables import Table
from emu.view.units import percent_text, time_text

from .collectives import pairs
from .goals import MEMORY_ERROR
from .report import Report
from .score import Errors, Pair, errors, errors_by, errors_by_axis, order

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 8  # unusable rows and assumptions that are told; --json has all
NAME = 34  # characters of a source's title: tables fit into 80 columns


def shown(report: Report) -> Iterator[RenderableType]:
    """All that a terminal shows, piece by piece."""
    from rich.text import Text

    yield Text(headline(report))
    for table in tables(report):
        yield table.rich()
    for line in remarks(report):
        yield Text(f"• {line}")


def sections(report: Report) -> list[Section]:
    """The same for a page."""
    return [Paragraph(headline(report)), *tables(report), *(Paragraph(f"• {line}") for line in remarks(report))]


def tables(report: Report) -> Iterator[Table]:
    """Errors by source and by axis, the worst cases, the goals; those that have anything in them."""
    steps = report.times
    if steps:
        yield by_source(steps)
        yield by_axis(steps)
        yield worst(report)
    if any(goal.n for goal in report.goals):
        yield goals(report)


def headline(report: Report) -> str:
    """Which rows the figures are about, and the figures."""
    rows, found = report.rows(), errors(report.times)
    about = (
        f"{rows['reported_runs']} runs of layouts that no constant was fitted to ({rows['in_fit']} others were)"
        if report.held_out
        else f"all {rows['runs']} runs; {rows['in_fit']} of them have layouts of the fold that constants are fitted to"
    )
    said = f"{', '.join(report.of)}: {about}."
    if not found.n or found.median_ape is None or found.mape is None:
        return f"{said}\nNo run has a time that can be compared."
    ranked, harder = order(report.times), order(report.times, equal_batch=True)
    lines = [
        said,
        f"Step time of {found.n}: median error {percent_text(found.median_ape)}, mean {percent_text(found.mape)}; "
        f"within 5, 10, 20 %: {', '.join(f'{share:.0%}' for share in found.within.values())} of them.",
    ]
    if ranked.accuracy is not None:
        line = f"In the right order: {ranked.accuracy:.1%} of {ranked.pairs} pairs of alike runs more than 6 % apart"
        if harder.accuracy is not None:
            line += f"; at equal batch and sequence, {harder.accuracy:.1%} of {harder.pairs}"
        lines.append(line + ".")
    return "\n".join(lines)


def by_source(steps: list[Pair]) -> Table:
    """Errors of each source."""
    rows = []
    for source, found in errors_by(steps, lambda pair: pair.source).items():
        ranked = order([pair for pair in steps if pair.source == source])
        accuracy = "–" if ranked.accuracy is None else f"{ranked.accuracy:.0%}"
        rows.append((_short(str(source)), *_figures(found)[:4], accuracy))
    headers = ("source", "runs", "median", "mean", "bias", "order")
    note = "bias: median signed error; order: share of pairs of alike runs that are put in the right order"
    return Table(headers, rows, "Error of step time by source", note)


def by_axis(steps: list[Pair]) -> Table:
    """Errors of each value of each axis."""
    rows = []
    for axis, values in errors_by_axis(steps).items():
        for i, (value, found) in enumerate(values.items()):
            rows.append((axis if not i else "", value, *_figures(found)))
    headers = ("axis", "value", "runs", "median", "mean", "bias", "≤10 %", "worst")
    return Table(headers, rows, "Error of step time by axis", left=(0, 1))


def worst(report: Report) -> Table:
    """The cases that are furthest off."""
    rows = [(f"{p.error:+.1%}", time_text(p.measured), time_text(p.predicted), p.id) for p in report.worst()]
    return Table(("error", "measured", "predicted", "run"), rows, "The worst", left=(3,))


def goals(report: Report) -> Table:
    """What is promised of layouts held out, and what these rows give."""
    rows = []
    for goal in report.goals:
        if goal.reached is None:
            continue
        side = "at most" if goal.most else "at least"
        rows.append((goal.name, str(goal.n), f"{goal.reached:.1%}", f"{side} {goal.limit:.0%}", _yes(goal.met)))
    note = "" if report.held_out else "promised of layouts that are held out; here for all rows"
    return Table(("goal", "of", "here", "promised", "holds"), rows, "", note)


def remarks(report: Report) -> Iterator[str]:
    """What the tables do not say."""
    if report.held_out:
        yield (
            "No constant was fitted to these layouts. But which terms the closed forms have, and some priors, were chosen "
            "by people who saw errors of all of them: on runs that nobody has seen, expect somewhat more."
        )
    fits = report.fits()
    if fits["out_of_memory"]:
        yield f"Out of memory: {fits['out_of_memory_found']} of {fits['out_of_memory']} runs that failed are said not to fit."
    if fits["said_not_to_fit"]:
        named = _some(fits["said_not_to_fit"])
        yield f"{len(fits['said_not_to_fit'])} of {fits['ran']} runs that ran are said not to fit: {named}."
    far = sorted((p for p in report.memories if abs(p.error) > MEMORY_ERROR), key=lambda p: -abs(p.error))
    if far:
        named = _some([f"{p.id} ({p.error:+.1%})" for p in far])
        yield f"Memory off by more than {MEMORY_ERROR:.0%} in {len(far)} of {len(report.memories)} runs: {named}."
    if report.layers:
        found = errors(report.layers)
        yield (
            f"{found.n} rows have the time of one layer: median error {percent_text(found.median_ape or 0)}, "
            f"worst {percent_text(found.worst or 0)}."
        )
    small = errors(pairs(report.collectives, large=False)).n - errors(pairs(report.collectives)).n
    if small:
        yield f"{small} collectives below 1 MiB are not in the goals: their time is mostly launches (see --json)."
    if report.analytic:
        found = errors(report.analytic)
        yield f"{found.n} rows hold a formula's value: computed again, the worst is {percent_text(found.worst or 0)} off."
    for told, count in list(report.assumed().items())[:SHOWN]:
        yield f"Assumed of {count} runs: {told}."
    more = len(report.assumed()) - SHOWN
    if more > 0:
        yield f"... and {more} more assumptions (see --json)."
    if ignored := report.ignored_fields():
        told = _some([f"{name} ({count})" for name, count in ignored.items()])
        yield f"Fields that nobody reads, by rows: {told}."
    reasons: dict[str, list[str]] = {}
    for row in report.unusable:
        reasons.setdefault(row.why, []).append(row.id)
    for why, ids in list(reasons.items())[:SHOWN]:
        yield f"Not usable ({len(ids)}): {_some(ids)}: {why.rstrip('.')}."
    if len(reasons) > SHOWN:
        yield f"... and {len(reasons) - SHOWN} more reasons (see --json)."


def _figures(found: Errors) -> tuple[str, ...]:
    if found.median_ape is None or found.mape is None or found.bias is None or found.worst is None:
        return ("0", "–", "–", "–", "–", "–")
    return (
        str(found.n),
        f"{found.median_ape:.1%}",
        f"{found.mape:.1%}",
        f"{found.bias:+.1%}",
        f"{found.within['10%']:.0%}",
        f"{found.worst:.0%}",
    )


def _some(names: list[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _short(title: str) -> str:
    """A title without its subtitle, e.g. "vTrain: A Simulation Framework" is vTrain."""
    text = re.split(r": | \(", title, maxsplit=1)[0]
    return text if len(text) <= NAME else text[: NAME - 1].rstrip() + "…"


def _yes(met: bool | None) -> str:
    return "–" if met is None else "yes" if met else "NO"
