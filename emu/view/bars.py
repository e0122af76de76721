"""What a timeline picture shows, before anything is drawn: rows of bars, thinned to what the eye can tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from emu.cost.timeline import Timeline

COMPUTE, COMMUNICATION, WAITING = "compute", "communication", "waiting"
MOST_RANKS = 16
LEAST_STRETCH = 1e-6  # of what a bar lasts: less is rounding


class Look(NamedTuple):
    """What decides how a bar is painted: one legend entry each."""

    part: str  # COMPUTE, COMMUNICATION or WAITING
    label: str  # the phase of a kernel, the kind of a collective; "" while waiting


NOTHING = np.empty((0, 2))


class Row(NamedTuple):
    """One stream of one rank, with starts and ends of bars in seconds, [n, 2].

    Fields:
        bars: for each look.
        stretched: the ends of bars by which these last longer because they share their device or links with others.
    """

    rank: int
    stream: str
    bars: dict[Look, np.ndarray]
    stretched: np.ndarray = NOTHING


def sample_ranks(ranks: Iterable[int], most: int = MOST_RANKS) -> list[int]:
    """At most `most` of the ranks, evenly spread, the first and the last among them."""
    ranks = list(ranks)
    if len(ranks) <= most:
        return ranks
    return [ranks[round(i * (len(ranks) - 1) / (most - 1))] for i in range(most)]


def merge(starts_s: Sequence[float] | np.ndarray, ends_s: Sequence[float] | np.ndarray) -> np.ndarray:
    """Joins bars that touch or overlap.

    Args:
        starts_s, ends_s: of the bars, in any order.

    Returns:
        Starts and ends of the joined bars in order of time, [n, 2].
    """
    starts, ends = np.asarray(starts_s, dtype=float), np.asarray(ends_s, dtype=float)
    if not len(starts):
        return np.empty((0, 2))
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([starts[first], reach[last]])


def clip(spans: np.ndarray, start_s: float, end_s: float) -> np.ndarray:
    """The parts of the bars, [n, 2], that lie in a window."""
    inside = spans[(spans[:, 1] > start_s) & (spans[:, 0] < end_s)]
    return np.clip(inside, start_s, end_s)


def thin(bars: Mapping[Look, np.ndarray], edges_s: np.ndarray) -> dict[Look, np.ndarray]:
    """Gathers the bars inside each column of a picture into one bar per look, of the same length in total.

    So a hundred thousand kernels become a few thousand bars, and a column that is busy a fifth of its time still
    looks a fifth busy: joining bars over gaps too short to be seen would paint idle time as work.

    Args:
        bars: joined bars of one row by look, [n, 2] each (see `merge`).
        edges_s: where the columns begin and end, [columns + 1].
    """
    used = np.zeros(len(edges_s) - 1)
    thinned = {}
    for look, spans in bars.items():
        if not len(spans):
            continue
        share = _busy(spans, edges_s)
        starts = edges_s[:-1] + used
        used = used + share
        kept = share > 0
        # Bars that fill their columns touch, up to rounding: join them.
        ends = np.where(share >= np.diff(edges_s) * (1 - 1e-9), edges_s[1:], starts + share)
        thinned[look] = merge(starts[kept], ends[kept])
    return thinned


def thin_ends(spans: np.ndarray, bars: Mapping[Look, np.ndarray], edges_s: np.ndarray) -> np.ndarray:
    """Parts of bars, gathered inside each column at the end of what `thin` makes of the bars there.

    Args:
        spans: joined (see `merge`), [n, 2], and inside of the bars.
        bars: joined bars of the row by look, before they are thinned.
        edges_s: where the columns begin and end, [columns + 1].
    """
    share, used = _busy(spans, edges_s), np.zeros(len(edges_s) - 1)
    for own in bars.values():
        used = used + _busy(own, edges_s)
    kept = share > 0
    ends = (edges_s[:-1] + used)[kept]
    return np.column_stack([ends - share[kept], ends])


def _busy(spans: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    """How long joined bars take in each column, in seconds."""
    if not len(spans):
        return np.zeros(len(edges_s) - 1)
    # Busy time up to t is a broken line through the ends of the bars.
    busy = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])]).repeat(2)[1:-1]
    return np.diff(np.interp(edges_s, spans.reshape(-1), busy))


def busiest_share(spans: np.ndarray, edges_s: np.ndarray) -> float:
    """The largest share of a column, 0-1, that bars cover; they are joined (see `merge`), [n, 2]."""
    return float((_busy(spans, edges_s) / np.diff(edges_s)).max()) if len(spans) else 0.0


def timeline_rows(timeline: Timeline, ranks: Sequence[int], edges_s: np.ndarray | None = None) -> list[Row]:
    """The rows of a timeline picture: rank by rank, the streams in the order in which the rank first used them.

    The time in which a collective holds its stream but waits for other members is a bar of its own (WAITING). What a
    kernel or a message lost by sharing its device or its links with others is the end of its bar, marked as stretched.

    Args:
        timeline: a priced trace.
        ranks: which ranks, in order.
        edges_s: columns of the picture, [columns + 1]: bars are clipped to them, and a row with many more bars than
            columns is thinned. None leaves every bar as it is.
    """
    rows = []
    for rank in ranks:
        events = timeline.trace.events[rank]
        streams: dict[str, dict[Look, tuple[list[float], list[float]]]] = {}
        stretched: dict[str, tuple[list[float], list[float]]] = {}

        def put(stream: str, look: Look, start_s: float, end_s: float, streams: dict = streams) -> None:
            starts, ends = streams.setdefault(stream, {}).setdefault(look, ([], []))
            starts.append(start_s)
            ends.append(end_s)

        for span in timeline.spans[rank]:
            if (lost_s := span.stretch_s) > LEAST_STRETCH * (span.end_s - span.moves_s):
                starts, ends = stretched.setdefault(span.stream, ([], []))
                starts.append(span.end_s - lost_s)
                ends.append(span.end_s)
            if span.kind == "kernel":
                put(span.stream, Look(COMPUTE, span.phase), span.start_s, span.end_s)
                continue
            if span.end_s <= span.start_s:
                continue  # a group of one: it says nothing, to nobody
            if span.moves_s > span.start_s:
                put(span.stream, Look(WAITING, ""), span.start_s, span.moves_s)
            # A collective's span carries the name the program gave it; its kind stands in the trace.
            kind = getattr(events[span.index], "kind", span.name)
            put(span.stream, Look(COMMUNICATION, kind), max(span.start_s, span.moves_s), span.end_s)
        if not streams:
            rows.append(Row(rank, "", {}))
        for stream, looks in streams.items():
            bars = {look: merge(*times) for look, times in looks.items()}
            lost = merge(*stretched.get(stream, ((), ())))
            if edges_s is not None:
                bars = {look: clip(spans, edges_s[0], edges_s[-1]) for look, spans in bars.items()}
                lost = clip(lost, edges_s[0], edges_s[-1])
                if sum(map(len, bars.values())) + len(lost) > 2 * len(edges_s):
                    bars, lost = thin(bars, edges_s), thin_ends(lost, bars, edges_s)
                bars = {look: spans for look, spans in bars.items() if len(spans)}
            rows.append(Row(rank, stream, bars, lost))
    return rows
