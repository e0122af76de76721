"""The record of a stepped program says at every step what the stepper says there."""

from __future__ import annotations

import pytest
from canvas.reader import Reader, carried
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import MESH, full, passes_on, ring, stuck, to_end, training, waits_in_a_circle, wrong

import emu
from emu import EmuError, testing
from emu.stepping.recorded import Recording

PROGRAMS = {
    "a bit of everything": (training, MESH),
    "a ring": (ring, emu.Mesh(dp=3)),
    "messages down a line": (passes_on, emu.Mesh(pp=4)),
    "a rank that is stuck": (stuck, emu.Mesh(dp=2)),
    "a circle": (waits_in_a_circle, emu.Mesh(dp=2)),
    "out of memory": (full, emu.Mesh(dp=2)),
    "its own mistake": (wrong, emu.Mesh(dp=2)),
}


def agree(reader: Reader, s: emu.Stepper, every: int = 1) -> None:
    last = len(s.history) - (not s.history.ended)
    for index in sorted({*range(0, last + 1, every), last}):
        assert reader.state(index) == s.at(index).state(times=False), index


def followed(s: emu.Stepper) -> Recording:
    return Recording(s.history, s.mesh, s.cluster)


def end(s: emu.Stepper) -> None:
    try:
        to_end(s)
    except Exception as error:
        assert s.error is error  # the program's own


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_step_is_in_the_record(name):
    with emu.step(*PROGRAMS[name]) as s:
        end(s)
        agree(Reader(carried(followed(s).whole())), s, 11 if name == "a bit of everything" else 1)


@settings(max_examples=15)
@given(testing.programs(max_ranks=4), st.integers(0, 3))
def test_every_step_of_any_program_is_in_the_record(written, order):
    with emu.step(written.program, written.mesh, order=order) as s:
        end(s)
        agree(Reader(carried(followed(s).whole())), s, 3)


@settings(max_examples=10)
@given(st.sampled_from([(training, MESH), (passes_on, emu.Mesh(pp=4)), (stuck, emu.Mesh(dp=2))]), st.data())
def test_parts_joined_are_the_whole(program, data):
    with emu.step(*program) as s:
        growing = followed(s)
        reader = Reader(carried(growing.whole()))
        while not s.ended:
            try:
                s.next(data.draw(st.integers(1, 120), label="steps"))
            except EmuError:
                assert s.error is not None
            news = growing.news()
            assert news.keys() == {"part"}
            reader.join(carried(news["part"]))
            agree(reader, s, 1000)
            assert growing.news() == {}
        whole = Reader(carried(followed(s).whole()))
        assert reader.tables == whole.tables and reader.head == whole.head


@settings(max_examples=15)
@given(st.integers(2, 80), st.integers(0, 3), st.integers(0, 80))
def test_a_record_begins_anew_where_another_rank_went_first(n, rank, more):
    with emu.step(training, MESH) as s:
        growing = followed(s)
        s.next(n)
        reader = Reader(carried(growing.whole()))
        s.back(n // 2)
        cuts = len(s.history.cuts)
        s.next(3, rank=rank)
        news = growing.news()
        if len(s.history.cuts) > cuts:
            assert news.keys() == {"record"}
            reader = Reader(carried(news["record"]))
        elif news:
            reader.join(carried(news["part"]))
        agree(reader, s, 20)
        if more:
            s.next(more)
        news = growing.news()
        if news:
            reader.join(carried(news["part"]))
        agree(reader, s, 20)


def test_what_a_rank_stands_before_that_gave_way_is_in_the_record():
    with emu.step(training, MESH) as s:
        s.next(2)
        s.next(1, rank=2)
        s.next(1, rank=3)
        reader = Reader(carried(followed(s).whole()))
        assert reader.tables["coming"]
        agree(reader, s)


def test_times_are_those_of_the_record_so_far():
    with emu.step(training, MESH) as s:
        s.until("all_reduce")
        growing = followed(s)
        growing.whole()
        for _ in range(6):
            s.next(25)
            growing.news()
            priced = growing.spans()
            timeline = s.now.timeline()
            assert priced["step_time_s"] == timeline.step_time_s and priced["provisional"]
            reader = Reader(carried(growing.record.whole()))
            spans, rows = reader.tables["spans"], reader.head["rows"]
            for rank, own in timeline.spans.items():
                mine = [span for span in spans if rows[span["row"]]["rank"] == rank]
                assert sorted((x["start_s"], x["end_s"]) for x in mine) == sorted((x.start_s, x.end_s) for x in own)
                host = reader.last("hosts", s.index, rank=rank)
                assert (host and host["at_s"]) == s.rank(rank).state()["host_s"]


def test_a_bar_is_given_to_its_stream_at_the_step_after_that_of_its_kernel():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        to_end(s)
        growing = followed(s)
        growing.spans()
        reader = Reader(carried(growing.whole()))
        rows = reader.head["rows"]
        for span in reader.tables["spans"]:
            rank, index = rows[span["row"]]["rank"], span["step"]
            taken = s.history.ops[index - 1]
            assert taken.rank == rank and taken.kind in ("kernel", "collective")
