"""Traces as text: read back as written, and damaged text refused."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emu.trace.compare import equal
from emu.trace.events import EVENTS, Alloc, Collective, EventRecord, EventWait, Kernel, Mark
from emu.trace.files import LETTERS, TraceError, dumps, loads
from emu.trace.trace import Trace

text = st.text(max_size=6)
size = st.integers(0, 2**63 - 1)


def of_type(hint):
    return text if hint is str else size if hint is int else st.lists(size, max_size=4).map(tuple)


def events():
    kinds = [st.builds(kind, **{n: of_type(h) for n, h in get_type_hints(kind).items()}) for kind in EVENTS]
    return st.one_of(kinds)


def traces(max_events: int = 6):
    axes = st.dictionaries(text, size, max_size=3)
    return st.builds(
        Trace, axes, st.dictionaries(st.integers(0, 99), st.lists(events(), max_size=max_events), max_size=3)
    )


SMALL = Trace(
    {"dp": 2},
    {
        0: [
            Kernel("mm", "blocks.0", "forward", 2048, 384, "float32", (1, 8, 8, 16), "default"),
            Collective("all_reduce", "dp", (0, 1), 0, 4, (), "float32", "sum", "", -1, "dp", "default", 1, ""),
        ],
        1: [Mark("step 0")],
    },
)


@given(traces())
@example(Trace({}, {}))
@example(SMALL)
def test_what_is_written_is_read_back(trace):
    assert equal(loads(dumps(trace)), trace)


@given(traces())
def test_the_same_trace_gives_the_same_bytes(trace):
    data = dumps(trace)
    assert data == dumps(trace) == dumps(loads(data))
    assert data.isascii() and data.endswith(b"\n")


def test_different_traces_give_different_bytes():  # negative control: bytes that were always equal would pass above
    seen = set()
    for kind in (EventRecord, EventWait):  # equal as tuples
        seen.add(dumps(Trace({}, {0: [kind(1, "s")]})))
    seen.add(dumps(Trace({}, {1: [EventRecord(1, "s")]})))
    seen.add(dumps(Trace({"dp": 1}, {0: [EventRecord(1, "s")]})))
    assert len(seen) == 4


def test_every_event_has_a_letter():
    assert set(LETTERS.values()) == set(EVENTS)
    assert len(LETTERS) == len(EVENTS)


@given(traces(max_events=3))
@settings(max_examples=30, deadline=None)
@example(SMALL)
def test_text_cut_short_anywhere_is_refused(trace):
    data = dumps(trace)
    for end in range(len(data)):
        with pytest.raises(TraceError) as caught:
            loads(data[:end])
        assert caught.value.hint and caught.value.line is not None
        assert f"line {caught.value.line}" in str(caught.value)


@given(traces(max_events=2), st.data())
def test_damaged_text_is_refused_or_read_as_a_trace_but_never_fails_otherwise(trace, data):
    damaged = bytearray(dumps(trace))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = loads(bytes(damaged))
    except TraceError:
        return
    dumps(read)  # a change inside a number or a name gives another whole trace


@given(st.binary(max_size=60))
def test_anything_else_is_refused(data):
    with pytest.raises(TraceError):
        loads(data)


def edited(line: int, change) -> bytes:
    lines = dumps(SMALL).decode().split("\n")
    value = json.loads(lines[line - 1])
    lines[line - 1] = json.dumps(change(value))
    return "\n".join(lines).encode()


def put(place, value):
    def change(whole):
        whole[place] = value
        return whole

    return change


@pytest.mark.parametrize(
    ("line", "change", "says"),
    [
        (1, put("emu_trace", 2), "format '2', this emu reads 1"),
        (1, put("emu_trace", True), "format 'True'"),
        (1, put("axes", [["dp", -1]]), "axes in the header must be pairs of axis and size"),
        (1, put("axes", {"dp": 2}), "axes in the header"),
        (1, put("ranks", [[0, 2], [0, 1]]), "name something twice"),
        (1, put("ranks", [[0, 2], [1, 10**18]]), "the header promises"),
        (1, put("ranks", [[0, 2], [1, 10**30]]), "ranks in the header must be pairs"),
        (1, put("more", 1), "should not have"),
        (2, put(0, "Z"), "no event starts like"),
        (2, put(0, ["K"]), "no event starts like"),
        (2, put(1, 7), "name of a Kernel is '7'; it must be text"),
        (2, put(4, 1.5), "flops of a Kernel is '1.5'; it must be a whole number"),
        (2, put(4, True), "flops of a Kernel is 'True'"),
        (2, put(4, -1), "flops of a Kernel is '-1'"),
        (2, put(4, 2**63), "it must be a whole number from 0 to 9223372036854775807"),
        (2, put(7, [1, "8"]), "dims of a Kernel"),
        (2, lambda v: v[:-1], "a Kernel has 8 fields, not 7"),
        (2, lambda v: {"K": v}, "no event starts like"),
        (3, put(10, None), "root of a Collective is 'None'"),
        (4, lambda v: [*v, 0], "a Mark has 1 fields, not 2"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(line, change, says):
    with pytest.raises(TraceError) as caught:
        loads(edited(line, change))
    assert says in caught.value.problem
    assert caught.value.line == line or "promises" in says


def test_an_edit_that_is_right_is_read():  # negative control for the edits above
    assert loads(edited(2, put(4, 4096)))[0][0].flops == 4096


def test_deeply_nested_text_is_refused():
    header = b'{"emu_trace":1,"axes":[],"ranks":[[0,1]]}\n'
    with pytest.raises(TraceError):
        loads(header + b"[" * 100_000 + b"\n")


@pytest.mark.parametrize("event", [Alloc(1, 2.0, "temporary", "default"), Alloc(True, 1, "t", "s"), "no event"])
def test_events_that_could_not_be_read_back_are_not_written(event):
    with pytest.raises(TraceError, match="rank 3, event 0 cannot be written"):
        dumps(Trace({}, {3: [event]}))
