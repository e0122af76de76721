"""Schedules equal those of torch.distributed.pipelining, action for action; torch's files are read here, and ours there."""

from __future__ import annotations

import csv
import io

import pytest

from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.schedules import SCHEDULES, make, one_f_one_b
from emu.spmd import ScheduleError

THEIRS = {"gpipe": "LoopedBFS", "interleaved": "Interleaved1F1B", "zb-h1": "InterleavedZeroBubble"}  # chunks > 1
GRID = [(p, m) for p in (1, 2, 3, 4) for m in range(1, 10)] + [(4, 12), (5, 10), (5, 14), (6, 4), (8, 16)]
LARGE = [(p, m) for p in range(1, 9) for m in range(1, 25)]


def torchs(name: str, p: int, m: int, v: int) -> Schedule | None:
    """torch's schedule, through its own strings; None where it refuses these sizes."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        rows = get_schedule_ops(name, p, m, v, add_spacing=False)
    except ValueError:
        return None
    file = io.StringIO()
    csv.writer(file).writerows([["" if action is None else str(action) for action in row] for row in rows])
    read = Schedule.from_csv(file.getvalue(), name)
    return read.compute()  # without REDUCE_GRAD, which torch adds to the schedules with one stage a rank


def same(ours: str, theirs: str, grid: list[tuple[int, int]], v: int) -> int:
    """How many of a grid both make; asserts that these are equal, and that ours are where torch refuses."""
    both = 0
    for p, m in grid:
        there = torchs(theirs, p, m, v)
        here = Schedule.of(SCHEDULES[ours], p, m, v)
        if there is None:
            check(here)
            continue
        assert here.rows == there.rows, f"{ours}, p={p}, m={m}, chunks={v}:\n{here}\n\ntorch's:\n{there}"
        both += 1
    return both


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("ours", THEIRS)
def test_with_several_chunks_a_rank(ours, v):
    refused = 0 if ours == "gpipe" else sum(m % max(1, m // p) > 0 for p, m in GRID)
    assert same(ours, THEIRS[ours], GRID, v) == len(GRID) - refused


def test_gpipe():
    assert same("gpipe", "GPipe", GRID, 1) == len(GRID)


@pytest.mark.exhaustive
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("ours", THEIRS)
def test_on_a_large_grid(ours, v):
    same(ours, THEIRS[ours], LARGE, v)


@pytest.mark.exhaustive
def test_gpipe_on_a_large_grid():
    same("gpipe", "GPipe", LARGE, 1)


def test_a_generator_that_is_one_action_off_is_found(monkeypatch):
    """The control: breadth-first with backwards in the order of forwards, an easy mistake, and also a valid schedule."""

    def other_way(rank, ranks, microbatches, chunks):
        stages = range(rank, ranks * chunks, ranks)
        yield from (Action(stage, "F", n) for stage in stages for n in range(microbatches))
        yield from (Action(stage, "B", n) for stage in reversed(stages) for n in range(microbatches))

    check(Schedule.of(other_way, 3, 4, 2))
    monkeypatch.setitem(SCHEDULES, "gpipe", other_way)
    with pytest.raises(AssertionError, match="p=1, m=2, chunks=2"):
        same("gpipe", "LoopedBFS", GRID, 2)


def test_1f1b_equals_torchs_but_for_the_last_rank_of_which_torch_2_13_numbers_the_forwards_from_one():
    """torch counts a rank's forwards on from the last one ahead, and starts at 0 where there is none: the last rank runs
    F1, B0, F2, B1 ...; its own check of what a backward needs does not look at schedules with one stage a rank, which are
    run by other code. The rows below are by hand; torch's are told apart from ours, so that this test says when they change.
    """
    for p, m in GRID:
        there = torchs("1F1B", p, m, 1)
        if m < p:
            assert there is None
            continue
        here = make("1f1b", p, m)
        assert there is not None and here.rows[:-1] == there.rows[:-1]
        by_hand = [Action(p - 1, kind, n) for n in range(m) for kind in "FB"]
        assert list(here.rows[-1]) == by_hand
        if there.rows != here.rows:
            shifted = [a._replace(microbatch=a.microbatch + 1) if a.kind == "F" else a for a in by_hand]
            assert list(there.rows[-1]) == shifted
            with pytest.raises(ScheduleError):
                check(there)


def test_1f1b_by_hand():
    """Four ranks, six microbatches, as drawn in https://arxiv.org/abs/2104.04473, figure 4."""
    assert make("1f1b", 4, 6) == Schedule.parse(
        """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
        """
    )


def test_zb_h1_with_one_chunk_is_what_torchs_rule_says_for_one():
    """torch has no one-chunk ZB-H1; its own code for rows, asked for one chunk, gives ours."""
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    for p, m in GRID:
        for rank in range(p):
            ahead = min(m, p - 1 - rank)

            def stage(step, rank=rank):
                return rank

            ops = _get_1f1b_rank_ops(1, p, ahead, m - ahead, ahead, rank, stage, stage, rank, enable_zero_bubble=True)
            assert [str(op) for op in ops if op] == [str(a) for a in make("zb-h1", p, m).rows[rank]]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1"])
def test_our_file_is_read_by_torch(name):
    from torch.distributed.pipelining.schedules import _Action

    ours = make(name, 3, 6, 2)
    theirs = [[_Action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(ours.to_csv()))]
    assert [[str(a) for a in row] for row in theirs] == [[str(a) for a in row] for row in ours.rows]


def test_torchs_file_with_sends_and_receives_is_read(tmp_path):
    """Written by torch's own _dump_csv, with everything that torch's runtime adds: sends, receives, gathers, frees."""
    from unittest import mock

    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 2, 4, None
    theirs = ScheduleInterleaved1F1B([stage, stage], 4)
    for format in ("compute_only", "compute_comms"):
        theirs._dump_csv(str(tmp_path / "rows.csv"), format=format)
        read = Schedule.from_csv((tmp_path / "rows.csv").read_text())
        kinds = {a.kind for row in read.rows for a in row}
        assert {"SEND_F", "RECV_F", "SEND_B", "RECV_B"} <= kinds if format == "compute_comms" else kinds == {"F", "B"}
        check(read)
        assert read.compute() == make("interleaved", 2, 4, 2)
        assert Schedule.from_csv(read.to_csv()) == read


def test_one_f_one_b_of_any_number_of_microbatches():
    """torch refuses fewer microbatches than stages; by hand, three ranks and one or two."""
    assert Schedule.of(one_f_one_b, 3, 1) == Schedule.parse("0F0 0B0\n1F0 1B0\n2F0 2B0")
    assert Schedule.of(one_f_one_b, 3, 2) == Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1")
