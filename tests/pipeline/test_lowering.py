"""Sends, receives, gathers and frees follow from the computing; torch adds the same ones, and its own rows pass here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Schedule, check, lowered, lowering, timed
from emu.parallel.pipeline.actions import COMMUNICATION, COMPUTE
from emu.parallel.pipeline.needs import other_end
from emu.parallel.pipeline.schedules import make
from emu.spmd import ScheduleError

from .rows import NAMES, runs, schedules

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def computing(action):
    return action.kind in COMPUTE or bool(action.parts)


@given(schedules(), st.booleans(), st.booleans())
def test_it_adds_and_takes_nothing_else(schedule, gather, blocking):
    rows = lowered(schedule, gather, blocking)
    assert rows.compute() == schedule
    assert lowered(rows, gather, blocking) == rows
    assert timed(rows) == timed(schedule)  # everything leaves as soon as it is made


@given(schedules())
def test_a_send_follows_what_makes_it(schedule):
    for blocking in (False, True):
        for row in lowered(schedule, blocking=blocking).rows:
            since: list[str] = []  # what was made since the last action that computes
            for action in row:
                if computing(action):
                    since = [f"{a.stage}{'B' if a.kind == 'I' else a.kind}{a.microbatch}" for a in action.each()]
                elif action.kind.startswith("SEND"):
                    assert f"{action.stage}{action.kind[-1]}{action.microbatch}" in since


@given(schedules())
def test_a_receive_is_posted_one_action_before_its_use_or_in_the_senders_order(schedule):
    rows = lowered(schedule).rows
    sent = {}  # (from, to) -> receives in the order of sends, of both kinds
    places = {str(a): rank for rank, row in enumerate(rows) for a in row if a.kind in COMMUNICATION}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind.startswith("SEND"):
                stage, kind, microbatch, _ = other_end(action)
                end = f"{stage}{kind}{microbatch}"
                sent.setdefault((rank, places[end]), []).append(end)
    for rank, row in enumerate(rows):
        for source in range(len(rows)):
            arriving = [a for a in map(str, row) if a in sent.get((source, rank), ())]
            assert arriving == sent.get((source, rank), [])
        steps = [a for a in row if computing(a)]
        posted = {}  # receive -> how many actions that compute came before
        for action in row:
            if action.kind.startswith("RECV"):
                posted[action] = sum(computing(a) for a in row[: row.index(action)])
        used = {
            (a.stage, "F" if a.kind == "F" else "B", a.microbatch): n
            for n, step in enumerate(steps)
            for a in step.each()
            if a.kind != "W"
        }
        latest = {action: max(0, used[action.stage, action.kind[-1], action.microbatch] - 1) for action in posted}
        for action, n in posted.items():
            after = [latest[b] for b in posted if b == action or (list(posted).index(b) > list(posted).index(action))]
            assert (
                min(after) <= n <= latest[action]
            )  # earlier only if something behind it in the queue is needed earlier


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks, microbatches", [(2, 1), (2, 4), (4, 4), (4, 10)])
def test_only_the_order_for_blocking_runs_if_sends_block(name, ranks, microbatches):
    schedule = make(name, ranks, microbatches)
    check(lowered(schedule))
    with pytest.raises(ScheduleError, match="deadlock"):
        check(lowered(schedule), blocking=True)
    check(lowered(schedule, blocking=True), blocking=True)
    assert runs(lowered(schedule, blocking=True), blocking=True) and runs(lowered(schedule, blocking=True))


def test_one_rank_sends_nothing():
    schedule = Schedule.parse("0F0 1F0 1B0 0B0")
    assert lowered(schedule) == schedule


def test_no_stage_is_gathered_in_vain_and_few_at_once():
    for name in NAMES:
        for row in lowered(make(name, 4, 8), gather=True).rows:
            held: set[int] = set()
            for action in row:
                if action.kind == "UNSHARD":
                    held.add(action.stage)
                elif action.kind == "RESHARD":
                    held.remove(action.stage)
                assert len(held) <= lowering.GATHERED
            assert not held


def test_what_cannot_be_run_is_told_and_not_lowered():
    with pytest.raises(ScheduleError, match="position 0"):
        lowered(Schedule.parse("0B0 0F0"))
    with pytest.raises(ScheduleError, match="no rank runs 1F0"):
        lowered(Schedule.parse("0F0 0B0\n1B0"))


# torch as a judge


def as_torch(schedule):
    """A schedule in torch's own objects, and where it has the stages."""
    rows = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(schedule.rows)
    }
    return rows, lambda stage: schedule.ranks_of[stage][0]


ONE_WAY = [name for name in NAMES if name != "dualpipe"]  # torch has every stage on one rank


@pytest.mark.parametrize("name", ONE_WAY)
@pytest.mark.parametrize("ranks, microbatches", [(2, 3), (4, 8), (3, 12)])
def test_torch_adds_the_same_sends_and_receives_and_both_pass(name, ranks, microbatches):
    schedule = make(name, ranks, microbatches)
    rows, stage_to_rank = as_torch(schedule)
    torchs = torch_schedules._add_send_recv(rows, stage_to_rank, schedule.stages)
    theirs = Schedule.parse("\n".join(" ".join(map(str, torchs[rank])) for rank in range(ranks)))
    for blocking in (False, True):
        ours = lowered(schedule, blocking=blocking)
        assert [sorted(map(str, row)) for row in ours.rows] == [sorted(map(str, row)) for row in theirs.rows]
    check(theirs)
    assert timed(theirs) == timed(schedule)


@pytest.mark.parametrize(
    "name", [name for name in ONE_WAY if name != "dualpipe-v"]
)  # torch's simulation knows no pairs
@pytest.mark.parametrize("ranks, microbatches", [(2, 3), (4, 8), (3, 12)])
def test_torch_simulates_our_rows_to_the_end(name, ranks, microbatches):
    """Its simulation waits in receives, so it takes the order for blocking ones; that of 1F1B ahead of use it rejects."""
    schedule = make(name, ranks, microbatches)
    rows, stage_to_rank = as_torch(lowered(schedule, blocking=True))
    torch_schedules._simulate_comms_compute(rows, stage_to_rank, schedule.stages)
    if name == "1f1b":
        rows, stage_to_rank = as_torch(lowered(schedule))
        with pytest.raises(ValueError, match="not progressing"):
            torch_schedules._simulate_comms_compute(rows, stage_to_rank, schedule.stages)


@pytest.mark.parametrize("name", [name for name in ONE_WAY if name != "dualpipe-v"])
@pytest.mark.parametrize("ranks, microbatches", [(2, 3), (4, 8)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_gathers_and_frees_equal_torchs(name, ranks, microbatches, chunks):
    if chunks == 4 and name not in ("gpipe", "interleaved"):
        return
    for row in make(name, ranks, microbatches, chunks).rows:
        ours = lowering._gathering(row)
        theirs = torch_schedules._add_unshard_reshard([torch_schedules._Action.from_str(str(a)) for a in row])
        assert list(map(str, ours)) == list(map(str, theirs))
