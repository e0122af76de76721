"""The rows in which a rank's streams are shown: on each of them one thing runs at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from emu.cost.timeline import Span


class Row(NamedTuple):
    """One stream's row; sends and receives that were posted together run at one time, and need several."""

    name: str  # the stream's; from its second row on with a number
    stream: str
    spans: list[Span]


def rows_of(spans: Sequence[Span]) -> list[Row]:
    """A rank's rows: the default stream first, others as they are first used."""
    streams = dict.fromkeys(span.stream for span in spans)
    ordered = [*(["default"] if "default" in streams else []), *(name for name in streams if name != "default")]
    rows: list[Row] = []
    for stream in ordered:
        own: list[Row] = []
        for span in sorted((s for s in spans if s.stream == stream), key=lambda s: (s.start_s, s.end_s, s.index)):
            row = next((row for row in own if row.spans[-1].end_s <= span.start_s), None)
            if row is None:
                row = Row(stream if not own else f"{stream} ({len(own) + 1})", stream, [])
                own.append(row)
            row.spans.append(span)
        rows += own
    return rows
