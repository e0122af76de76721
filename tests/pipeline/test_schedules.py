"""Schedules written by hand: all that GPipe, 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2 allow can be run, and says what cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.schedules import SCHEDULES, interleaved, make
from emu.spmd import PlanError, ScheduleError

ONE_CHUNK = ("1f1b", "zb-h2")
HERE = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)
chunks = st.integers(1, 4)


@st.composite
def sizes(draw, name: str) -> tuple[str, int, int, int]:
    return name, draw(ranks), draw(microbatches), 1 if name in ONE_CHUNK else draw(chunks)


any_schedule = st.sampled_from(HERE).flatmap(sizes)


@given(any_schedule)
def test_everything_is_there_once_after_what_it_needs_and_no_rank_waits_for_ever(asked):
    name, p, m, v = asked
    schedule = make(name, p, m, v)
    check(schedule)
    assert (schedule.ranks, schedule.microbatches, schedule.stages) == (p, m, p * v)
    assert schedule.name == name
    assert schedule.splits_backward == name.startswith("zb")
    assert all(rank == stage % p for (stage, _), rank in schedule.places.items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("p", range(1, 9))
def test_all_sizes(name, p):
    for m in range(1, 25):
        for v in (1,) if name in ONE_CHUNK else (1, 2, 3, 4):
            check(make(name, p, m, v))


@given(ranks, microbatches, st.integers(2, 4), st.data())
def test_interleaved_with_any_count_of_microbatches_in_a_row(p, m, v, data):
    count = data.draw(st.integers(1, m))
    schedule = make("interleaved", p, m, v, count=count)
    check(schedule)
    first = [a.microbatch for a in schedule.rows[0] if a.kind == "F" and a.stage == 0]
    second = [a.microbatch for a in schedule.rows[0] if a.kind == "F" and a.stage == p]
    assert first == second == list(range(m))
    forwards = _forwards(schedule)
    starts = [n for n, a in enumerate(forwards) if a.stage == 0 and a.microbatch % count == 0]
    for start in starts:  # so many of them, or what is left, through each chunk in turn
        size = min(count, m - forwards[start].microbatch)
        turn = [a.stage // p for a in forwards[start : start + size * v]]
        assert turn == [chunk for chunk in range(v) for _ in range(size)]


def test_a_short_round_without_holes_would_wait_for_ever(monkeypatch):
    """What holes are for: three ranks, one microbatch in a row. Left out, rank 0 runs forwards too far ahead."""
    check(make("interleaved", 3, 3, 2, count=1))

    def turns(ranks, microbatches, chunks, count=None):
        return [(chunk, microbatch) for microbatch in range(microbatches) for chunk in range(chunks)]

    monkeypatch.setitem(interleaved.__globals__, "turns", turns)
    with pytest.raises(ScheduleError, match="wait"):
        check(Schedule.of(interleaved, 3, 3, 2))


@pytest.mark.parametrize("name", HERE)
def test_a_row_that_lacks_an_action_or_has_one_twice_or_too_soon_is_found(name):
    """The control of the properties above."""
    row = list(SCHEDULES[name](1, 4, 8, 1))
    broken = [row[1:], row[:-1], [*row, row[-1]], [next(a for a in row if a.kind != "F"), *row]]
    for other in broken:
        rows = [tuple(SCHEDULES[name](rank, 4, 8, 1)) if rank != 1 else tuple(other) for rank in range(4)]
        with pytest.raises(ScheduleError):
            check(Schedule(tuple(rows)))


def test_interleaved_needs_all_the_forwards_ahead_that_it_has(monkeypatch):
    """With as many forwards ahead as 1F1B has, each rank waits for the next."""
    monkeypatch.setitem(
        interleaved.__globals__, "in_turn", lambda f, b, ahead: _in_turn(f, b, ahead - 4 if ahead > 4 else 0)
    )
    with pytest.raises(ScheduleError):
        check(Schedule.of(interleaved, 4, 8, 2))


@pytest.mark.parametrize(
    ("p", "m", "count", "rounds"),
    [
        (4, 8, None, [4, 4]),  # Megatron's
        (4, 10, None, [5, 5]),  # torch's: two whole pipelines in the batch, so two rounds
        (4, 11, None, [6, 5]),  # which both refuse
        (4, 7, None, [7]),
        (4, 3, None, [3]),
        (4, 8, 8, [8]),  # breadth-first
        (4, 12, 5, [5, 5, 2]),
        (4, 14, 5, [5, 5, 4]),
        (4, 8, 3, [3, 3, 2]),
    ],
)
def test_sizes_of_rounds(p, m, count, rounds):
    from emu.parallel.pipeline.schedules.interleaved import turns

    order = turns(p, m, 2, count)
    got, last = [], None
    for chunk, microbatch in order:
        if chunk == 0 and last != 0:
            got.append(0)
        got[-1] += chunk == 0 and microbatch is not None
        last = chunk
    assert got == rounds
    padded = sum(max(size, p) for size in rounds) if len(rounds) > 1 else m
    assert len(order) == 2 * padded


@given(ranks, microbatches)
def test_as_many_rounds_as_whole_pipelines_and_no_two_differ_by_more_than_one(p, m):
    forwards = _forwards(make("interleaved", p, m, 2))
    rounds, last = [], None
    for action in forwards:
        if action.stage == 0 and last != 0:
            rounds.append(0)
        rounds[-1] += action.stage == 0
        last = action.stage
    assert sum(rounds) == m and len(rounds) == max(1, m // p)
    assert rounds == sorted(rounds, reverse=True) and rounds[0] - rounds[-1] <= 1


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("name", ONE_CHUNK)
def test_more_chunks_than_the_schedule_has(name, chunks):
    with pytest.raises(PlanError, match=f"one chunk a rank, but chunks={chunks}") as caught:
        make(name, 4, 8, chunks)
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("chunks", chunks, 1)
    assert ("interleaved" if name == "1f1b" else "zb-h1") in caught.value.hint


@pytest.mark.parametrize(("count", "nearest"), [(9, 8), (0, 1), (-3, 1), (True, 1), (2.0, 8), ("4", 8)])
def test_a_count_that_there_are_not_enough_microbatches_for(count, nearest):
    with pytest.raises(PlanError, match=r"count=.*microbatches=8") as caught:
        make("interleaved", 4, 8, 2, count=count)
    assert repr(count) in str(caught.value)
    assert (caught.value.field, caught.value.nearest) == ("count", nearest)


def test_a_count_that_says_nothing():
    with pytest.raises(PlanError, match=r"count=4 .* chunks=1"):
        make("interleaved", 4, 8, count=4)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ((0, 8), "pp"),
        ((4, 0), "microbatches"),
        ((4, 8, 0), "chunks"),
        ((4.0, 8), "pp"),
        ((4, True), "microbatches"),
    ],
)
@pytest.mark.parametrize("name", HERE)
def test_sizes_that_are_no_whole_numbers_from_one(name, wrong, field):
    make(name, 4, 1)  # so that True would be found among schedules that are kept, where it equals 1
    with pytest.raises(PlanError, match="whole number of at least 1") as caught:
        make(name, *wrong)
    assert caught.value.field == field


@pytest.mark.parametrize(("name", "meant"), [("1F1B", "1f1b"), ("zb_h1", "zb-h1"), ("gppe", "gpipe"), ("x", None)])
def test_a_name_that_is_none(name, meant):
    with pytest.raises(PlanError, match=f"no schedule '{name}'") as caught:
        make(name, 4, 8)
    assert caught.value.nearest == meant
    assert "interleaved" in caught.value.hint


@pytest.mark.parametrize("name", [None, 3, [], ["gpipe"]])
def test_a_name_that_is_no_text(name):
    with pytest.raises(PlanError, match="no schedule"):
        make(name, 4, 8)


def test_an_option_that_there_is_not():
    with pytest.raises(PlanError, match="gpipe has no option count=3") as caught:
        make("gpipe", 4, 8, count=3)
    assert caught.value.field == "count"
    with pytest.raises(PlanError, match="options are count"):
        make("interleaved", 4, 8, 2, width=[3])  # of any type


def test_the_same_question_is_answered_once():
    assert make("1f1b", 4, 8) is make("1f1b", 4, 8)
    assert make("interleaved", 4, 8, 2) is not make("interleaved", 4, 8, 2, count=8)
    assert make("interleaved", 4, 8, 2, count=8) is make("interleaved", 4, 8, 2, count=8)


@pytest.mark.parametrize("name", HERE)
def test_a_schedule_of_sixteen_ranks_and_128_microbatches_can_be_run(name):
    """How fast it is made and checked, bench_pipeline.py --schedules tells."""
    for v in (1,) if name in ONE_CHUNK else (1, 2, 4):
        check(Schedule.of(SCHEDULES[name], 16, 128, v))


def test_interleaved_with_one_chunk_is_1f1b():
    assert make("interleaved", 4, 8) == make("1f1b", 4, 8)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(2, 3))
def test_with_all_microbatches_in_a_row_forwards_are_breadth_first(p, m, v):
    assert _forwards(make("interleaved", p, m, v, count=m)) == _forwards(make("gpipe", p, m, v))


@given(any_schedule)
def test_text_and_csv_are_read_as_they_were_written(asked):
    name, p, m, v = asked
    schedule = make(name, p, m, v)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_a_schedule_of_few_words_reads_as_in_the_papers():
    assert str(make("1f1b", 3, 4)).splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert str(make("zb-h1", 2, 3)).splitlines() == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert str(make("zb-h2", 2, 3)).splitlines() == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]
    assert str(make("gpipe", 2, 2, 2)).splitlines() == [
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    ]


def _forwards(schedule: Schedule) -> list[Action]:
    return [a for a in schedule.rows[0] if a.kind == "F"]


def _in_turn(forwards, backwards, ahead):
    yield from forwards[:ahead]
    for index, backward in enumerate(backwards):
        yield from forwards[ahead + index : ahead + index + 1]
        yield backward
