"""A schedule that can be run passes; any other is told at once, and why. The judge tries it step by step, with queues."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Action, Schedule, check, checks, lowered, overlap, peak_activations, timed
from emu.parallel.pipeline.schedules import make
from emu.spmd import EmuError, ScheduleError

from .rows import damaged, runs, schedules

FAULTS = st.integers(0, 10**6)


def accepts(schedule, **how):
    """Whether check() does; it may say no in one way only."""
    try:
        check(schedule, **how)
    except ScheduleError as error:
        assert error.problem in {"missing", "twice", "misplaced", "order", "deadlock", "gather"}, error
        assert error.hint and len(str(error).splitlines()) <= 20
        if error.position is not None:  # it points at the action that it names
            there = schedule.rows[error.rank][error.position]
            assert error.action in [str(a) for a in (there, *there.each())], error
        return False
    return True


@given(schedules(), st.booleans(), st.booleans(), st.booleans())
def test_every_schedule_of_ours_passes(schedule, low, gather, blocking):
    if low or blocking:
        schedule = lowered(schedule, gather, blocking)
    assert accepts(schedule, blocking=blocking) and runs(schedule, blocking)


def two_faults(schedule, faults):
    return damaged(damaged(schedule, faults), faults + 1) if faults % 3 == 0 else damaged(schedule, faults)


@given(
    schedules(),
    st.sampled_from(["compute", "lowered", "gathering", "blocking"]),
    st.lists(FAULTS, min_size=30, max_size=30),
)
def test_a_fault_is_told_if_and_only_if_it_breaks_the_schedule(schedule, form, seeds):
    blocking = form == "blocking"
    if form != "compute":
        schedule = lowered(schedule, gather=form == "gathering", blocking=blocking)
    for seed in seeds:
        broken = two_faults(schedule, seed)
        verdict = accepts(broken, blocking=blocking)
        assert verdict == runs(broken, blocking), f"{broken}\nblocking={blocking} from\n{schedule}"
        if verdict:
            done = timed(broken)
            assert sum(len(row) for row in done.rows) == sum(len(row) for row in broken.compute().rows)
        else:
            with suppress(EmuError):  # what is only too much may have times; what never ends is told, and never hangs
                timed(broken)


@given(schedules(), st.booleans(), st.lists(FAULTS, min_size=20, max_size=20))
def test_who_waits_less_is_stuck_less(schedule, blocking, seeds):
    """What runs though everything blocks runs if neighbours start together, and that if nobody waits in a send."""
    for seed in seeds:
        rows = damaged(lowered(schedule, blocking=blocking), seed)
        strict, grouped, free = accepts(rows, blocking=True), accepts(rows, blocking=True, grouped=True), accepts(rows)
        assert strict <= grouped <= free


def test_the_faults_above_are_of_every_kind_and_not_all_harmful():
    told, harmless = set(), 0
    for seed in range(400):
        schedule = make(("1f1b", "zb-h1", "zb-v", "dualpipe-v")[seed % 4], 3, 6)
        broken = two_faults(schedule if seed % 8 < 4 else lowered(schedule, gather=True), seed)
        try:
            check(broken)
            harmless += 1
        except ScheduleError as error:
            told.add(error.problem)
    assert told == {"missing", "twice", "misplaced", "order", "deadlock", "gather"} and harmless > 20


@pytest.mark.parametrize("left_out", ["ends", "channels", "_twice", "_complete", "_gathers", "_finishes"])
def test_each_part_of_the_check_is_needed(left_out, monkeypatch):
    """The negative control of the comparison with the judge: it finds every part that does nothing."""
    monkeypatch.setattr(checks, left_out, lambda *needs: None)

    def differs(seed):
        broken = two_faults(lowered(make(("1f1b", "interleaved")[seed % 2], 2, 4), gather=True), seed)
        try:
            return accepts(broken) != runs(broken)
        except Exception:  # a later part stumbles over what the one left out should have told
            return True

    assert any(differs(seed) for seed in range(400))


def told(text, **how):
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.parse(text), **how)
    return caught.value


ONE_F_ONE_B = "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"


@pytest.mark.parametrize(
    "before, after, problem, says, do",
    [
        (
            "1F2",
            "",
            "missing",
            r"no rank runs 1F2, .* stage 1 for microbatch 2; 1B2 \(rank 1, position 4\)",
            "rank 1.* run 1F2",
        ),
        (
            "0B1",
            "",
            "missing",
            r"rank 0 runs 0F1 \(position 1\), but no rank runs its backward",
            "rank 0 should run 0B1",
        ),
        ("0B1", "0I1", "missing", r"0I1 \(rank 0, position 4\) is one half .* no rank runs the other, 0W1", "run 0W1"),
        (
            "0B1",
            "0B1 0W1",
            "twice",
            r"0F1 \(rank 0, position 1\) has more than one backward: 0B1 .* 0W1",
            "keep 0B1, or",
        ),
        ("0F1", "0F1 0F1", "twice", "0F1 stands twice: rank 0, position 1, and rank 0, position 2", "leave one"),
        ("1B2", "1B2 0F1", "twice", "0F1 stands twice: rank 0, position 1, and rank 1, position 6", "leave one"),
        (
            "0B2\n",
            "\n0B2 ",
            "misplaced",
            r"0B2 \(rank 1, position 0\) is not on the rank of its forward, 0F2",
            "put it on rank 0",
        ),
        (
            "1F0 1B0",
            "1B0 1F0",
            "order",
            r"rank 1 can never run 1B0 \(position 0\): .* own 1F0.*only at position 1",
            "put 1F0 before",
        ),
        ("1F0 1B0", "1W0 1F0 1I0", "order", r"can never run 1W0 \(position 0\): .* own 1I0", "put 1I0 before 1W0"),
        ("1F1 1B1", "(1F1;1B1)OVERLAP_F_B", "order", "own 1F1, which runs at the same time", "put 1F1 before"),
        (
            "0B0",
            "0B0 0RECV_B0",
            "missing",
            "rank 0 needs 0SEND_F0 after its 0F0",
            "put 0SEND_F0 into the row of rank 0; or",
        ),
    ],
)
def test_the_message_names_rank_position_action_and_what_is_missing(before, after, problem, says, do):
    error = told(ONE_F_ONE_B.replace(before, after))
    assert error.problem == problem and re.search(says, error.message), error
    assert re.search(do, error.hint), error
    assert error.rank in (0, 1) and error.action


def test_a_deadlock_shows_its_cycle_a_line_a_rank():
    error = told("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert error.problem == "deadlock" and error.waiting == {0: 1, 1: 0}
    assert error.message.splitlines() == [
        "deadlock: ranks 0 and 1 wait for each other, and none can go on:",
        "  rank 0 waits at 0B0 (position 1) for rank 1's 1B0 (position 2), which comes after 1F1 (position 1)",
        "  rank 1 waits at 1F1 (position 1) for rank 0's 0F1 (position 2), which comes after 0B0 (position 1)",
    ]


@pytest.mark.parametrize("ranks", [3, 12, 13, 40])
def test_of_a_long_cycle_some_lines_are_shown(ranks):
    """Rank 0 waits in its second stage for the last rank, and every other rank for the one before."""
    chain = f"0F1 {ranks}F1 0F0 {ranks}F0 {ranks}B0 {ranks}B1 0B0 0B1"
    error = told("\n".join([chain, *(f"{r}F0 {r}F1 {r}B0 {r}B1" for r in range(1, ranks))]))
    assert error.waiting == {0: ranks - 1, **{r: r - 1 for r in range(1, ranks)}}
    first, *lines = error.message.splitlines()
    if ranks <= 12:
        assert len(lines) == ranks and "more" not in error.message
        assert f"ranks {', '.join(map(str, range(ranks - 1)))} and {ranks - 1} wait" in first
    else:
        assert len(lines) == 13 and f"... {ranks - 12} more ranks ..." in lines[6]
        assert f"ranks 0, 1, 2 and {ranks - 3} more wait" in first


def test_receives_in_another_order_than_the_sends_are_told():
    right = str(lowered(make("gpipe", 2, 2)))
    error = told(right.replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"))
    assert error.problem == "order"
    assert (
        "rank 1 receives 1RECV_F1 (rank 1, position 0) before 1RECV_F0 (rank 1, position 1), but rank 0 sends 0SEND_F0"
        in str(error)
    )


@pytest.mark.parametrize(
    "extra, why",
    [
        ("7SEND_F0", "no rank runs microbatch 0 on both stages 7 and 8"),
        ("0RECV_F0", "no rank runs microbatch 0 on both stages -1 and 0"),  # the first stage's input is the batch
        ("2SEND_F0", "no rank runs microbatch 0 on both stages 2 and 3"),  # the last one's output is the loss
        ("1SEND_F0", "stages 1 and 2 are on one rank, 1"),
        ("2RECV_F1", "stages 1 and 2 are on one rank, 1"),
        ("1RECV_B1", "stages 1 and 2 are on one rank, 1"),
    ],
)
def test_a_send_or_receive_that_moves_nothing_is_told(extra, why):
    rows = str(lowered(Schedule.parse("0F0 0F1 0B0 0B1\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")))
    error = told(f"{rows} {extra}")
    assert (
        error.problem == "misplaced" and why in error.message and f"rank 1 has {extra} (position 12)" in error.message
    )
    assert error.action == extra and error.position == 12


@pytest.mark.parametrize(
    "before, after, says",
    [
        ("0UNSHARD ", "", "rank 0 comes to 0F0 (position 0) without the parameters of stage 0"),
        (" 0RESHARD", "", "rank 0 gathers the parameters of stage 0 and never frees them"),
        ("0RESHARD", "0RESHARD 0RESHARD", "(position 6) though they are not gathered"),
        ("0UNSHARD", "0UNSHARD 0UNSHARD", "(position 1) though they are gathered already"),
        ("0UNSHARD", "0UNSHARD 5UNSHARD", "comes to 5UNSHARD (position 1) though it never computes stage 5"),
        (
            "0B0",
            "0REDUCE_GRAD 0B0",
            "comes to 0REDUCE_GRAD (position 3) before the last gradient, which 0B1 (position 5) adds",
        ),
    ],
)
def test_gathers_and_frees_are_balanced(before, after, says):
    right = "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD"
    check(Schedule.parse(right + " 0REDUCE_GRAD"))
    error = told(right.replace(before, after))
    assert error.problem == "gather" and says in error.message, error


# Two ranks that both send before they post the receive that the other needs (github.com/pytorch/pytorch/issues/172668).
STEADY = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
    "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
)


def test_sends_that_block_in_the_right_order_run():
    check(Schedule.parse("\n".join(STEADY)), blocking=True)


def test_two_ranks_that_both_send_first_deadlock_only_if_sends_block():
    """The first rank's second send before its receive, while the other rank sends, too."""
    crossed = "\n".join(STEADY).replace("1RECV_F1 1SEND_B0", "1SEND_B0 1RECV_F1")
    error = told(crossed, blocking=True)
    assert error.problem == "deadlock" and error.waiting == {0: 1, 1: 0}
    assert error.message.splitlines()[1:] == [
        "  rank 0 waits at 0SEND_F1 (position 3) for rank 1's 1RECV_F1 (position 4), which comes after 1SEND_B0 (position 3)",
        "  rank 1 waits at 1SEND_B0 (position 3) for rank 0's 0RECV_B0 (position 4), which comes after 0SEND_F1 (position 3)",
    ]
    assert "grouped=True" in error.hint
    check(Schedule.parse(crossed))  # who does not wait in a send is not stuck
    check(Schedule.parse(crossed), blocking=True, grouped=True)  # nor who starts both together
    swapped = crossed.replace("0SEND_F1 0RECV_B0", "0RECV_B0 0SEND_F1")  # or changes the order on one rank
    check(Schedule.parse(swapped), blocking=True)


def test_the_plainest_exchange_deadlocks_if_both_send_first():
    """Rank 0 sends and then receives, and so does rank 1; both data exist from the start."""
    rows = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert told(rows, blocking=True).waiting == {0: 1, 1: 0}
    for order in ("1RECV_F1 1SEND_B0", "1SEND_B0 1RECV_F1"):
        check(Schedule.parse(rows.replace("1SEND_B0 1RECV_F1", order)), blocking=True, grouped=True)


def test_grouping_does_not_help_what_stands_apart():
    """Rank 1 computes between its send and its receive, so they cannot start together."""
    rows = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    check(Schedule.parse(rows), blocking=True)
    rows = rows.replace("0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0B0 0SEND_F1")
    assert told(rows, blocking=True, grouped=True).waiting == {0: 1, 1: 0}
    check(Schedule.parse(rows.replace("1RECV_F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1")), blocking=True)


def test_compute_actions_alone_cannot_be_checked_for_blocking_sends():
    assert "lowered(schedule)" in told(ONE_F_ONE_B, blocking=True).hint
    check(Schedule.parse("0F0 1F0 1B0 0B0"), blocking=True)  # nothing to send


@pytest.mark.parametrize(
    "action, says",
    [
        ("0F0", "is no action"),
        (None, "is no action"),
        ((0, "F", 0, ()), "is no action"),
        (Action(-1, "F", 0), "is of no stage, -1"),
        (Action(True, "F", 0), "is of no stage, True"),
        (Action(0, "F"), "is of no microbatch, None"),
        (Action(0, "F", [1]), "is of no microbatch"),
        (Action(0, "G", 0), "is of no known kind, 'G'"),
        (Action(0, "UNSHARD", 3), "leave that out"),
        (overlap(Action(0, "F", 0)), "is no pair"),
        (Action(0, "F", 0, (Action(0, "F", 0), Action(0, "B", 0))), "is no pair"),
        (overlap(Action(0, "F", 0), Action(0, "SEND_F", 0)), "only F, B, I and W can"),
        (overlap(Action(0, "F", 0), overlap(Action(0, "F", 1), Action(0, "B", 0))), "only F, B, I and W can"),
        (overlap(Action(0, "F", 0), Action(0, "B", -2)), "is of no microbatch, -2"),
    ],
)
@pytest.mark.parametrize("judge", [check, timed, lowered, peak_activations])
def test_what_is_no_action_is_told_with_its_place(judge, action, says):
    with pytest.raises(ScheduleError) as caught:
        judge(Schedule(((Action(0, "F", 0), action, Action(0, "B", 0)),)))
    assert says in str(caught.value) and (caught.value.rank, caught.value.position) == (0, 1)


@pytest.mark.parametrize("rows", [(), ((),), ((), ())])
def test_a_schedule_of_nothing_is_told(rows):
    with pytest.raises(ScheduleError, match="computes nothing"):
        check(Schedule(rows))


def test_a_name_is_no_schedule():
    with pytest.raises(EmuError, match="is no Schedule") as caught:
        check("1f1b")
    assert "make('1f1b'" in caught.value.hint


def test_a_large_schedule_is_checked_and_timed():
    """16 ranks, 128 microbatches and two chunks, sends and receives included; how fast, bench_pipeline.py --schedules tells."""
    schedule = lowered(make("interleaved", 16, 128, 2))
    check(schedule)
    assert len([a for row in timed(schedule).rows for a in row]) == 16 * 128 * 2 * 2


def test_a_rank_without_anything_to_do_is_told():
    with pytest.raises(ScheduleError, match="rank 1 of 2 has nothing to do"):
        check(Schedule((Schedule.parse("0F0 0B0").rows[0], ())))
