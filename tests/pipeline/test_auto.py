"""The automatic schedule: valid, within the memory, never worse than one written by hand, above what nothing can beat."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.pipeline.schedules import make
from emu.parallel.pipeline.schedules.auto import least_cost
from emu.parallel.pipeline.schedules.filling import Problem, fill
from emu.parallel.pipeline.schedules.filling.blocks import blocks, repeated
from emu.parallel.pipeline.schedules.filling.clock import clocked
from emu.parallel.pipeline.schedules.filling.search import allowed, bettered
from emu.parallel.pipeline.schedules.filling.squeeze import Way, squeezed
from emu.parallel.pipeline.timing import Times, peak_activations, timed
from emu.spmd import PlanError

EXACT = 1e-9  # sums of the same times in another order
SHARE = 0.5
BY_HAND = {1: ("gpipe", "1f1b", "zb-h1", "zb-h2"), 2: ("zb-v", "v-half", "v-min", "interleaved", "zb-h1", "gpipe")}


def point(seed: int) -> tuple[int, int, float, float, float, float, float]:
    """p, m, F, B, W, communication and memory at random."""
    rnd = random.Random(seed)
    p = rnd.randint(2, 16)
    f, b, w = (rnd.uniform(0.3, 3) for _ in range(3))
    comm = rnd.choice((0.0, rnd.uniform(0, 0.5)))
    memory = rnd.choice((float(rnd.randint(1, 2 * p + 2)), rnd.uniform(1, 2 * p + 2)))
    return p, rnd.randint(1, 64), f, b, w, comm, memory


def best_by_hand(p, m, f, b, w, comm, memory, chunks=1) -> float:
    """The least cost of those that fit into the memory; infinity if none does."""
    best = float("inf")
    for v in range(1, chunks + 1):
        for name in BY_HAND[v]:
            try:
                one = make(name, p, m, v)
            except PlanError:
                continue
            n = one.stages // p
            if max(peak_activations(one, SHARE)) / n <= memory + EXACT:
                best = min(best, timed(one, Times(f / n, b / n, w / n, comm)).cost)
    return best


def compared(seed: int, chunks: int = 1) -> tuple[float, float, float]:
    """Costs of the automatic one, of the best by hand, and of the lower bound; checks the first by the way."""
    p, m, f, b, w, comm, memory = point(seed)
    times = Times(f / chunks, b / chunks, w / chunks, comm)
    made = make("auto", p, m, chunks, times=times, memory=memory, weight_share=SHARE)
    check(made)
    assert max(peak_activations(made, SHARE)) / chunks <= memory + 1e-6
    least = least_cost(p, m, chunks, times=times, memory=memory, weight_share=SHARE)
    return timed(made, times).cost, best_by_hand(p, m, f, b, w, comm, memory, chunks), least


def judged(seeds, chunks: int = 1, may_be_worse: int = 0) -> str:
    """Never worse, or at so many points by 1 % at most, and better at half of those that leave a gap; says by how much."""
    gaps, open_points, better, worse = [], 0, 0, []
    for seed in seeds:
        cost, by_hand, least = compared(seed, chunks)
        assert cost >= least - EXACT * cost, f"seed {seed}: {cost} is below the bound {least}"
        assert by_hand >= least - EXACT * cost, f"seed {seed}: by hand {by_hand} is below the bound {least}"
        gaps.append(cost / least - 1)
        if cost > by_hand * (1 + EXACT):
            worse.append((seed, cost, by_hand))
        if least * (1 + EXACT) < by_hand < float("inf"):
            open_points += 1
            better += cost < by_hand * (1 - EXACT)
    gaps.sort()
    report = (
        f"{len(gaps)} points: worse {worse}, better at {better} of {open_points} with a gap; gap to the bound: "
        f"median {gaps[len(gaps) // 2]:.2%}, 90 % {gaps[len(gaps) * 9 // 10]:.2%}, worst {gaps[-1]:.2%}, "
        f"closed at {sum(gap < 1e-6 for gap in gaps)}"
    )
    print(report)
    assert len(worse) <= may_be_worse and all(cost <= 1.01 * by_hand for _, cost, by_hand in worse), report
    assert better * 2 >= open_points, report
    return report


def test_never_worse_than_by_hand_and_mostly_better():
    judged(range(1000, 1008))


def test_two_chunks_are_never_worse_than_by_hand_and_mostly_better():
    judged((1004, 1022, 1036, 1037, 1087, 1104), chunks=2)


@pytest.mark.exhaustive
def test_never_worse_than_by_hand_on_200_random_points():
    judged(range(1000, 1200))


@pytest.mark.exhaustive
def test_two_chunks_are_hardly_ever_worse_than_by_hand_on_200_random_points():
    """Seed 1154 is, by half a percent: 16 ranks in a loop, and 10 microbatches."""
    judged(range(1000, 1200), chunks=2, may_be_worse=1)


EQUAL_POINTS = [(name, p, m) for p in range(2, 17) for m in range(1, 3 * p + 4) for name in ("zb-v", "v-half", "v-min")]


def judged_at_equal_times(points) -> str:
    """In the memory that each schedule by hand takes: never worse than any of those that fit into it."""
    worse, gaps = [], []
    for name, p, m in points:
        memory = max(peak_activations(make(name, p, m, 2), SHARE)) / 2
        made = make("auto", p, m, 2, memory=memory, weight_share=SHARE)
        check(made)
        assert max(peak_activations(made, SHARE)) / 2 <= memory + 1e-6
        cost, by_hand = timed(made).cost, best_by_hand(p, m, 2, 2, 2, 0, memory, 2)
        gaps.append(cost / least_cost(p, m, 2, memory=memory, weight_share=SHARE) - 1)
        if cost > by_hand:
            worse.append((name, p, m, cost, by_hand))
    closed = sum(gap < 1e-6 for gap in gaps)
    report = f"{len(gaps)} points: worse {worse}; gap to the bound: worst {max(gaps):.2%}, closed at {closed}"
    print(report)
    assert not worse, report
    return report


def test_two_chunks_at_equal_times_are_never_worse_in_the_memory_of_schedules_by_hand():
    judged_at_equal_times(EQUAL_POINTS[7::61])


@pytest.mark.exhaustive
def test_two_chunks_at_equal_times_are_never_worse_on_the_whole_grid():
    judged_at_equal_times(EQUAL_POINTS)


@given(p=st.integers(1, 8), chunks=st.integers(2, 3), more=st.integers(0, 12), share=st.floats(0, 1), data=st.data())
@settings(max_examples=15, deadline=None)
def test_squeezed_blocks_keep_to_the_memory_and_are_complete(p, chunks, more, share, data):
    there, back = tuple(range(p)), tuple(reversed(range(p)))
    places = sum(((there, back)[c % 2] for c in range(chunks)), ())
    problem = Problem(
        places, 1 + more, (1.0,) * (3 * p * chunks), 0.0, data.draw(st.floats(chunks, 2 * p * chunks)), share
    )
    for block in blocks(places, p)[:6]:
        order = repeated(problem, block)
        if order is None:
            continue
        plain = clocked(problem, order)
        assert plain  # in the block's order nobody waits forever
        for rank in range(p):  # two steps of a rank never fall on one tick of a period
            ticks = [block[3 * s + kind] % (3 * chunks) for s in problem.stages_of[rank] for kind in range(3)]
            assert len(set(ticks)) == 3 * chunks
        rows = squeezed(problem, order, Way())
        if rows is None:
            continue
        assert [sorted(row) for row in rows] == [sorted(row) for row in order] and clocked(problem, rows)
        for rank, row in enumerate(rows):
            assert allowed(problem, rank, row, 0, len(row) - 1)


def test_an_order_that_needs_more_memory_is_no_block_of_it():
    v = (0, 1, 2, 3, 3, 2, 1, 0)
    roomy, tight = (Problem(v, 12, (1.0,) * 24, 0.0, limit, SHARE) for limit in (8.0, 2.0))
    assert all(repeated(roomy, block) for block in blocks(v, 4))
    assert not any(repeated(tight, block) for block in blocks(v, 4))


def test_forwards_that_run_ahead_fill_the_start():
    v = (0, 1, 2, 3, 3, 2, 1, 0)
    problem = Problem(v, 12, (1.0,) * 24, 0.0, 8.0, SHARE)

    def least(way: Way) -> float:
        found = [squeezed(problem, order, way) for block in blocks(v, 4) if (order := repeated(problem, block))]
        return min(one.cost for rows in found if rows and (one := clocked(problem, rows)))

    assert least(Way()) == 12 * 6  # no bubble
    assert least(Way(ahead=False)) > 12 * 6


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_times_memory_and_chunks_give_a_valid_schedule_above_the_bound(data):
    p, m, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    number = st.floats(0, 3).map(lambda x: round(x, 3))
    each = st.one_of(number, st.lists(number, min_size=p * chunks, max_size=p * chunks))
    times = Times(data.draw(each), data.draw(each), data.draw(each), data.draw(number))
    memory, share = data.draw(st.floats(1, 2 * p + 2)), data.draw(st.floats(0, 1))
    made = make("auto", p, m, chunks, times=times, memory=memory, weight_share=share, effort=0.05)
    check(made)
    assert max(peak_activations(made, share)) / chunks <= memory + 1e-6
    least = least_cost(p, m, chunks, times=times, memory=memory, weight_share=share)
    assert timed(made, times).cost >= least * (1 - EXACT)


@given(p=st.integers(1, 16), more=st.integers(0, 40))
@settings(max_examples=15, deadline=None)
def test_no_bubble_in_the_memory_of_zb_h2(p, more):
    m = 2 * p - 1 + more
    made = make("auto", p, m, memory=2 * p - 1)
    assert timed(made).cost == 3 * m
    assert max(peak_activations(made)) <= 2 * p - 1
    if p > 2:  # in the memory of 1F1B there has to be one
        assert least_cost(p, m, memory=p) > 3 * m


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_two_chunks_in_a_v_have_no_bubble_in_the_memory_of_1f1b(p):
    assert timed(make("auto", p, 3 * p, 2, memory=p)).cost == 6 * 3 * p


@pytest.mark.parametrize("memory", [16, 32])
@pytest.mark.parametrize("chunks", [1, 2])
def test_16_ranks_and_128_microbatches_are_no_worse_than_1f1b(chunks, memory):
    """How long it takes, bench_pipeline.py --schedules tells."""
    times = Times(11.325 / chunks, 11.308 / chunks, 8.1087 / chunks, 0.378)
    found = make("auto", 16, 128, chunks, times=times, memory=memory, weight_share=0.43)
    check(found)
    assert max(peak_activations(found, 0.43)) <= memory * chunks + 1e-9
    assert timed(found, times).cost < timed(make("1f1b", 16, 128), Times(11.325, 11.308, 8.1087, 0.378)).cost


def test_the_same_arguments_give_the_same_schedule():
    problems = [Problem((0, 1, 2, 3), 7, (1.0, 2.0, 1.5) * 4, 0.1, 3.3, SHARE)]
    assert fill(problems)[1].rows == fill(problems)[1].rows


def test_too_little_memory_is_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"memory=0.9 is less than the activations of 1 microbatch") as error:
        make("auto", 4, 8, memory=0.9)
    assert error.value.nearest == 1 and error.value.value == 0.9  # type: ignore[attr-defined]
    check(make("auto", 4, 8, memory=1))  # and that much is enough


@pytest.mark.parametrize(
    "wrong", [{"memory": "4"}, {"memory": float("nan")}, {"weight_share": 1.5}, {"times": Times((1, 2, 3))}]
)
def test_what_is_no_number_no_share_or_of_another_pipeline_is_refused(wrong):
    with pytest.raises(PlanError):
        make("auto", 4, 8, **wrong)


def test_uneven_stages_are_used_as_they_are():
    uneven = Times((1, 1, 1, 2), 1, 1)
    cost = timed(make("auto", 4, 12, times=uneven, memory=7), uneven).cost
    assert cost == 12 * 4  # the slowest rank never waits
    assert timed(make("1f1b", 4, 12), uneven).cost > cost


def test_the_search_betters_a_poor_schedule_and_never_leaves_the_memory():
    problem = Problem((0, 1, 2, 3), 6, (1.0, 1.0, 1.0) * 4, 0.0, 4.0, SHARE)
    poor = [[3 * r, 3 * r + 1, 3 * r + 2] * 6 for r in range(4)]  # one microbatch at a time
    found = bettered(problem, poor, 300, 0.0, 0)
    before, after = clocked(problem, poor), clocked(problem, found)
    assert before and after and after.cost < before.cost
    rows = tuple(
        tuple(Action(step // 3, "FIW"[step % 3], row[:i].count(step)) for i, step in enumerate(row)) for row in found
    )
    check(Schedule(rows))
    assert max(peak_activations(Schedule(rows), SHARE)) <= 4
    assert allowed(problem, 0, poor[0], 0, 17)
    assert not allowed(problem, 0, poor[0][1:] + poor[0][:1], 0, 17)  # backward before forward
    assert not allowed(problem, 0, [0] * 6 + [1] * 6 + [2] * 6, 0, 17)  # six held, of four
