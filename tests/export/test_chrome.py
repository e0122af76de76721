"""Chrome files: every event is the timeline's, and readers of torch's profiles see the same overlap and idle time."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from emu.cost import price
from emu.export import chrome_json, chrome_json_by_rank
from emu.trace.events import Collective, HostWait, Kernel, Mark, Transfer
from emu.trace.trace import Trace, UnknownRank

from .exported import HOSTILE, TOY, covered, traces

COPIES = {"to_host": "Memcpy DtoH (Device -> Pinned)", "from_host": "Memcpy HtoD (Pinned -> Device)"}


def events_of(content: bytes, phase: str, *categories: str) -> list[dict[str, Any]]:
    found = json.loads(content)["traceEvents"]
    return [e for e in found if e["ph"] == phase and (not categories or e["cat"] in categories)]


def rounded(time_s: float) -> int:
    return round(time_s * 1e6)


@given(traces())
@settings(max_examples=25, deadline=None)
def test_every_event_is_the_timelines(trace):
    timeline = price(trace, TOY)
    content = chrome_json(timeline)
    device = {e["args"]["correlation"]: e for e in events_of(content, "X", "kernel", "gpu_memcpy")}
    calls = {e["args"]["correlation"]: e for e in events_of(content, "X", "cuda_runtime") if "reason" not in e["args"]}
    spans = [(rank, span) for rank in trace.ranks for span in timeline.spans[rank]]
    assert len(device) == len(events_of(content, "X", "kernel", "gpu_memcpy")) == len(spans)
    assert device.keys() == calls.keys()
    for number, (rank, span) in zip(sorted(device), spans):
        shown, call, event = device[number], calls[number], trace[rank][span.index]
        assert (shown["pid"], shown["args"]["device"], shown["args"]["stream name"]) == (rank, rank, span.stream)
        assert shown["tid"] == shown["args"]["stream"] >= 7
        assert (shown["ts"], shown["ts"] + shown["dur"]) == (rounded(span.start_s), rounded(span.end_s))
        assert all(type(shown[field]) is int for field in ("ts", "dur"))
        assert (shown["cat"] == "gpu_memcpy") == (span.kind == "host copy")
        assert shown["name"].startswith("nccl") == (span.kind in ("collective", "transfer"))
        if span.kind == "kernel":
            assert shown["name"].endswith(span.name)
        if span.kind == "host copy":
            assert shown["name"] == COPIES[event.kind]
        assert shown["args"]["bytes"] == event.bytes
        # It was called on its own rank's host, when the host came to it, and before it ran.
        hosts = timeline.event_times(rank)
        assert call["pid"] != rank
        assert call["ts"] == rounded(hosts[span.index - 1] if span.index else 0.0) <= shown["ts"]
        assert call["ts"] + call["dur"] == rounded(hosts[span.index])


@given(traces())
@settings(max_examples=25, deadline=None)
def test_rows_are_streams_on_which_nothing_overlaps(trace):
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    names: dict[tuple[int, int], set[str]] = {}
    for event in events_of(chrome_json(price(trace, TOY)), "X", "kernel", "gpu_memcpy"):
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
        names.setdefault((event["pid"], event["tid"]), set()).add(event["args"]["stream name"])
    assert all(len(streams) == 1 for streams in names.values())
    for row in rows.values():
        row.sort(key=lambda e: (e["ts"], e["ts"] + e["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(row))


@given(traces())
@settings(max_examples=25, deadline=None)
def test_overlap_and_idle_time_read_from_a_file_are_the_timelines_within_rounding(trace):
    """As HolisticTraceAnalysis computes them: what kernels are is told by their names."""
    timeline = price(trace, TOY)
    for rank, content in zip(trace.ranks, chrome_json_by_rank(timeline).values()):
        read = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events_of(content, "X", "kernel", "gpu_memcpy")]
        spans = timeline.spans[rank]
        talking = [(a, b) for name, a, b in read if re.match("nccl.*Kernel", name)]
        copying = [(a, b) for name, a, b in read if re.match("Memcpy|Memset|dma", name)]
        running = [(a, b) for name, a, b in read if not re.match("nccl.*Kernel|Memcpy|Memset|dma", name)]
        ours = {
            kind: [(1e6 * s.start_s, 1e6 * s.end_s) for s in spans if s.kind in kind]
            for kind in ("kernel", "collective transfer", "host copy")
        }
        for found, true in zip((running, talking, copying), ours.values()):
            assert len(found) == len(true)
            assert covered(found) == pytest.approx(covered(true), abs=len(true))
        both = [*running, *talking]
        overlap = covered(running) + covered(talking) - covered(both)
        true_both = [*ours["kernel"], *ours["collective transfer"]]
        true_overlap = covered(ours["kernel"]) + covered(ours["collective transfer"]) - covered(true_both)
        assert overlap == pytest.approx(true_overlap, abs=2 * len(spans))


@given(traces())
@settings(max_examples=25, deadline=None)
def test_names_stay_names(trace):
    for rank, content in zip(trace.ranks, chrome_json_by_rank(price(trace, TOY)).values()):
        first = re.search(rb'"rank":\s+(\d+)', content)  # how HolisticTraceAnalysis finds a file's rank
        assert first is not None
        assert int(first[1]) == rank == json.loads(content)["distributedInfo"]["rank"]
        marks = [e["name"] for e in events_of(content, "i")]
        assert marks == [e.name for e in trace[rank] if isinstance(e, Mark)]


def test_the_host_waits_where_it_waits():
    events = [Kernel("mm", "", "", 0, 10**9, "float32", (), "side"), HostWait("side", "item"), HostWait("", "end")]
    timeline = price(Trace({"dp": 1}, {0: events}), TOY)
    (wait,) = (e for e in events_of(chrome_json(timeline), "X", "cuda_runtime") if "reason" in e["args"])
    hosts = timeline.event_times(0)
    assert (wait["name"], wait["args"]["reason"]) == ("cudaStreamSynchronize", "item")  # the second finds all done
    assert (wait["ts"], wait["ts"] + wait["dur"]) == (rounded(hosts[0]), rounded(hosts[1]))


def test_arrows_lead_from_a_launch_to_what_it_launched():
    events = [Kernel("mm", "", "", 0, 10**8, "float32", (), stream) for stream in ("default", "side")]
    content = chrome_json(price(Trace({"dp": 2}, {0: events, 1: events}), TOY))
    starts, ends = events_of(content, "s", "ac2g"), events_of(content, "f", "ac2g")
    kernels = events_of(content, "X", "kernel")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [e["args"]["correlation"] for e in kernels]
    assert len({e["id"] for e in starts}) == 4
    assert [(e["pid"], e["tid"], e["ts"]) for e in ends] == [(e["pid"], e["tid"], e["ts"]) for e in kernels]


@pytest.mark.parametrize("name", [name for name in HOSTILE if name[:4] in ("nccl", "Memc")])
def test_a_programs_kernel_is_no_communication_whatever_it_is_called(name):
    kernel = Kernel(name, "", "", 0, 10**8, "float32", (), "default")
    (shown,) = events_of(chrome_json(price(Trace({"dp": 1}, {0: [kernel]}), TOY)), "X", "kernel")
    assert shown["name"] == f"kernel {name}"


def test_a_collective_says_who_takes_part():
    rest = (4096, (), "bfloat16", "sum", "ring", -1, "comm", "default", 1, "grads")
    events = {r: [Collective("reduce_scatter", "dp", (0, 1), 0, *rest)] for r in range(2)}
    first, second = events_of(chrome_json(price(Trace({"dp": 2}, events), TOY)), "X", "kernel")
    assert first["name"] == second["name"] == "ncclDevKernel_ReduceScatter_Sum_bfloat16_RING"
    about = first["args"]
    assert (about["Process Group Name"], about["Process Group Ranks"], about["Group size"]) == ("dp", "[0, 1]", 2)
    assert (about["Collective name"], about["name"], about["bytes"]) == ("reduce_scatter", "grads", 4096)


def test_what_was_posted_together_gets_rows_of_its_own():
    sends = [Transfer("send", "pp", 0, 1, n, 10**6, "float32", "pp", "default", n + 1, "") for n in range(2)]
    events = {0: sends, 1: [send._replace(kind="recv") for send in sends]}
    content = chrome_json(price(Trace({"pp": 2}, events), TOY), [0])
    assert [e["tid"] for e in events_of(content, "X", "kernel")] == [7, 8]
    names = [e["args"]["name"] for e in events_of(content, "M") if e["name"] == "thread_name"]
    assert names == ["host", "stream 7 (pp)", "stream 8 (pp (2))"]


def test_a_file_of_some_ranks():
    timeline = price(Trace({"dp": 2}, {0: [Mark("here")], 1: [Mark("there")]}), TOY)
    assert list(chrome_json_by_rank(timeline)) == ["rank_0.json", "rank_1.json"]
    assert [e["name"] for e in events_of(chrome_json(timeline, [1]), "i")] == ["there"]
    assert json.loads(chrome_json(timeline))["distributedInfo"] == {"backend": "nccl", "ranks": [0, 1], "world_size": 2}
    with pytest.raises(UnknownRank):
        chrome_json(timeline, [2])
