"""A timeline as Chrome trace events, with the field names of torch's profiler.

So chrome://tracing, Perfetto's page and HolisticTraceAnalysis read it as they read a profile of a real run: kernels on
the streams of a device, what launched them on the host's thread, and correlation numbers between the two.

Times are whole microseconds, as HolisticTraceAnalysis has them: starts and ends are rounded, each by itself, so that
what follows on a stream does not begin before what it follows. Sums over n events are off by n microseconds at most.
Sends and receives that were posted together run at one time: each gets a stream number of its own.

Marks are points, and no "ProfilerStep#n": where there are several of those, HolisticTraceAnalysis leaves out what the last one
launched. Without them it warns ("ProfilerStep not found in the trace"), and reads all of the file.

Source: torch, torch/csrc/profiler and kineto, libkineto/src/output_json.cpp; HolisticTraceAnalysis, hta/utils/utils.py
(kernels are communication if their names begin with "nccl", copies if with "Memcpy" or "Memset").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from emu.export.rows import rows_of
from emu.trace.events import Collective, HostCopy, HostWait, Kernel, Mark, Transfer

if TYPE_CHECKING:
    from emu.cost.timeline import Span, Timeline

DEFAULT_STREAM = 7  # as torch's profiler numbers it
HOST = 1_000_000  # a rank's host is this process and more; its device is the process of its own number
RESERVED = ("nccl", "memcpy", "memset", "dma")  # readers take what begins so for communication or a copy
COPIES = {"to_host": "Memcpy DtoH (Device -> Pinned)", "from_host": "Memcpy HtoD (Pinned -> Device)"}
LAUNCHES = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync"}


def chrome_json(timeline: Timeline, ranks: Sequence[int] | None = None) -> bytes:
    """One file of all ranks, or of some.

    Args:
        timeline: a priced trace.
        ranks: which ranks; None means all.

    Raises:
        UnknownRank: a rank that was not recorded.
    """
    chosen = timeline.trace.ranks if ranks is None else list(ranks)
    # First in the file, where HolisticTraceAnalysis finds it at once: it looks for "rank": in the text. A name cannot
    # pass for it, since its quotes are escaped.
    world = max(_world(timeline), len(chosen))
    whose = {"rank": chosen[0]} if len(chosen) == 1 else {"ranks": chosen}
    head = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", **whose, "world_size": world},
        "deviceProperties": [
            {"id": rank, "name": timeline.cluster.chip.name, "totalGlobalMem": timeline.cluster.chip.hbm_bytes}
            for rank in chosen
        ],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    events: list[dict[str, Any]] = []
    correlation = 0
    for rank in chosen:
        for event in _events(timeline, rank, correlation):
            events.append(event)
        correlation += len(timeline.trace[rank])
    return json.dumps({**head, "traceEvents": events}, allow_nan=False).encode()


def chrome_json_by_rank(timeline: Timeline) -> dict[str, bytes]:
    """A file a rank, by name: what HolisticTraceAnalysis reads is a folder of them."""
    return {f"rank_{rank}.json": chrome_json(timeline, [rank]) for rank in timeline.trace.ranks}


def microseconds(time_s: float) -> int:
    """A time, rounded to whole microseconds."""
    return round(time_s * 1e6)


def _world(timeline: Timeline) -> int:
    ranks = timeline.trace.ranks
    named = (max(e.members) for _, e in timeline.trace.of(Collective) if isinstance(e, Collective) and e.members)
    return 1 + max([*ranks, *named], default=0)


def _events(timeline: Timeline, rank: int, before: int) -> Iterator[dict[str, Any]]:
    """Of one rank: names of its rows, then what its host and its streams do."""
    trace, hosts = timeline.trace[rank], timeline.event_times(rank)
    spans = timeline.spans[rank]
    rows = {DEFAULT_STREAM + i: row for i, row in enumerate(rows_of(spans))}
    streams = {span.index: number for number, row in rows.items() for span in row.spans}
    host = {"pid": HOST + rank, "tid": HOST + rank}
    yield _named("process_name", {"pid": HOST + rank, "tid": 0}, {"name": f"rank {rank}: host"})
    yield _named("process_name", {"pid": rank, "tid": 0}, {"name": f"rank {rank}: {timeline.cluster.chip.name}"})
    yield _named("process_sort_index", {"pid": HOST + rank, "tid": 0}, {"sort_index": 2 * rank})
    yield _named("process_sort_index", {"pid": rank, "tid": 0}, {"sort_index": 2 * rank + 1})
    yield _named("thread_name", host, {"name": "host"})
    for number, row in rows.items():
        yield _named("thread_name", {"pid": rank, "tid": number}, {"name": f"stream {number} ({row.name})"})
    for i, event in enumerate(trace):
        started, ended = microseconds(hosts[i - 1] if i else 0.0), microseconds(hosts[i])
        if isinstance(event, Mark):
            yield {"ph": "i", "s": "p", "cat": "user_annotation", "name": event.name, **host, "ts": ended}
        elif isinstance(event, HostWait) and ended > started:
            name = "cudaStreamSynchronize" if event.stream else "cudaDeviceSynchronize"
            yield {
                **{"ph": "X", "cat": "cuda_runtime", "name": name, **host, "ts": started, "dur": ended - started},
                "args": {"reason": event.reason, "External id": before + i + 1},
            }
    for span in spans:
        number = before + span.index + 1  # unique in the file; 0 means none
        began = hosts[span.index - 1] if span.index else 0.0
        yield from _launched(span, trace[span.index], rank, streams[span.index], number)
        launch = microseconds(began)
        took = microseconds(hosts[span.index]) - launch
        op = span.name if span.kind == "kernel" else f"{span.kind}: {span.name}"
        ids = {"External id": number}
        yield {"ph": "X", "cat": "cpu_op", "name": op, **host, "ts": launch, "dur": took, "args": ids}
        call = LAUNCHES["gpu_memcpy" if span.kind == "host copy" else "kernel"]
        called = {"ph": "X", "cat": "cuda_runtime", "name": call, **host, "ts": launch, "dur": took}
        yield {**called, "args": {**ids, "correlation": number}}
        arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
        yield {"ph": "s", **arrow, **host, "ts": launch}
        ends = {"ph": "f", "bp": "e", **arrow, "pid": rank, "tid": streams[span.index]}
        yield {**ends, "ts": microseconds(span.start_s)}


def _launched(span: Span, event: Any, rank: int, stream: int, number: int) -> Iterator[dict[str, Any]]:
    """What a launch put on its stream."""
    start, end = microseconds(span.start_s), microseconds(span.end_s)
    about: dict[str, Any] = {
        "External id": number,
        "device": rank,
        "context": 1,
        "stream": stream,
        "correlation": number,
        "stream name": span.stream,
    }
    category = "kernel"
    if isinstance(event, Kernel):
        name = span.name
        if name.lower().startswith(RESERVED):
            name = f"kernel {name}"  # the program's own kernel, whatever it is called
        about |= {"scope": event.scope, "phase": event.phase, "flops": event.flops, "bytes": event.bytes}
        about |= {"dtype": event.dtype}
    elif isinstance(event, HostCopy):
        category, name = "gpu_memcpy", COPIES[event.kind]
        about |= {"bytes": event.bytes, "name": event.name}
        if end > start:
            about["memory bandwidth (GB/s)"] = event.bytes / (span.end_s - span.start_s) / 1e9
    else:
        name = _nccl(event)
        members = list(event.members) if isinstance(event, Collective) else [event.src, event.dst]
        about |= {
            "Collective name": event.kind,
            "dtype": event.dtype,
            "bytes": event.bytes,
            "Process Group Name": event.group,
            "Process Group Ranks": json.dumps(members),
            "Group size": len(members),
            "seq": event.seq,
            "name": event.name,
            "waited for others (us)": round((span.moves_s - span.start_s) * 1e6, 3),
        }
    yield {
        **{"ph": "X", "cat": category, "name": name, "pid": rank, "tid": stream, "ts": start, "dur": end - start},
        "args": about,
    }


def _nccl(event: Collective | Transfer) -> str:
    """As NCCL names its kernels: "ncclDevKernel_AllReduce_Sum_bfloat16_RING", "ncclDevKernel_SendRecv"."""
    if isinstance(event, Transfer):
        return "ncclDevKernel_SendRecv"
    words = [event.kind.title().replace("_", ""), event.op.title(), event.dtype, event.algorithm.upper()]
    return "_".join(["ncclDevKernel", *(word for word in words if word)])


def _named(what: str, where: dict[str, int], args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "ts": 0, **where, "args": args}
