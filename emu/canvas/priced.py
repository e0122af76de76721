"""When everything happens, for a record: bars of every stream, and where every rank's host stands."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emu.canvas.record import HOSTS, SPANS, Record, table
from emu.cost.timeline import Span, Timeline
from emu.view.style import PHASE_COLOURS, Paint, communication_paint


def price_record(record: Record, timeline: Timeline, steps: Mapping[int, Sequence[int]], provisional: bool) -> None:
    """Adds times to a record; those that it has are replaced.

    Args:
        timeline: what the record holds, priced.
        steps: rank -> for every event of the timeline's trace, from which step on it is seen.
        provisional: whether more is to come, which may contend for the same links.
    """
    text = record.text
    rows: dict[tuple[int, str], int] = {}
    paints: dict[tuple[str, Paint], int] = {}
    spans = {name: array("d" if name.endswith("_s") else "i") for name in SPANS}
    adds = [each.append for each in spans.values()]
    for rank, own in timeline.spans.items():
        events, seen = timeline.trace.events[rank], steps[rank]
        for span in own:
            row = rows.setdefault((rank, span.stream), len(rows))
            paint = paints.setdefault(_paint(span, events[span.index]), len(paints))
            times = (span.start_s, span.end_s, span.moves_s, span.alone_s)
            for add, value in zip(adds, (row, seen[span.index], *times, text(_label(span)), paint)):
                add(value)
    order = np.lexsort((np.asarray(spans["start_s"]), np.asarray(spans["row"])))
    record.priced = {
        "rows": [{"rank": rank, "name": stream} for rank, stream in rows],
        "paints": [{"name": name, **paint._asdict()} for name, paint in paints],
        "spans": table({name: np.asarray(values)[order] for name, values in spans.items()}),
        "hosts": _hosts(timeline, steps),
        "provisional": provisional,
        "step_time_s": timeline.step_time_s,
    }


def priced_part(record: Record) -> dict[str, Any]:
    """The times of a record as an answer of their own, with the strings that are new in them."""
    assert record.priced is not None
    return {**record.new_strings(), **record.priced}


def _hosts(timeline: Timeline, steps: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Where each rank's host stands in time before a step at which its record has grown."""
    found: dict[str, list[np.ndarray]] = {name: [np.empty(0)] for name in HOSTS}
    for rank, seen in steps.items():
        at = np.asarray(seen, dtype=np.int64)
        last = np.flatnonzero(np.diff(at, append=-1))  # the last event of each step
        found["rank"].append(np.full(len(last), rank))
        found["step"].append(at[last])
        found["at_s"].append(np.asarray(timeline.event_times(rank), dtype=float)[last])
    columns = {name: np.concatenate(parts) for name, parts in found.items()}
    order = np.argsort(columns["step"], kind="stable")
    return table({name: values[order] for name, values in columns.items()})


def _paint(span: Span, event: Any) -> tuple[str, Paint]:
    if span.kind == "kernel":
        name = span.phase or "other kernels"
        return name, Paint(PHASE_COLOURS.get(span.phase, PHASE_COLOURS[""]), "")
    return event.kind, communication_paint(event.kind)


def _label(span: Span) -> str:
    """ "mm (layers.0, forward)", "dp.all_reduce", or what the program called a communication."""
    if span.kind == "kernel":
        where = ", ".join(filter(None, (span.scope, span.phase)))
        return f"{span.name} ({where})" if where else span.name
    return f"{span.group}.{span.name}" if span.group else span.name
