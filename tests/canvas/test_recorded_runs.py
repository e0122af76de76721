"""The record of a run that is over says at every step what reading its events one by one comes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from canvas.reader import Reader, carried
from export.exported import TOY, traces
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import MESH, passes_on, training

import emu
from emu.canvas import run_record
from emu.cost import price
from emu.trace.events import (
    CATEGORIES,
    Alloc,
    Collective,
    EventRecord,
    EventWait,
    Free,
    HostCopy,
    HostWait,
    Kernel,
    Mark,
    Recategorise,
    Transfer,
    Wait,
)
from emu.trace.memory import Memory
from emu.trace.trace import Trace

STEPS = (Kernel, Collective, Transfer, HostCopy, Wait, EventRecord, EventWait, HostWait, Mark)
KINDS = {Kernel: "kernel", Collective: "collective", Transfer: "transfer", Wait: "wait", Mark: "mark", HostWait: "host"}


def as_run(trace: Trace) -> Any:
    """What a page needs of a run, about a trace that was made by hand."""
    mesh = SimpleNamespace(axes=trace.axes, coords=lambda rank: {"dp": rank}, size=len(trace.ranks))
    timeline = price(trace, TOY)
    return SimpleNamespace(
        mesh=mesh,
        cluster=TOY,
        trace=trace,
        memory=Memory(trace),
        has_memory=True,
        timeline=lambda: timeline,
    )


def order_of(run: Any) -> list[tuple[int, int]]:
    """(rank, index of its event) of every step, in the order of the hosts' times."""
    found = []
    for rank, events in run.trace.events.items():
        times = run.timeline().event_times(rank)
        found += [(times[i], rank, i) for i, event in enumerate(events) if isinstance(event, STEPS)]
    return [(rank, i) for _, rank, i in sorted(found)]


def seen_at(run: Any, order: list[tuple[int, int]], index: int) -> dict[int, list[Any]]:
    """Of every rank, the events before its next step."""
    upcoming: dict[int, int] = {}
    for rank, i in order[index:]:
        upcoming.setdefault(rank, i)
    return {rank: list(events[: upcoming.get(rank, len(events))]) for rank, events in run.trace.events.items()}


def replayed(run: Any, order: list[tuple[int, int]], index: int) -> dict[int, dict[str, Any]]:
    """Every rank's memory, streams, marks and works, read from the start."""
    seen = seen_at(run, order, index)
    came: dict[Any, list[int]] = {}
    for rank, events in seen.items():
        for e in events:
            if isinstance(e, (Collective, Transfer)):
                came.setdefault(meeting(e), []).append(rank)
    found = {}
    for rank, events in seen.items():
        hbm = {**dict.fromkeys(CATEGORIES, 0), **run.memory.held.get(rank, {})}
        peak, mark, streams, works = sum(hbm.values()), "", {}, {}
        for e in events:
            if isinstance(e, Alloc):
                hbm[e.category] += e.bytes
            elif isinstance(e, Free):
                hbm[e.category] -= e.bytes
            elif isinstance(e, Recategorise):
                hbm[e.old] -= e.bytes
                hbm[e.new] += e.bytes
            elif isinstance(e, Mark):
                mark = e.name
            elif not isinstance(e, HostWait) and isinstance(e, STEPS):
                streams[e.stream] = streams.get(e.stream, 0) + 1
                if isinstance(e, (Collective, Transfer)) and e.stream != e.after:
                    needed = e.members if isinstance(e, Collective) else (e.src, e.dst)
                    works[e.work] = [m for m in needed if m in seen and m not in came[meeting(e)]]
                elif isinstance(e, Wait):
                    works.pop(e.work, None)
            peak = max(peak, sum(hbm.values()))
        found[rank] = {"hbm": hbm, "peak_bytes": peak, "mark": mark, "streams": streams, "works": works}
    return found


def meeting(e: Collective | Transfer) -> Any:
    return (e.group, e.seq, e.members if isinstance(e, Collective) else (e.src, e.dst))


def check(run: Any, every: int) -> None:
    record = run_record(run)
    reader, order = Reader(carried(record.whole())), order_of(run)
    assert [row["rank"] for row in reader.tables["steps"]] == [rank for rank, _ in order]
    for index in sorted({*range(0, len(order), every), len(order)}):
        state, expected = reader.state(index), replayed(run, order, index)
        assert state["ended"] == (index == len(order))
        if index < len(order):
            rank, i = order[index]
            event, op = run.trace.events[rank][i], state["op"]
            assert op["rank"] == rank and op["kind"] == KINDS.get(type(event), op["kind"])
            if isinstance(event, (Kernel, Mark)):
                assert op["name"] == event.name
        for each in state["ranks"]:
            own = expected[each["rank"]]
            assert {name: each[name] for name in ("hbm", "peak_bytes", "mark")} == {
                name: own[name] for name in ("hbm", "peak_bytes", "mark")
            }
            assert {s["name"]: s["given"] for s in each["streams"]} == own["streams"]
            assert {w["work"]: w["waits_for"] for w in each["works"]} == own["works"]
            left = [i for rank, i in order[index:] if rank == each["rank"]]
            assert each["state"] == (
                "ended" if not left else "next" if state["op"]["rank"] == each["rank"] else "ready"
            )
    waiting = {
        meeting(e) for events in run.trace.events.values() for e in events if isinstance(e, (Collective, Transfer))
    }
    assert len(reader.tables["open"]) <= len(waiting)


@settings(max_examples=30)
@given(traces(), st.integers(1, 4))
def test_any_trace_is_read_as_one_by_one(trace, every):
    check(as_run(trace), every)


@pytest.mark.parametrize("program", [(training, MESH), (passes_on, emu.Mesh(pp=4))], ids=["training", "pipeline"])
def test_a_run_is_read_as_one_by_one(program):
    check(emu.launch(*program), 17)


def test_a_window_begins_with_what_lived_before_it():
    def program(rank):
        import torch

        weights = torch.zeros(1000)
        rank.mark("begin")
        more = weights + 1
        rank.mark("end")
        return more

    part = emu.launch(program, emu.Mesh(dp=2)).window("begin", "end")
    check(part, 1)
    state = Reader(carried(run_record(part).whole())).state(0)
    assert all(sum(each["hbm"].values()) >= 4000 for each in state["ranks"])


def test_bars_and_hosts_are_those_of_the_timeline():
    run = emu.launch(training, MESH)
    reader, timeline, order = Reader(carried(run_record(run).whole())), run.timeline(), order_of(run)
    rows, spans = reader.head["rows"], reader.tables["spans"]
    assert reader.head["step_time_s"] == timeline.step_time_s and not reader.head["provisional"]
    for rank, own in timeline.spans.items():
        mine = sorted(
            (s["start_s"], s["end_s"], s["moves_s"], s["step"]) for s in spans if rows[s["row"]]["rank"] == rank
        )
        given = {i: index + 1 for index, (of, i) in enumerate(order) if of == rank}
        assert mine == sorted((s.start_s, s.end_s, s.moves_s, given[s.index]) for s in own)
        assert reader.last("hosts", len(order), rank=rank)["at_s"] == timeline.event_times(rank)[-1]


def test_what_a_record_has_not_is_said():
    run = emu.launch(training, MESH, track=False)
    assert any("memory was not recorded" in note for note in run_record(run).notes)
    assert any("tensors" in note for note in run_record(emu.launch(training, MESH)).notes)
