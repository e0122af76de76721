"""Perfetto files: the public package parses them, and what it finds is the timeline and the memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from emu.cost import price
from emu.export import perfetto_bytes
from emu.spmd import EmuError
from emu.trace.events import CATEGORIES, Alloc, Collective, Kernel, Mark, Transfer
from emu.trace.memory import Memory
from emu.trace.trace import Trace

from .exported import TOY, traces

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


def parsed(content: bytes) -> tuple[dict[tuple[int, str], list[Any]], dict[int, str]]:
    """((rank, row) -> its packets with events, in order; track -> row)."""
    trace = protos.Trace()
    trace.ParseFromString(content)
    rows: dict[int, tuple[int, str]] = {}
    processes: dict[int, int] = {}
    found: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for packet in trace.packet:
        track = packet.track_descriptor
        if packet.HasField("track_descriptor"):
            assert track.uuid not in rows and track.uuid not in processes
            if track.HasField("process"):
                processes[track.uuid] = int(track.process.process_name.removeprefix("rank "))
            else:
                rows[track.uuid] = processes[track.parent_uuid], track.name
        else:
            found[rows[packet.track_event.track_uuid]].append(packet)
    return found, {uuid: name for uuid, (_, name) in rows.items()}


def slices(packets: list[Any]) -> list[tuple[str, int, int]]:
    begins, ends = packets[::2], packets[1::2]
    event = protos.TrackEvent
    assert all(p.track_event.type == event.TYPE_SLICE_BEGIN for p in begins)
    assert all(p.track_event.type == event.TYPE_SLICE_END for p in ends)
    return [(b.track_event.name, b.timestamp, e.timestamp) for b, e in zip(begins, ends, strict=True)]


@given(traces())
@settings(max_examples=25, deadline=None)
def test_slices_are_spans_one_after_another(trace):
    timeline = price(trace, TOY)
    found, _ = parsed(perfetto_bytes(timeline))
    for rank in trace.ranks:
        rows = [slices(packets) for (r, row), packets in found.items() if r == rank and row.startswith("stream")]
        for row in rows:
            assert all(a[2] <= b[1] for a, b in pairwise(row))
        spans = [
            (s.name.replace("\ud800", "?"), round(s.start_s * 1e9), round(s.end_s * 1e9)) for s in timeline.spans[rank]
        ]
        assert sorted(s for row in rows for s in row) == sorted(spans)
        marks = [p for p in found[rank, "host"] if p.track_event.type == protos.TrackEvent.TYPE_INSTANT]
        named = [e.name.replace("\ud800", "?") for e in trace[rank] if isinstance(e, Mark)]
        assert [p.track_event.name for p in marks] == named


@given(traces())
@settings(max_examples=25, deadline=None)
def test_counters_are_memory_by_category(trace):
    memory, timeline = Memory(trace), price(trace, TOY)
    found, _ = parsed(perfetto_bytes(timeline, memory))
    for rank in trace.ranks:
        indices, lines = memory.series(rank)
        hosts = timeline.event_times(rank)
        for category in CATEGORIES:
            shown = [(p.timestamp, p.track_event.counter_value) for p in found.get((rank, f"HBM {category}"), [])]
            true = [(round(hosts[i] * 1e9), n) for i, n in zip(indices, lines[category])]
            changes = (
                [now for n, now in enumerate(true) if not n or now[1] != true[n - 1][1]]
                if any(n for _, n in true)
                else []
            )
            assert shown == changes
    assert not [row for _, row in parsed(perfetto_bytes(timeline))[0] if row.startswith("HBM")]


def flows(found: dict[tuple[int, str], list[Any]]) -> dict[int, set[int]]:
    """Flow -> the ranks that it joins."""
    joined: dict[int, set[int]] = defaultdict(set)
    for (rank, _), packets in found.items():
        for packet in packets:
            for flow in packet.track_event.flow_ids:
                joined[flow].add(rank)
    return joined


def test_arrows_join_the_parts_of_one_communication():
    rest = (10**6, (), "float32", "sum", "", -1, "comm", "default")
    events: dict[int, list[Any]] = {r: [] for r in range(4)}
    for seq in range(2):
        for r in range(4):
            members = (0, 1) if r < 2 else (2, 3)
            events[r].append(Collective("all_reduce", "dp", members, seq, *rest, seq + 1, ""))
    events[0].append(Transfer("send", "pp", 0, 3, 0, 10**6, "float32", "pp", "default", 3, ""))
    events[3].append(Transfer("recv", "pp", 0, 3, 0, 10**6, "float32", "pp", "default", 3, ""))
    events[1].append(Kernel("mm", "", "", 0, 10**6, "float32", (), "default"))
    found, _ = parsed(perfetto_bytes(price(Trace({"dp": 4}, events), TOY)))
    joined = flows(found)
    assert sorted(sorted(ranks) for ranks in joined.values()) == [[0, 1], [0, 1], [0, 3], [2, 3], [2, 3]]


def test_counters_count_bytes():
    trace = Trace({"dp": 1}, {0: [Alloc(1, 512, "parameters", "default")]})
    read = protos.Trace()
    read.ParseFromString(perfetto_bytes(price(trace, TOY), Memory(trace)))
    (track,) = (p.track_descriptor for p in read.packet if p.track_descriptor.HasField("counter"))
    assert (track.name, track.counter.unit) == ("HBM parameters", protos.CounterDescriptor.UNIT_SIZE_BYTES)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(EmuError, match=r"pip install 'emu\[trace\]'"):
        perfetto_bytes(price(Trace({"dp": 1}, {0: []}), TOY))
