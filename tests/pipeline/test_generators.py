"""A pipeline schedule of one's own is a plain function; what is wrong with it is said."""

from __future__ import annotations

import pytest

from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.schedules import make, one_f_one_b
from emu.parallel.pipeline.timing import timed
from emu.spmd import EmuError, PlanError, ScheduleError


def test_a_plain_function_is_a_schedule():
    def last_first(rank, ranks, microbatches, chunks):
        for n in reversed(range(microbatches)):
            yield Action(rank, "F", n)
        for n in reversed(range(microbatches)):
            yield Action(rank, "B", n)

    schedule = Schedule.of(last_first, 2, 3)
    assert schedule.name == "last-first"
    assert str(schedule) == "0F2 0F1 0F0 0B2 0B1 0B0\n1F2 1F1 1F0 1B2 1B1 1B0"
    check(schedule)
    assert timed(schedule).makespan == timed(make("gpipe", 2, 3)).makespan
    assert make(last_first, 2, 3) == schedule and make(last_first, 2, 3).name == "last-first"


def test_it_may_take_options_and_sizes_by_any_name():
    def rotated(r, n, k, c, by=0, **more):
        return [a._replace(microbatch=(a.microbatch + by) % k) for a in one_f_one_b(r, n, k)]

    check(make(rotated, 3, 5, by=2))
    check(make(rotated, 3, 5, by=2, whatever=1))
    assert make(rotated, 3, 5, by=2) != make(rotated, 3, 5)


def test_it_is_asked_again_each_time():
    order = ["F", "B"]

    def odd(rank, ranks, microbatches, chunks):
        return [Action(rank, kind, 0) for kind in order]

    check(make(odd, 1, 1))
    order.reverse()
    with pytest.raises(ScheduleError):
        check(make(odd, 1, 1))


@pytest.mark.parametrize("wrong", ["0F0", None, (0, "F", 0), 3])
def test_what_it_yields_must_be_actions(wrong):
    def words(rank, ranks, microbatches, chunks):
        yield wrong

    with pytest.raises(EmuError, match=r"words yielded .*no action") as caught:
        Schedule.of(words, 2, 2)
    assert "Action(" in caught.value.hint


@pytest.mark.parametrize("wrong", [None, 3, "0F0 0B0"])
def test_what_it_returns_must_be_a_row(wrong):
    def nothing(rank, ranks, microbatches, chunks):
        return wrong

    with pytest.raises(EmuError, match=r"nothing returned .* for rank 0, not its actions"):
        Schedule.of(nothing, 2, 2)


def test_what_it_forgets_is_found_and_said():
    def forgets(rank, ranks, microbatches, chunks):
        for n in range(microbatches):
            yield Action(rank, "F", n)
            if (rank, n) != (1, 2):
                yield Action(rank, "B", n)

    with pytest.raises(ScheduleError, match="1B2"):
        check(Schedule.of(forgets, 2, 4))


def test_its_own_refusals_come_through():
    def even_only(rank, ranks, microbatches, chunks):
        if ranks % 2:
            raise PlanError(f"even numbers of ranks, but pp={ranks}", "say pp=2", field="pp", nearest=2)
        return iter(())

    with pytest.raises(PlanError, match="pp=3"):
        make(even_only, 3, 2)
