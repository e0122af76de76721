"""The same trace with small all-reduces joined: what bucketing would make of it.

Only all-reduces are joined that may be: asynchronous ones that nobody waited for in between, and synchronous ones with nothing
between them but a scaling of the result. What flat buffers cost, a copy there and one back, is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emu.cost.collectives import collective_s
from emu.hardware import Cluster
from emu.trace.events import Collective, Event, EventRecord, HostWait, Kernel, Mark, Wait
from emu.trace.trace import Trace

BUCKET_BYTES = 25 * 2**20  # torch's DistributedDataParallel, bucket_cap_mb as it stands there
FEW = 4  # so many are no flood: chosen
SCALINGS = ("div_", "mul_")
LATENCY = 0.5  # the share of their time that does not depend on their size, from which on they are small: chosen

Key = tuple[str, tuple[int, ...], int]  # group, members, number


def joined(trace: Trace, cluster: Cluster) -> tuple[Trace, dict[str, tuple[int, int]]]:
    """The trace with small all-reduces joined, and by group how many a rank had of these and has then; none where none are."""
    by_rank = {
        rank: [bucket for run in _runs(events) for bucket in _buckets(run, cluster)]
        for rank, events in trace.events.items()
    }
    there = {rank: {tuple(map(_key, bucket)) for bucket in buckets} for rank, buckets in by_rank.items()}
    changed: dict[int, list[Event]] = {}
    counted: dict[str, tuple[int, int]] = {}
    for rank, events in trace.events.items():
        kept = [  # all members must join alike
            bucket
            for bucket in by_rank[rank]
            if all(tuple(map(_key, bucket)) in there[m] for m in bucket[0].members if m in there)
        ]
        counts: dict[str, tuple[int, int]] = {}
        for bucket in kept:
            before, after = counts.get(bucket[0].group, (0, 0))
            counts[bucket[0].group] = before + len(bucket), after + 1
        counted = {g: max(counts.get(g, (0, 0)), counted.get(g, (0, 0))) for g in {**counted, **counts}}
        changed[rank] = list(_join(events, kept))
    return Trace(trace.axes, changed), counted


def _key(event: Collective) -> Key:
    return event.group, event.members, event.seq


def _runs(events: Sequence[Event]) -> Iterator[list[Collective]]:
    """All-reduces of one kind that may become one, in order."""
    open_: dict[tuple, list[Collective]] = {}
    for event in events:
        ending: list[tuple] = []
        if isinstance(event, Collective):
            kind = (
                event.group,
                event.members,
                event.kind,
                event.dtype,
                event.op,
                event.algorithm,
                event.stream,
                event.after,
            )
            ending = [k for k in open_ if k[:2] == kind[:2] and k != kind]
            if event.kind == "all_reduce" and len(event.members) > 1:
                open_.setdefault(kind, []).append(event)
        elif isinstance(event, Kernel) and event.name not in SCALINGS:
            ending = [k for k in open_ if k[-1] == k[-2] == event.stream]  # it may use a synchronous result
        elif isinstance(event, Wait):
            ending = [k for k, run in open_.items() if any(e.work == event.work for e in run)]
        elif isinstance(event, (HostWait, EventRecord, Mark)):
            ending = list(open_)
        for k in ending:
            yield open_.pop(k)
    yield from open_.values()


def _buckets(run: Sequence[Collective], cluster: Cluster) -> Iterator[list[Collective]]:
    """A run cut into buckets, if latency is most of what it costs."""
    if len(run) < FEW:
        return
    whole_s = sum(collective_s(e, cluster) for e in run)
    if sum(collective_s(e._replace(bytes=1), cluster) for e in run) < LATENCY * whole_s:
        return
    bucket: list[Collective] = []
    for event in run:
        if bucket and sum(e.bytes for e in bucket) + event.bytes > BUCKET_BYTES:
            if len(bucket) > 1:
                yield bucket
            bucket = []
        bucket.append(event)
    if len(bucket) > 1:
        yield bucket


def _join(events: Sequence[Event], buckets: Sequence[Sequence[Collective]]) -> Iterator[Event]:
    """Each bucket in the place of its last, whose inputs are the last to be there."""
    last = {e.work: bucket[-1].work for bucket in buckets for e in bucket}
    total = {bucket[-1].work: sum(e.bytes for e in bucket) for bucket in buckets}
    for event in events:
        if isinstance(event, Collective) and event.work in last:
            if event.work in total:
                size = total[event.work]
                yield Kernel("cat", "", "backward", 0, 4 * size, event.dtype, (), event.after)
                yield event._replace(bytes=size)
        elif isinstance(event, Wait) and event.work in last:
            yield event._replace(work=last[event.work])
        else:
            yield event
