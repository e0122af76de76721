"""ZB-V, V-Half and V-Min: valid for all sizes, torch's order, and the bubble and memory that their papers claim, made exact.

Ticks below are F = I = W = 1 of one chunk, of which a rank has two: its work is 6 m ticks, and 1F1B idles for 6 (p - 1) of
them and holds 2 p activations of a chunk.
"""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Schedule
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.parallel.pipeline.schedules.building_block import PERIOD, Block, squeezed
from emu.parallel.pipeline.schedules.v_half import block as half_block
from emu.parallel.pipeline.schedules.v_min import block as min_block
from emu.parallel.pipeline.schedules.words import numbered, v_shaped
from emu.parallel.pipeline.timing import Times, peak_activations, timed
from emu.spmd import PlanError, ScheduleError

V = ("zb-v", "v-half", "v-min")
ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)
GRID = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 16, 24)]
FULL = [(p, m) for p in range(1, 17) for m in range(1, 41)]


def idle(name: str, p: int, m: int) -> float:
    """Ticks from the first rank's start to the last rank's stop without work: every rank works for 6 m ticks."""
    return timed(make(name, p, m)).makespan - 6 * m


def held(name: str, p: int, m: int, weight_share: float = 1.0) -> float:
    return max(peak_activations(make(name, p, m), weight_share))


def grids(function):
    """A grid now, and a large one when there is time."""
    large = pytest.param(FULL, marks=pytest.mark.exhaustive, id="full")
    return pytest.mark.parametrize("grid", [pytest.param(GRID, id="grid"), large])(function)


@pytest.mark.parametrize("name", V)
@grids
def test_every_size_can_be_run(name, grid):
    for p, m in grid:
        schedule = make(name, p, m)
        check(schedule)
        assert (schedule.ranks, schedule.stages, schedule.microbatches) == (p, 2 * p, m)
        assert schedule.stages_of == tuple((rank, 2 * p - 1 - rank) for rank in range(p))
        assert schedule.splits_backward


@given(st.sampled_from(V), ranks, microbatches, st.data())
def test_an_action_out_of_its_place_is_found(name, p, m, data):
    """The control of the checks: a gradient before its forward, or an action left out."""
    schedule = make(name, p, m)
    rank = data.draw(st.integers(0, p - 1))
    row = list(schedule.rows[rank])
    if data.draw(st.booleans()):
        row.pop(data.draw(st.integers(0, len(row) - 1)))
    else:
        at = data.draw(st.sampled_from([n for n, action in enumerate(row) if action.kind == "I"]))
        gradient = row.pop(at)
        row.insert(row.index(gradient._replace(kind="F")), gradient)
    with pytest.raises(ScheduleError):
        check(Schedule((*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])))


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_v_is_torchs(p):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for m in (1, 2, 3, 5, 8, 13, 15, 16, 24):
        theirs = get_schedule_ops("ZBVZeroBubble", p, m, num_stages_per_rank=2, add_spacing=False)
        text = "\n".join(" ".join(str(action) for action in row if action is not None) for row in theirs)
        assert str(make("zb-v", p, m)) == text
        other = make("zb-v", p, m + 1)
        assert str(other) != text  # the control: the strings do tell schedules apart


@grids
def test_zb_v_has_no_bubble_at_1f1bs_memory(grid):
    """Published: no bubble if F = I = W, with p M_B. Exact: from its own first start to its own last stop no rank idles.

    From rank 0's start to the last stop it is p - 1 ticks more, as the first microbatch comes to rank r after r ticks; the
    next step takes that back. Fewer than 2 p - 1 microbatches do not fill the pipeline: one alone takes 2 p ticks of F,
    2 p of I, one of W at the turn and one at the end, so 4 p - 4 are idle, and every further one fills two of those.
    """
    for p, m in grid:
        schedule = make("zb-v", p, m)
        assert idle("zb-v", p, m) == max(p - 1, 4 * p - 2 - 2 * m)
        if m >= 2 * p - 1:
            run = timed(schedule)
            assert [run.span(rank) for rank in range(p)] == [6 * m] * p
        for share in (0.0, 0.5, 1.0):
            assert held("zb-v", p, m, share) == min(2 * m, 2 * p)
        assert held("1f1b", p, m) == min(m, p)  # of a whole stage, which is two chunks


@pytest.mark.parametrize("name", [*V, "1f1b"])
def test_no_bubble_is_more_than_a_clock_that_counts_nothing(name):
    """The control: where the parts differ, or in another schedule, ranks idle."""
    times = Times(1, 2, 1) if name == "zb-v" else Times()
    run, work = timed(make(name, 4, 12), times), 12 * (8 if name == "zb-v" else 3 if name == "1f1b" else 6)
    assert run.cost > work
    assert sum(run.busy(rank) for rank in range(4)) == 4 * work


@grids
def test_v_half_has_half_of_1f1bs_bubble_and_memory(grid):
    """Published: half of 1F1B's memory and half of its bubble, 3 (p - 1).

    Exact: the memory is the next even number h above p (or twice the microbatches), for microbatches come in whole and
    each brings two activations. One microbatch alone takes 2 p ticks of F, 2 p of I and its last W: 4 p + 1, of which 6
    are this rank's work, so 4 p - 5 are idle. Every further one that may be held at the same time fills two of these:
    4 p - 5 - (h - 2). That is one tick below the published for odd p, two for even p. (Two ranks idle for a tick more:
    rank 1 waits for its first gradient, which the block has before its second F1.)
    """
    for p, m in grid:
        if p == 1:
            assert (idle("v-half", p, m), held("v-half", p, m)) == (0, 2)
            continue
        h = min(2 * m, 2 * (p // 2 + 1))
        assert idle("v-half", p, m) == 4 * p - 3 - h + (p == 2 <= m)
        assert held("v-half", p, m) == h
        assert held("v-half", p, m, 0.5) == pytest.approx(h, abs=0.5)  # half an activation waits for W at most
        if m > p // 2:
            assert idle("v-half", p, m) == 3 * (p - 1) - (1 if p % 2 or p == 2 else 2)
            assert held("v-half", p, m) == p + (1 if p % 2 else 2)


@grids
def test_v_min_has_a_third_of_1f1bs_memory_and_two_thirds_of_its_bubble(grid):
    """Published: 1/3 of 1F1B's memory; 2/3 of its bubble, 4 (p - 1), and something.

    Exact: 2 floor((p + 4) / 3) activations until the end of W: 2 p / 3 and from 2/3 to 2 more. Microbatches enter 6 ticks
    apart, the last at 6 (m - 1), and it takes what it takes alone, 4 p + 1: 6 m + 4 p - 5, for any number of them. That is
    one tick below the published. Where W needs half of what F leaves: 2 p / 3 and 4/3, 5/3 or 2.
    """
    for p, m in grid:
        if p == 1:
            assert (idle("v-min", p, m), held("v-min", p, m)) == (0, 2)
            continue
        assert idle("v-min", p, m) == 4 * (p - 1) - 1
        most = 2 * ((p + 4) // 3)
        assert held("v-min", p, m) == min(2 * m, most)
        if m > most // 2:
            assert 3 * held("v-min", p, m, 0.5) == pytest.approx(2 * p + (6, 4, 5)[p % 3])


@pytest.mark.parametrize("block", [half_block, min_block])
def test_memory_follows_from_how_long_activations_live(block):
    """The paper's bound: a chunk's activations that live for l ticks of a block that comes every T are held ceil(l / T) times.

    Both chunks together, with weights in the block's free ticks, first come, first served; they peak at the same time or
    one apart. The control: lives one period longer need two more.
    """
    for p in range(2, 13):
        held_at_most = 2 * (p // 2 + 1) if block is half_block else 2 * ((p + 4) // 3)
        bounds = [sum(ceil(life / PERIOD) for life in _lives(ticks)) for ticks in block(p)]
        assert max(bounds) - 1 <= held_at_most <= max(bounds)
        longer = tuple((f, F, i + PERIOD, I + PERIOD) for f, F, i, I in block(p))  # noqa: E741
        assert max(sum(ceil(life / PERIOD) for life in _lives(ticks)) for ticks in longer) == max(bounds) + 2


@pytest.mark.parametrize("p", range(2, 13))
def test_v_min_keeps_to_its_memory_by_its_order_alone(p):
    """V-Half does so with an odd number of ranks. With an even one, forwards would overtake weights that are put off."""
    assert squeezed(min_block(p), 24, 10**6) == squeezed(min_block(p), 24, 2 * ((p + 4) // 3))
    same = squeezed(half_block(p), 24, 10**6) == squeezed(half_block(p), 24, 2 * (p // 2 + 1))
    assert same == (p % 2 == 1)


@st.composite
def blocks(draw, most: int = 5) -> Block:
    """Any ticks that respect what needs what, two passes never on one of the six."""
    p = draw(st.integers(1, most))
    used, ticks, tick = [set() for _ in range(p)], [[] for _ in range(p)], -1
    for down in (True, False, True, False):
        for rank in range(p) if down else reversed(range(p)):
            tick += 1 + draw(st.integers(0, 7))
            while tick % PERIOD in used[rank]:
                tick += 1
            used[rank].add(tick % PERIOD)
            ticks[rank].append(tick)
    return tuple(map(tuple, ticks))


@given(blocks(), st.integers(1, 12), st.integers(1, 40))
def test_any_block_makes_a_schedule_within_the_memory_it_is_given(block, m, limit):
    p = len(block)
    try:
        rows = squeezed(block, m, limit)
    except PlanError as error:
        assert limit < 2 * m
        assert error.nearest == limit + 1
        return
    schedule = Schedule(tuple(tuple(numbered(row, v_shaped(rank, p, m))) for rank, row in enumerate(rows)))
    check(schedule)
    assert max(peak_activations(schedule, 1.0)) <= limit
    if limit >= 2 * m:  # no later than unsqueezed, with all weights at the end
        assert timed(schedule).makespan <= PERIOD * (m - 1) + max(map(max, block)) + 1 + 2 * m


@pytest.mark.parametrize("p", range(2, 13))
def test_too_little_memory_for_a_block_is_refused(p):
    with pytest.raises(PlanError, match=f"more than {p - p % 2} activations") as caught:
        squeezed(half_block(p), 24, p - p % 2)
    assert (caught.value.field, caught.value.nearest) == ("held", p - p % 2 + 1)


def _lives(ticks: tuple[int, ...]) -> tuple[int, int]:
    """How long chunk 0's and chunk 1's activations live, to the end of W, once the repeated block is steady."""
    rounds, seen = 30, 20
    passes = {tick + PERIOD * n: (k, n) for k, tick in enumerate(ticks) for n in range(rounds)}
    assert len(passes) == 4 * rounds, "two passes on one tick"
    waiting, end = [], {}
    for tick in range(max(passes) + rounds):
        if tick in passes:
            waiting += [passes[tick]] if passes[tick][0] > 1 else []
        elif waiting:
            end[waiting.pop(0)] = tick + 1
    return end[3, seen] - ticks[0] - PERIOD * seen, end[2, seen] - ticks[1] - PERIOD * seen


@given(st.integers(2, 8), st.tuples(*[st.integers(8, 12)] * 3))
def test_unequal_times_cost_v_half_and_zb_v_no_waiting_in_each_round(p, parts):
    """The paper: V-Min alone suffers if F, I and W differ. Here up to 1 : 1.5; more microbatches cost their work only."""
    times = Times(*parts)
    for name in ("v-half", "zb-v"):
        few, many = (timed(make(name, p, m), times).makespan for m in (16, 24))
        assert many - few == 8 * 2 * sum(parts)


def test_v_min_waits_in_each_round_where_times_are_unequal():
    """And so the property above can fail."""
    for p in range(2, 9):
        few, many = (timed(make("v-min", p, m), Times(10, 12, 8)).makespan for m in (16, 24))
        assert many - few > 8 * 2 * 30


@pytest.mark.parametrize("name", V)
@pytest.mark.parametrize("chunks", [1, 2])
def test_one_chunk_says_as_it_is_by_nature(name, chunks):
    assert make(name, 3, 5, chunks).rows == Schedule.of(SCHEDULES[name], 3, 5, 2).rows


@pytest.mark.parametrize("name", V)
def test_other_numbers_of_chunks_are_refused(name):
    with pytest.raises(PlanError, match=f"{name} runs two chunks a rank, but chunks=3") as caught:
        make(name, 4, 8, 3)
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("chunks", 3, 2)


@pytest.mark.parametrize("name", V)
def test_large_schedules_can_be_run(name):
    """16 ranks, 128 microbatches; how fast they are built, bench_pipeline.py --schedules tells."""
    check(Schedule.of(SCHEDULES[name], 16, 128))
