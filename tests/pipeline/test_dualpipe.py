"""DualPipe and DualPipeV: valid for all sizes they allow, DeepSeek's and torch's order, bubble and memory made exact."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.parallel.pipeline.timing import Timed, Times, peak_activations, timed
from emu.spmd import PlanError, ScheduleError

DUAL = ("dualpipe", "dualpipe-v")
GRID = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 20, 24)]
FULL = [(p, m) for p in range(1, 17) for m in range(1, 41)]

# The picture in DeepSeek's README, https://github.com/deepseek-ai/DualPipe: 8 ranks, 20 microbatches, in cells of one tick.
# Ranks 0 to 3; the rest mirror them. B is a whole backward, of two cells; dots are white cells.
PICTURE = """
FFFFFFFFIWFIWFIWFFB...FBFBFBFBFB.BFB.BFB.BFBBIWIWIWIW
.FFFFFFFFIWFIWFFB..FBFBFBFBFBFBFB.BFB.BFB.BBIIWIWIWW
..FFFFFFFFIWFFB.FBFBFBFBFBFBFBFBFB.BFB.B.BBIIIWIWWW
...FFFFFFFFFBFBFBFBFBFBFBFBFBFBFBFB.B.B.BBIIIIWWWW
"""


def grids(function):
    """A grid now, and a large one when there is time."""
    large = pytest.param(FULL, marks=pytest.mark.exhaustive, id="full")
    return pytest.mark.parametrize("grid", [pytest.param(GRID, id="grid"), large])(function)


def allowed(name: str, grid):
    """Each point that the schedule allows, as ranks, ranks of one V, microbatches, and microbatches through chunk 0."""
    for p, m in grid:
        if name == "dualpipe-v":
            yield p, p, m, m
        elif p % 2 == 0:
            yield p, p // 2, m, (m + 1) // 2


def idle(run: Timed, rank: int) -> float:
    return run.makespan - run.busy(rank)


@pytest.mark.parametrize("name", DUAL)
@grids
def test_every_size_can_be_run(name, grid):
    for p, _, m, _ in allowed(name, grid):
        schedule = make(name, p, m)
        check(schedule)
        assert (schedule.ranks, schedule.microbatches) == (p, m)
        assert schedule.stages == (2 * p if name == "dualpipe-v" else p)


@given(st.sampled_from(DUAL), st.integers(1, 4), st.integers(1, 24), st.data())
def test_an_action_out_of_its_place_is_found(name, half, m, data):
    """The control of the checks: an action left out, or a backward before its forward."""
    schedule = make(name, 2 * half, m)
    rank = data.draw(st.sampled_from([rank for rank, row in enumerate(schedule.rows) if row]))
    row = list(schedule.rows[rank])
    if data.draw(st.booleans()):
        row.pop(data.draw(st.integers(0, len(row) - 1)))
    else:
        at = data.draw(st.sampled_from([n for n, action in enumerate(row) if action.each()[-1].kind in "BI"]))
        row.insert(0, row.pop(at))
    with pytest.raises(ScheduleError):
        check(Schedule((*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])))


@grids
def test_halves_of_the_batch_flow_in_opposite_directions(grid):
    for p, _, m, first in allowed("dualpipe", grid):
        schedule = make("dualpipe", p, m)
        for (stage, microbatch), rank in schedule.places.items():
            assert rank == (stage if microbatch < first else p - 1 - stage)
        if m > 1:
            assert schedule.ranks_of == tuple(tuple(sorted({stage, p - 1 - stage})) for stage in range(p))


def renamed(row, stage, microbatch) -> tuple[Action, ...]:
    """A row with other stages and microbatches: functions of both."""
    return tuple(
        action._replace(parts=renamed(action.parts, stage, microbatch))
        if action.parts
        else action._replace(stage=stage(*action[::2]), microbatch=microbatch(*action[::2]))
        for action in row
    )


@grids
def test_dualpipe_is_a_v_and_its_mirror(grid):
    """Cut in half: ranks below the middle run DualPipeV's rows, whose way back is the other half of the batch here."""
    for p, half, m, first in allowed("dualpipe", grid):
        if m % 2:
            continue
        rows, v = make("dualpipe", p, m).rows, make("dualpipe-v", half, first).rows
        for rank in range(half):
            assert rows[rank] == renamed(v[rank], lambda s, n: s, lambda s, n: n + first * (s >= half))  # noqa: B023
            assert rows[p - 1 - rank] == renamed(rows[rank], lambda s, n: s, lambda s, n: (n + first) % m)  # noqa: B023
            assert rows[p - 1 - rank] != rows[rank]


@pytest.mark.parametrize("p", range(1, 9))
def test_dualpipev_is_torchs(p):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for m in (2 * p, 2 * p + 1, 2 * p + 2, 2 * p + 5, 24):
        theirs = get_schedule_ops("DualPipeV", p, m, num_stages_per_rank=2, add_spacing=False)
        text = "\n".join(" ".join(str(action) for action in row) for row in theirs)
        assert str(make("dualpipe-v", p, m)) == text
        assert str(make("dualpipe-v", p, m + 1)) != text  # the control: the strings do tell schedules apart


class Steps:
    """DeepSeek's eight steps for one rank, as its repository runs them, with its own counters and queue of weights.

    Phase 0 is the direction that starts at the nearer end: in the second half of the ranks, from the last rank to 0.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.rank, self.ranks, self.half = rank, ranks, microbatches // 2
        self.flip = rank >= ranks // 2
        self.forwards, self.backwards, self.later, self.row = [0, 0], [0, 0], [], []
        middle = rank in (ranks // 2 - 1, ranks // 2)
        near = min(rank, ranks - 1 - rank)
        far = ranks // 2 - near - 1
        for _ in range(2 * far):
            self.say(self.forward(0))
        for _ in range(near + 1):
            self.say(self.forward(0))
            self.say(self.forward(1))
        for _ in range(far):
            self.say(self.backward(1, later=True))
            self.weight()
            self.say(self.forward(1))
        for i in range(self.half - ranks + near + 1):
            if i == 0 and middle:
                self.say(self.forward(0))
                self.say(self.backward(1))
            else:
                self.say(self.forward(0), self.backward(1))
            self.say(self.forward(1), self.backward(0))
        for _ in range(far):
            self.say(self.backward(1))
            self.say(self.forward(1), self.backward(0))
        later = False
        for i in range(near + 1):
            later |= i == (near + 1) // 2 and near % 2 == 1
            self.say(self.backward(1, later))
            later |= i == (near + 1) // 2 and near % 2 == 0
            self.say(self.backward(0, later))
        for _ in range(far):
            self.weight()
            self.say(self.backward(0, later=True))
        for _ in range(near + 1):
            self.weight()
        assert not self.later

    def say(self, *parts: str) -> None:
        self.row.append(parts[0] if len(parts) == 1 else f"({';'.join(parts)})OVERLAP_F_B")

    def place(self, phase: int, count: list[int]) -> tuple[int, int]:
        reverse = phase ^ self.flip
        count[reverse] += 1
        return (self.ranks - 1 - self.rank if reverse else self.rank), count[reverse] - 1 + self.half * reverse

    def forward(self, phase: int) -> str:
        stage, microbatch = self.place(phase, self.forwards)
        return f"{stage}F{microbatch}"

    def backward(self, phase: int, later: bool = False) -> str:
        stage, microbatch = self.place(phase, self.backwards)
        if later:
            self.later.append(f"{stage}W{microbatch}")
        return f"{stage}{'I' if later else 'B'}{microbatch}"

    def weight(self) -> None:
        self.row.append(self.later.pop(0))


@pytest.mark.parametrize("p", [2, 4, 6, 8, 10, 16])
def test_dualpipe_is_deepseeks(p):
    for m in range(2 * p, 2 * p + 14, 2):
        assert str(make("dualpipe", p, m)).splitlines() == [" ".join(Steps(r, p, m).row) for r in range(p)]


def test_dualpipe_is_deepseeks_picture():
    schedule = make("dualpipe", 8, 20)
    run = timed(schedule)
    for rank, line in enumerate(PICTURE.split()):
        assert run.makespan == len(line) + line.count("B") == 66
        for row in (schedule.rows[rank], schedule.rows[7 - rank]):
            kinds = "".join(a.kind for action in row for a in action.each())
            assert kinds == line.replace(".", "")
        assert idle(run, rank) == line.count(".") == 6


@grids
def test_a_rank_holds_one_activation_more_than_there_are_stages(grid):
    """Published: PP + 1, with PP stages. Exact: as many as there are, two of each microbatch in a V and one in DualPipe, up
    to PP; and one more, if there are more, for a pair that holds both of its parts' while they run at the same time.
    """
    for name in DUAL:
        for p, half, m, _ in allowed(name, grid):
            schedule, through = make(name, p, m), 2 * m if name == "dualpipe-v" else m
            for share in (0.0, 0.5, 1.0):
                assert max(peak_activations(schedule, share)) == (through if through <= 2 * half else 2 * half + 1)


times = st.tuples(*[st.integers(1, 12)] * 4).map(lambda t: (max(t[0], t[1]), min(t[0], t[1]), *t[2:]))  # F >= I


@given(st.sampled_from(DUAL), st.integers(1, 5), st.integers(0, 8), times)
def test_the_bubble_at_the_turn(name, half, more, parts):
    """Published: (PP/2 - 1) (F&B + B - 3 W), with B the whole backward.

    Exact, for I <= F: (PP/2 - 1) (F&B + F - 2 W + max(0, W - I)), which is the published form if F = I >= W. For every rank
    before the turn: F until the first microbatch is there. Then nothing is waited for until forwards run out. At the end
    the last gradients come from rank 0, one pair later for each rank on their way, two W of which were left for then; and
    if W takes longer than I, gradients wait for W between them.

    So much for the ranks at the turn. The others run fewer pairs, so that within the same time they work for longer and
    idle less, unless a pair takes as long as its parts.
    """
    forward, inputs, weight, save = parts
    whole = inputs + weight
    pair = max(forward, whole) + save % (min(forward, whole) + 1)  # from perfectly overlapped to not at all
    p, m = (half, 2 * half + more) if name == "dualpipe-v" else (2 * half, 2 * (2 * half + more))
    run = timed(make(name, p, m), Times(forward, inputs, weight, overlapped=pair))
    bubble = (half - 1) * (pair + forward - 2 * weight + max(0, weight - inputs))
    turn = half - 1
    assert idle(run, turn) == bubble
    assert run.rows[turn][0][0] == turn * forward
    through = m if name == "dualpipe-v" else m // 2
    pairs = 2 * through - 2 * half - 1
    assert run.makespan == 2 * through * (forward + whole) - pairs * (forward + whole - pair) + bubble
    for rank in range(half):
        farther = max(0, half - 2 - rank)  # ranks at the turn and next to it run the same number of pairs
        assert idle(run, rank) == bubble - farther * (forward + whole - pair)


@given(st.sampled_from(DUAL), st.integers(1, 5), st.integers(0, 8), st.integers(1, 9), st.integers(1, 9), st.data())
def test_the_published_bubble_where_it_is_exact(name, half, more, long, short, data):
    weight, forward = sorted((long, short))
    whole = forward + weight
    pair = data.draw(st.integers(whole, whole + forward))
    p, m = (half, 2 * half + more) if name == "dualpipe-v" else (2 * half, 2 * (2 * half + more))
    run = timed(make(name, p, m), Times(forward, forward, weight, overlapped=pair))
    assert idle(run, half - 1) == (half - 1) * (pair + whole - 3 * weight)


def test_the_published_bubble_where_it_is_not():
    """The control. Four stages in a V: with W > I, or I < F, the published form is too low."""
    for forward, inputs, weight in ((10, 10, 12), (12, 10, 10)):
        run = timed(make("dualpipe-v", 2, 8), Times(forward, inputs, weight))
        whole = inputs + weight
        assert idle(run, 1) == forward + whole + whole - 3 * weight + 2


@grids
def test_few_microbatches_fill_what_they_can(grid):
    """F = I = W, two parts of the batch or more for every stage: 2 (half - 1) ticks idle, with half the ranks of one V.

    With fewer than a V has ranks, as in ZB-V: one alone leaves 4 half - 4, every further one fills two of these.
    """
    for name in DUAL:
        for p, half, m, through in allowed(name, grid):
            run = timed(make(name, p, m))
            if name == "dualpipe-v" or m % 2 == 0:
                assert run.makespan == 6 * through + max(2 * half - 2, 4 * half - 2 - 2 * through)
            else:  # one direction has one less: as long as if it had as many, or less
                assert run.makespan <= timed(make(name, p, m + 1)).makespan
            alone = any(action.kind == "B" for row in make(name, p, m).rows for action in row)
            assert alone == (m >= 2 * p)


def test_few_microbatches_run_backwards_in_two_parts():
    """With whole ones, as in the pattern for many, others would wait for the gradient until weights are done, too."""
    split = make("dualpipe-v", 4, 5)
    merged = Schedule.parse(re.sub(r"(\d+)I(\d+) \1W\2\b", r"\1B\2", str(split)))
    check(merged)
    assert timed(merged).makespan > timed(split).makespan
    assert any(action.parts for row in split.rows for action in row)


@pytest.mark.parametrize("p", [1, 3, 7])
def test_dualpipe_on_an_odd_number_of_ranks_is_refused(p):
    with pytest.raises(PlanError, match=f"even number of ranks, but pp={p}") as caught:
        make("dualpipe", p, 8)
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("pp", p, p + 1)
    check(make("dualpipe", caught.value.nearest, 8))
    check(make("dualpipe-v", p, 8))


@pytest.mark.parametrize("name", DUAL)
def test_chunks(name):
    assert make(name, 4, 6, 1).rows == make(name, 4, 6, 2).rows
    with pytest.raises(PlanError, match=f"{name} runs two chunks a rank, but chunks=3") as caught:
        make(name, 4, 6, 3)
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("chunks", 3, 2)


@pytest.mark.parametrize("name", DUAL)
def test_large_schedules_can_be_run(name):
    """16 ranks, 128 microbatches; how fast they are built, bench_pipeline.py --schedules tells."""
    check(Schedule.of(SCHEDULES[name], 16, 128))
