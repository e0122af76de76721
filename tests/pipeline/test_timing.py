"""When a schedule does what: as early as its needs allow, with the closed forms' makespans, bubbles and activations."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Schedule, Times, activations, check, lowered, peak_activations, timed
from emu.parallel.pipeline.schedules import make
from emu.spmd import EmuError, ScheduleError

from .rows import schedules, words

SOME = st.fractions(0, 4, max_denominator=6)  # exact, so that nothing has to be close


@st.composite
def times(draw, stages):
    each = [draw(st.one_of(SOME, st.lists(SOME, min_size=stages, max_size=stages))) for _ in range(3)]
    return Times(*each, communication=draw(SOME), overlapped=draw(st.one_of(st.none(), SOME)))


def earliest(schedule, times):
    """Starts and stops, raised until none is too early. Slow, and shares no code with ours."""

    def of(name, stage):
        value = getattr(times, name)
        return value[stage] if isinstance(value, tuple) else value

    def lasts(step):
        kinds = "".join(sorted(kind for _, kind, _ in step))
        if len(step) > 1 and times.overlapped is not None and kinds == "BF":
            return times.overlapped
        parts = {"F": ["forward"], "B": ["backward_input", "weight"], "I": ["backward_input"], "W": ["weight"]}
        return sum(of(name, stage) for stage, kind, _ in step for name in parts[kind])

    rows = [[words(action) for action in row] for row in schedule.rows]
    place = {word: (rank, n) for rank, row in enumerate(rows) for n, step in enumerate(row) for word in step}
    starts = [[Fraction(0)] * len(row) for row in rows]

    def needs(word):
        stage, kind, microbatch = word
        if kind == "F":
            return [place[stage - 1, "F", microbatch]] if stage else []
        if kind == "W":
            return [place[stage, "I", microbatch]]
        after = [place[key] for key in ((stage + 1, "B", microbatch), (stage + 1, "I", microbatch)) if key in place]
        return [place[stage, "F", microbatch], *after]

    changed = True
    while changed:
        changed = False
        for rank, row in enumerate(rows):
            for n, step in enumerate(row):
                bounds = [starts[rank][n - 1] + lasts(row[n - 1])] if n else [Fraction(0)]
                for word in step:
                    for there, position in needs(word):
                        stop = starts[there][position] + lasts(rows[there][position])
                        bounds.append(stop if there == rank else stop + times.communication)
                if max(bounds) > starts[rank][n]:
                    starts[rank][n], changed = max(bounds), True
    return [[(start, start + lasts(step)) for start, step in zip(*pair)] for pair in zip(starts, rows)]


@given(schedules(), st.data())
def test_everything_starts_as_early_as_its_needs_allow(schedule, data):
    given_times = data.draw(times(schedule.stages))
    done = timed(schedule, given_times)
    assert [[(start, stop) for start, stop, _ in row] for row in done.rows] == earliest(schedule, given_times)
    assert [tuple(action for _, _, action in row) for row in done.rows] == list(schedule.rows)


@given(schedules(), st.data())
def test_what_is_said_of_the_whole_follows_from_the_rows(schedule, data):
    done = timed(schedule, data.draw(times(schedule.stages)))
    ranks = range(schedule.ranks)
    busy = sum(done.busy(rank) for rank in ranks)
    idle = done.makespan * len(ranks) - busy
    assert done.makespan == max(stop for row in done.rows for _, stop, _ in row)
    assert done.cost == max(done.span(rank) for rank in ranks) <= done.makespan
    assert all(0 <= done.busy(rank) <= done.span(rank) for rank in ranks)
    assert done.bubble_fraction * done.makespan * len(ranks) == idle and done.bubble_ratio * busy == (
        idle if busy else 0
    )


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24), SOME, SOME, SOME)
def test_gpipe_and_1f1b_have_the_bubble_of_the_closed_form(name, ranks, microbatches, forward, inputs, weight):
    """(p - 1)(t_f + t_b) of idling a rank, whatever the two are (Narayanan et al., SC21), with fewer microbatches, too."""
    done = timed(make(name, ranks, microbatches), Times(forward, inputs, weight))
    assert done.makespan == (microbatches + ranks - 1) * (forward + inputs + weight)
    if done.makespan:
        assert done.bubble_fraction == Fraction(ranks - 1, microbatches + ranks - 1)
        assert done.bubble_ratio == Fraction(ranks - 1, microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches, bubble", [(1, 3 / 4), (2, 3 / 5), (3, 3 / 6), (4, 3 / 7), (5, 3 / 8)])
def test_fewer_microbatches_than_stages_finish(name, microbatches, bubble):
    """4 stages, forward 1, backward 2 (github.com/pytorch/torchtitan/issues/775 hung); rows written here by hand."""
    rows = []
    for stage in range(4):
        ahead = microbatches if name == "gpipe" else min(microbatches, 4 - stage)
        row = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(microbatches):
            row.append(f"{stage}B{m}")
            if ahead + m < microbatches:
                row.append(f"{stage}F{ahead + m}")
        rows.append(" ".join(row))
    schedule = Schedule.parse("\n".join(rows))
    assert schedule == make(name, 4, microbatches)
    for rows in (schedule, lowered(schedule), lowered(schedule, blocking=True)):
        check(rows)
        done = timed(rows)
        assert done.makespan == (microbatches + 3) * 3
        assert done.bubble_fraction == pytest.approx(bubble, abs=1e-15)  # one division of small whole numbers


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_one_microbatch_pays_every_transfer_there_and_back(ranks):
    done = timed(make("1f1b", ranks, 1), Times(2, 3, 4, communication=10))
    assert done.makespan == ranks * 9 + 2 * (ranks - 1) * 10
    assert done.busy(0) == 9  # a transfer keeps nobody from computing


def test_within_a_rank_nothing_is_sent():
    schedule = Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert timed(schedule, Times(communication=10)).makespan == 4 + 8 + 4 * 10


def test_a_transfer_hides_behind_computing():
    """What rank 1 needs next arrives while it computes."""
    rows = "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"
    slow, fast = (timed(Schedule.parse(rows), Times(communication=c)) for c in (1, 0))
    assert slow.makespan == fast.makespan + 2 and slow.span(1) == fast.span(1)


def test_a_late_send_makes_its_receiver_wait():
    rows = lowered(make("gpipe", 2, 2))
    late = Schedule.parse(str(rows).replace("0SEND_F0 0RECV_B0 0F1", "0RECV_B0 0F1 0SEND_F0"))
    check(late)
    assert late != rows and timed(late).makespan == timed(rows).makespan + 1


def test_a_pair_starts_when_both_parts_can_and_lasts_as_long_as_is_said():
    rows = "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    schedule = Schedule.parse(rows)
    pair = timed(schedule, Times(overlapped=2)).rows[0][2]
    assert pair[:2] == (4, 6)  # 0F2 could start at 2, 0B0 only when 1B0 has stopped
    assert timed(schedule).rows[0][2][:2] == (4, 7)  # one after the other, by default
    assert timed(schedule, Times(overlapped=2)).rows[1][-2][0] == 7  # 1F2 waits for 1B1; 0F2 is ready
    slow = timed(schedule, Times(overlapped=9))
    assert slow.rows[0][2][:2] == (4, 13) and slow.rows[1][-2][0] == 13  # and else for the whole pair
    halves = Schedule.parse(rows.replace("0B0", "0I0", 1).replace("0B1", "0W0 0B1", 1))
    assert timed(halves, Times(overlapped=2)).rows[0][2][:2] == (4, 6)  # I with F is no such pair: 1 + 1


def test_the_cost_of_a_step_leaves_out_the_wait_for_the_first_microbatch():
    """ZB-H2 with T_F = T_B = T_W: no rank ever waits, though they start and stop one after another (arXiv:2401.10241)."""
    done = timed(make("zb-h2", 4, 12))
    assert done.cost == 12 * 3 and done.makespan == 12 * 3 + 3
    assert timed(make("1f1b", 4, 12)).cost == (12 + 3) * 3


# Activations


@given(schedules(), SOME.map(lambda share: share / 4), st.data())
def test_activations_over_time_peak_where_the_rows_say(schedule, share, data):
    done = timed(schedule, data.draw(times(schedule.stages)))
    for row, series, peak in zip(done.rows, activations(done, share), peak_activations(schedule, share)):
        assert max(held for _, held in series) == peak and series[-1][1] == 0
        assert [time for time, _ in series] == sorted(time for time, _ in series)
        changes = {}  # the same by hand, from starts and stops alone
        for start, stop, action in row:
            for _, kind, _ in words(action):
                time, change = {"F": (start, 1), "B": (stop, -1), "I": (stop, share - 1), "W": (stop, -share)}[kind]
                changes[time] = changes.get(time, 0) + change
        held = 0
        for time in sorted(changes):
            held += changes[time]
            assert [h for t, h in series if t == time][-1] == held


@given(st.integers(1, 8), st.integers(1, 24))
def test_gpipe_holds_all_microbatches_and_1f1b_one_for_every_later_stage(ranks, microbatches):
    assert peak_activations(make("gpipe", ranks, microbatches)) == [microbatches] * ranks
    assert peak_activations(make("1f1b", ranks, microbatches)) == [min(ranks - r, microbatches) for r in range(ranks)]


def test_what_the_backward_of_weights_still_needs_is_held_until_then():
    schedule = Schedule.parse("0F0 0I0 0F1 0W0 0I1 0W1")
    assert activations(timed(schedule), Fraction(1, 4)) == [
        [(0, 1), (2, Fraction(1, 4)), (2, Fraction(5, 4)), (4, 1), (5, Fraction(1, 4)), (6, 0)]
    ]
    assert peak_activations(schedule, 0.25) == [1.25]
    assert peak_activations(schedule, 0) == [1] and peak_activations(schedule, 1) == [2]


def test_nothing_is_rounded_away():
    rows = " ".join(f"0F{m} 0I{m} 0W{m}" for m in range(1000))
    assert activations(timed(Schedule.parse(rows)), 0.1)[0][-1][1] == 0


# What cannot be


@pytest.mark.parametrize("field", ["forward", "backward_input", "weight", "communication", "overlapped"])
@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), "1", True, 1j, [[1]]])
def test_a_time_that_is_none_is_told(field, value):
    with pytest.raises(EmuError, match=rf"Times\({field}=...\).* is .*, which is no time") as caught:
        Times(**{field: value})
    assert "at least 0" in caught.value.hint


def test_a_wrong_time_of_one_stage_is_told_with_the_stage():
    with pytest.raises(EmuError, match=r"Times\(weight=...\) of stage 2 is -3"):
        Times(weight=[1, 2, -3])


@pytest.mark.parametrize("field", ["forward", "backward_input", "weight"])
def test_times_of_another_number_of_stages_are_told_with_both_numbers(field):
    with pytest.raises(EmuError, match=rf"Times\({field}=...\) has 3 times, but 1f1b has 4 stages") as caught:
        timed(make("1f1b", 4, 4), Times(**{field: [1, 2, 3]}))
    assert "or 4" in caught.value.hint


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), None, "half", True])
def test_a_share_that_is_none_is_told(share):
    for judge in (peak_activations, lambda s, share: activations(timed(s), share)):
        with pytest.raises(EmuError, match=r"weight_share=.* is no share"):
            judge(make("1f1b", 2, 2), share)


@pytest.mark.parametrize(
    "rows, says",
    [
        ("0F0 0B0\n1B0 1F0", "position 0"),
        ("0F0 0B0 3B0", "no rank runs 1F0"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "ranks 0 and 1 wait for each other"),
        ("0W0 0F0 0I0", "never run 0W0"),
    ],
)
def test_what_never_ends_is_told(rows, says):
    with pytest.raises(ScheduleError, match=says):
        timed(Schedule.parse(rows))


def test_half_a_schedule_has_times():
    """Forwards alone, as one writes them first."""
    assert timed(Schedule.parse("0F0 0F1\n1F0 1F1")).makespan == 3
    assert timed(Schedule(())).makespan == 0 and timed(Schedule(((),))).bubble_fraction == 0


def test_times_cannot_be_changed_behind_a_schedules_back():
    done = timed(make("1f1b", 2, 2))
    for frozen, field in ((Times(), "forward"), (done, "rows")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, field, ())
