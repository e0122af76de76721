"""Time, bubble and activations of GPipe, 1F1B and interleaved 1F1B equal the published closed forms, or corrected ones.

Notation of the papers: p ranks, m microbatches, v chunks a rank, t_f and t_b of one chunk (in the papers of a rank: v times
as much). Times are whole numbers, so that everything is exact. What a form assumes is said where it is tested.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emu.parallel.pipeline import Schedule
from emu.parallel.pipeline.schedules import interleaved, make, one_f_one_b
from emu.parallel.pipeline.timing import Timed, Times, peak_activations, timed

ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)
chunks = st.integers(2, 4)
duration = st.integers(1, 9)
GRID = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 5, 8, 12, 18)]


def run(schedule: Schedule, t_f: int = 1, t_b: int = 2) -> Timed:
    return timed(schedule, Times(t_f, t_b, 0))  # a whole backward takes t_b


def bubble(name: str, p: int, m: int, v: int, t_f: int = 1, t_b: int = 2, **options: int) -> float:
    """How long each rank idles; as long on all of them, since they compute as much."""
    times = run(make(name, p, m, v, **options), t_f, t_b)
    assert {times.busy(rank) for rank in range(p)} == {m * v * (t_f + t_b)}
    return times.makespan - m * v * (t_f + t_b)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(ranks, microbatches, duration, duration)
def test_gpipe_and_1f1b_idle_p_minus_1_forwards_and_backwards(name, p, m, t_f, t_b):
    """(p-1)(t_f+t_b), (p-1)/m of the ideal time: for any m, also below p, and whatever the ratio of t_f to t_b."""
    assert bubble(name, p, m, 1, t_f, t_b) == (p - 1) * (t_f + t_b)
    times = run(make(name, p, m), t_f, t_b)
    assert times.bubble_ratio == pytest.approx((p - 1) / m, rel=1e-12)  # a division in another order
    assert times.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_gpipe_holds_all_microbatches_and_1f1b_as_many_as_ranks_follow(p, m):
    """1F1B: the table's p, and p-i+1 of stage i from 1, are for m of at least p; there are never more than m."""
    assert peak_activations(make("gpipe", p, m)) == [m] * p
    assert peak_activations(make("1f1b", p, m)) == [min(m, p - i + 1) for i in range(1, p + 1)]


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
@given(ranks, microbatches, chunks, duration, duration)
def test_with_chunks_the_bubble_is_a_vth(name, p, m, v, t_f, t_b):
    """(p-1)(t_f+t_b)/v of a rank's times, (p-1)/(v m) of the ideal time; published for multiples of p.

    Holds for every m of at least p, with rounds as `turns` makes them, as each is long enough to keep all ranks busy until
    its first microbatch is back. Fewer microbatches than ranks leave p - m holes at each of the v - 1 changes of chunk, in
    forwards and in backwards: then it is (p-1 + (v-1)(p-m))(t_f+t_b).
    """
    idle = bubble(name, p, m, v, t_f, t_b)
    assert idle == (p - 1 + (v - 1) * max(0, p - m)) * (t_f + t_b)
    if m >= p:
        assert run(make(name, p, m, v), t_f, t_b).bubble_ratio == pytest.approx((p - 1) / (v * m), rel=1e-12)


def held(p: int, m: int, v: int, first_round: int, i: int) -> int:
    """What stage i, from 1, holds in chunks: its forwards ahead, which are 2 more for each rank that follows, and one."""
    return min(m * v, (v - 1) * first_round + 2 * (p - i) + 1)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), GRID)
def test_activations_of_interleaved(p, m, v):
    """(1+(p-1)/(p v)) p microbatches of a rank, so pv+p-1 of a chunk, for m a multiple of p, at least 2p (or p = 1).

    With m = p all forwards come first, and there are only p v. In general, rounds are longer than p: up to 2p-1.
    """
    longest = -(-m // max(1, m // p))
    peaks = peak_activations(make("interleaved", p, m, v))
    assert peaks == [held(p, m, v, longest, i) for i in range(1, p + 1)]
    if m % p == 0 and (m >= 2 * p or p == 1):
        assert max(peaks) == (1 + (p - 1) / (p * v)) * p * v
    assert peak_activations(make("gpipe", p, m, v)) == [m * v] * p


def test_m_equal_to_p_is_where_the_published_activations_are_too_many():
    assert max(peak_activations(make("interleaved", 4, 4, 2))) == 8 < (1 + 3 / 8) * 8 == 11


@given(ranks, microbatches, chunks, st.data())
def test_llama_3s_count_changes_activations_and_not_the_bubble(p, m, v, data):
    """(PP-1)/(V M) for every N from PP to M; activations grow from depth-first's to breadth-first's.

    N = M is breadth-first in its forwards; its backwards start as soon as they can, so that it holds less than all of
    m v. Assumes that what is left of M, if anything, is at least PP, as Megatron demands.
    """
    assume(m >= p)
    count = data.draw(st.integers(p, m))
    assume(m % count == 0 or m % count >= p)
    assert bubble("interleaved", p, m, v, count=count) == (p - 1) * 3
    peaks = peak_activations(make("interleaved", p, m, v, count=count))
    assert peaks == [held(p, m, v, count, i) for i in range(1, p + 1)]


@given(st.integers(2, 9), st.integers(2, 5), duration, st.integers(0, 5), st.data())
def test_a_rest_smaller_than_p_costs_a_backward_for_each_hole(p, v, t_f, more, data):
    """What Megatron refuses: of N, N ... and r < p the last round has p - r holes at each of the v - 1 changes of chunk.

    Its forwards' holes are filled by backwards of the round before, which are due anyway; its own backwards' are not: so
    (v-1)(p-r)t_b more. Assumes t_b >= t_f, and enough to fill with: N >= p of two chunks; of up to five 3p/2 are enough
    (found by trying p up to 9; with fewer a few holes stay).
    """
    t_b = t_f + more
    count = data.draw(st.integers(p if v == 2 else -(-3 * p // 2), 2 * p + v))
    rest = data.draw(st.integers(1, p - 1))
    m = data.draw(st.integers(1, 2)) * count + rest
    idle = bubble("interleaved", p, m, v, t_f, t_b, count=count)
    assert idle == (p - 1) * (t_f + t_b) + (v - 1) * (p - rest) * t_b


@given(ranks, microbatches, chunks, duration, duration, st.data())
def test_short_rounds_cost_no_more_than_whole_ones_would(p, m, v, t_f, t_b, data):
    """N below p: no form is published, and there is none as short, since how far holes can be filled depends on how the
    microbatches of several rounds meet. But each round takes at most what it would without holes, and less is held.
    """
    count = data.draw(st.integers(1, m))
    sizes = [min(count, m - first) for first in range(0, m, count)]
    whole = sum(max(size, p) for size in sizes)
    schedule = make("interleaved", p, m, v, count=count)
    least, most = (m * v + p - 1) * (t_f + t_b), (whole * v + p - 1) * (t_f + t_b)
    assert least <= run(schedule, t_f, t_b).makespan <= most
    filled = peak_activations(make("interleaved", p, whole, v, count=max(count, p)))
    assert all(here <= there for here, there in zip(peak_activations(schedule), filled))


def test_what_a_larger_count_is_for_is_to_hide_transfers():
    """Why Llama 3 made N tunable: with time between ranks, depth-first waits at each change of chunk, breadth-first never."""
    p, m, v, wire = 4, 24, 2, 0.5
    makespans = [
        timed(make("interleaved", p, m, v, count=n), Times(communication=wire)).makespan for n in (4, 6, 12, 24)
    ]
    ideal = (m * v + p - 1) * 3 + 2 * (p - 1) * wire  # one way there and one back
    assert makespans == [160.0, ideal, ideal, ideal] and ideal < 160
    peaks = [max(peak_activations(make("interleaved", p, m, v, count=n))) for n in (4, 6, 12, 24)]
    assert peaks == [11, 13, 19, 31]


# Negative controls: a generator that is a little worse is told from the published one.


def test_one_forward_less_ahead_takes_longer(monkeypatch):
    plain = one_f_one_b.__globals__["in_turn"]
    monkeypatch.setitem(one_f_one_b.__globals__, "in_turn", lambda f, b, ahead: plain(f, b, max(0, ahead - 1)))
    assert run(Schedule.of(one_f_one_b, 4, 8)).makespan > (8 + 3) * 3


def test_one_forward_more_ahead_holds_more(monkeypatch):
    plain = one_f_one_b.__globals__["in_turn"]
    monkeypatch.setitem(one_f_one_b.__globals__, "in_turn", lambda f, b, ahead: plain(f, b, ahead + 1))
    later = Schedule.of(one_f_one_b, 4, 8)
    assert run(later).makespan == (8 + 3) * 3  # no slower
    assert peak_activations(later) == [5, 4, 3, 2]  # not 4, 3, 2, 1


def test_rounds_that_are_too_short_idle_longer():
    """As 10 microbatches on 4 ranks would with Megatron's rounds of 4, 4 and 2 instead of torch's 5 and 5."""
    assert bubble("interleaved", 4, 10, 2) == 9
    assert bubble("interleaved", 4, 10, 2, count=4) == 9 + 2 * 2
    assert bubble("interleaved", 4, 10, 2, count=1) > 9 + 2 * 2


@given(st.integers(2, 8), microbatches, chunks, duration, duration)
def test_what_the_second_forward_ahead_for_each_rank_that_follows_is_for(p, m, v, t_f, t_b):
    """Megatron's interleaved runs 2 (p-1-r) forwards ahead beyond the chunks before the last, where 1F1B has p-1-r. Half of
    them would do, and hold less, if transfers took no time: the second hides these.
    """
    plain = interleaved.__globals__["in_turn"]

    def fewer(forwards, backwards, ahead):
        return plain(forwards, backwards, ahead - (p - 1 - forwards[0].stage))

    usual = make("interleaved", p, m, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(interleaved.__globals__, "in_turn", fewer)
        lean = Schedule.of(interleaved, p, m, v)
    assert run(lean, t_f, t_b).makespan == run(usual, t_f, t_b).makespan
    assert all(here <= there for here, there in zip(peak_activations(lean), peak_activations(usual)))
    if m >= 2 * p:
        assert peak_activations(usual)[0] - peak_activations(lean)[0] == p - 1
        wire = Times(t_f, t_b, 0, communication=0.5)
        assert timed(lean, wire).makespan > timed(usual, wire).makespan
