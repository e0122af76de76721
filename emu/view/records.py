"""A trace as a table: how often each kind of work and communication occurs, and how many bytes that is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from emu.trace.events import Alloc, Collective, HostCopy, Kernel, Mark, Transfer
from emu.trace.trace import Trace
from emu.trace.units import count_text, metric_text
from emu.view.tables import Table
from emu.view.units import bytes_text

BLOCKS = 12  # characters of the longest bar
MOST_ROWS = 40


def trace_table(trace: Trace, title: str | None = None) -> Table:
    """What all ranks of a trace did together: kernels by phase, communication by group and kind, memory by category.

    Bars compare the bytes of all rows on one scale, whatever is counted: of kernels what they read and write in device
    memory, of communication messages, of memory what was allocated in all.

    Args:
        title: above the table; None says what the trace is of.
    """
    calls: Counter[tuple[int, str]] = Counter()
    sizes: Counter[tuple[int, str]] = Counter()
    flops: Counter[tuple[int, str]] = Counter()
    marks = 0
    for events in trace.events.values():
        for event in events:
            key = _row(event)
            if key is None:
                marks += type(event) is Mark
                continue
            calls[key] += 1
            sizes[key] += event.bytes  # type: ignore[union-attr]
            if type(event) is Kernel:
                flops[key] += event.flops
    keys = sorted(calls)
    most = max(sizes.values(), default=0) or 1
    rows = [
        (
            name,
            f"{calls[kind, name]:,}",
            bytes_text(sizes[kind, name]),
            "█" * round(BLOCKS * sizes[kind, name] / most) or "▏",
            metric_text(flops[kind, name], "FLOP") if flops[kind, name] else "",
        )
        for kind, name in keys
    ]
    left_out = len(rows) - MOST_ROWS
    notes = [count_text(marks, "mark")] if marks else []
    if left_out > 0:
        notes.append(f"{count_text(left_out, 'more row')} not shown")
    if not rows:
        notes.append("nothing was recorded")
    headers = ("all ranks together", "how many", "bytes", "of the row with most bytes", "work")
    return Table(headers, rows[:MOST_ROWS], repr(trace) if title is None else title, "; ".join(notes), left=(0, 3))


def _row(event: Any) -> tuple[int, str] | None:
    """The kind and name of the row that an event belongs to; None where it has none."""
    kind = type(event)
    if kind is Kernel:
        return 0, f"kernels, {event.phase}" if event.phase else "kernels outside any phase"
    if kind is Collective or kind is Transfer:
        return 1, f"{event.group}.{event.kind}"
    if kind is HostCopy:
        return 2, f"host.{event.kind}"
    return (3, f"allocated, {event.category}") if kind is Alloc else None
