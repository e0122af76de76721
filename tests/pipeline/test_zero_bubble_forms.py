"""Time, bubble and activations of ZB-H1 and ZB-H2 equal the closed forms of the Zero Bubble paper, or corrected ones.

The paper (https://arxiv.org/abs/2401.10241): p ranks, m microbatches, times T_F, T_B (backward of inputs) and T_W (of weights)
of a stage, activations M_B of a microbatch, of which M_W are left for the backward of weights; stages i = 1 .. p. A step's cost
is the longest that a rank takes from its first action to its last, as no rank waits for the others before it updates its
weights; what it idles is that minus m(T_F+T_B+T_W). Times here are whole numbers, so that everything is exact.

How the corrected forms come about. Both schedules run a number of forwards ahead, then forwards and backwards of inputs in
turn, and backwards of weights `late` microbatches later. What a rank waits for is the first backward to arrive, or, from then
on, its own work, or the backwards of a rank further down that was busy longer:

* First backward on rank s: it climbs from the last rank, at pT_F + (p-1-s)T_B, and its own forwards ahead must be done.
* From then on rank s is never idle until its last backward of inputs: m of T_B, forwards that were not ahead, and those of
  weights that are not late.
* The last backward of rank r comes when that of some rank s >= r has climbed to it; then the late weights follow.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emu.parallel.pipeline import Schedule
from emu.parallel.pipeline.schedules import make, zb_h1, zb_h2
from emu.parallel.pipeline.timing import Timed, Times, peak_activations, timed

ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)
chunks = st.integers(2, 4)
duration = st.integers(1, 9)
share = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # exact in binary
GRID = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 5, 8, 12, 18)]


def run(name: str, p: int, m: int, times: tuple[int, int, int], v: int = 1) -> Timed:
    return timed(make(name, p, m, v), Times(*times))


def idle(times: Timed, m: int, t: tuple[int, int, int], v: int = 1) -> float:
    return times.cost - m * v * sum(t)


def ends(p: int, m: int, t: tuple[int, int, int], kind: int) -> list[int]:
    """When each rank stops, from the three points above; kind 1 for ZB-H1, 2 for ZB-H2."""
    t_f, t_b, t_w = t
    ahead = [kind * (p - 1 - s) + 1 for s in range(p)]  # with the one that the first backward follows
    late = [kind * s for s in range(p)]
    first = [max(p * t_f + (p - 1 - s) * t_b, (s + min(m, ahead[s])) * t_f) for s in range(p)]
    last = [first[s] + m * t_b + max(0, m - ahead[s]) * t_f + max(0, m - 1 - late[s]) * t_w for s in range(p)]
    return [max(last[s] + (s - r) * t_b for s in range(r, p)) + min(m, late[r] + 1) * t_w for r in range(p)]


@given(ranks, microbatches, duration, duration, duration)
def test_zb_h1_idles_as_published_where_weights_fit_behind_a_forward(p, m, t_f, t_b, t_w):
    """(p-1)(T_F+T_B-T_W). Assumes m >= p, and T_W <= T_F: a rank waits (p-1)T_B for its first backward in any case, and
    weights can fill no more than the gap of (p-1)T_F in its last ones. Larger T_W: (p-1)T_B.
    """
    assume(m >= p)
    published = (p - 1) * (t_f + t_b - t_w)
    assert idle(run("zb-h1", p, m, (t_f, t_b, t_w)), m, (t_f, t_b, t_w)) == (published if t_w <= t_f else (p - 1) * t_b)


@given(ranks, microbatches, duration, duration, duration)
def test_zb_h1_stops_when_derived_for_all_sizes_and_times(p, m, t_f, t_b, t_w):
    times = run("zb-h1", p, m, (t_f, t_b, t_w))
    stops = ends(p, m, (t_f, t_b, t_w), 1)
    assert times.makespan == max(stops)
    assert times.cost == max(stop - rank * t_f for rank, stop in enumerate(stops))
    if (
        m >= p
    ):  # the same, in short: the whole takes longer than a rank's span where T_F is large, as ranks start T_F apart
        each = max(t_f, t_b + max(0, t_f - t_w))
        assert times.makespan == m * (t_f + t_b + t_w) + (p - 1) * each


@given(ranks, microbatches, duration, duration, duration)
def test_zb_h2_idles_as_published_where_that_is_not_negative(p, m, t_f, t_b, t_w):
    """(p-1)(T_F+T_B-2T_W). Assumes m >= 2p-1, so that all forwards ahead are there.

    A rank does 2p-1 forwards before its first backward, which is there after pT_F + (p-1)T_B: it waits (p-1)(T_B-T_F)
    where that is more than nothing. So idle (p-1) max(0, T_B-T_F, T_F+T_B-2T_W). At equal times nothing: zero bubble.
    """
    assume(m >= 2 * p - 1)
    times = run("zb-h2", p, m, (t_f, t_b, t_w))
    each = max(0, t_b - t_f, t_f + t_b - 2 * t_w)
    assert idle(times, m, (t_f, t_b, t_w)) == (p - 1) * each
    if t_w <= t_f and 2 * t_w <= t_f + t_b:
        assert each == t_f + t_b - 2 * t_w  # as published
    stops = ends(p, m, (t_f, t_b, t_w), 2)
    assert times.makespan == max(stops) == m * (t_f + t_b + t_w) + (p - 1) * max(t_f, each)
    assert times.cost == max(stop - rank * t_f for rank, stop in enumerate(stops))


@given(ranks, st.integers(1, 14), duration, duration, duration)
def test_zb_h2_of_few_microbatches_stops_when_derived(p, m, t_f, t_b, t_w):
    """m below 2p-1. With T_W > T_F too, backwards on several ranks in turn hold up the next (a longest path with more than
    one bend), and it may take longer than derived, by less than the weights that are in the way.
    """
    assume(m < 2 * p - 1)
    times = run("zb-h2", p, m, (t_f, t_b, t_w))
    stops = ends(p, m, (t_f, t_b, t_w), 2)
    cost = max(stop - rank * t_f for rank, stop in enumerate(stops))
    if t_w <= t_f:
        assert (times.makespan, times.cost) == (max(stops), cost)
    else:
        assert 0 <= times.makespan - max(stops) <= (p - 1) * (t_w - t_f)
        assert 0 <= times.cost - cost <= (p - 1) * (t_w - t_f)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@given(ranks, st.data(), duration, duration, duration)
def test_no_more_microbatches_than_ranks(name, p, data, t_f, t_b, t_w):
    """(m+p-1)(T_F+T_B)+T_W, beside 1F1B's (m+p-1)(T_F+T_B+T_W), for m <= p. Assumes that T_W is the shortest of the three,
    as it is in the paper's profiles: else weights of one microbatch hold up the next backward.
    """
    m, t_w = data.draw(st.integers(1, p)), min(t_f, t_b, t_w)
    times = (t_f, t_b, t_w)
    assert run(name, p, m, times).cost == (m + p - 1) * (t_f + t_b) + t_w
    assert run("1f1b", p, m, times).cost == (m + p - 1) * (t_f + t_b + t_w)


@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 8), (4, 12), (8, 24), (8, 120)])
def test_bubble_rates_at_equal_times(p, m):
    """The repository's table: B0 = (p-1)/(m+p-1) of 1F1B, ZB1P a third of it, ZB2P nothing.

    A third is approximate, since the whole it is a share of shrinks, too: exactly (p-1)/(3m+p-1).
    """
    rate = {}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        times = run(name, p, m, (1, 1, 1))
        rate[name] = idle(times, m, (1, 1, 1)) / times.cost
    b0 = (p - 1) / (m + p - 1)
    assert rate["1f1b"] == pytest.approx(b0, rel=1e-12)
    assert rate["zb-h1"] == pytest.approx((p - 1) / (3 * m + p - 1), rel=1e-12)
    assert rate["zb-h2"] == (0 if m >= 2 * p - 1 else rate["zb-h2"])
    # exact: a third of B0 times (m+p-1)/(m+(p-1)/3), which is between 1 and 3, and nears 1 as m grows
    assert rate["zb-h1"] / (b0 / 3) == pytest.approx((m + p - 1) / (m + (p - 1) / 3), rel=1e-12)


@pytest.mark.parametrize(("p", "m"), GRID)
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 1.0])  # M_W / M_B; exact in binary
def test_activations_of_every_stage(name, p, m, part):
    """ZB-H1: (p-i+1)M_B+(i-1)M_W, at most pM_B. ZB-H2: (2p-2i+1)M_B+(2i-2)M_W, at most (2p-1)M_B.

    Assume m >= p and m >= 2p-1. With fewer, the last forward comes when fewer weights are late: M_B of what is ahead, at most
    m, and M_W of what is left of m beyond that, at most what is late.
    """
    kind = {"zb-h1": 1, "zb-h2": 2}[name]
    peaks = peak_activations(make(name, p, m), part)
    for i, peak in zip(range(1, p + 1), peaks):
        ahead, late = kind * (p - i) + 1, kind * (i - 1)
        assert peak == min(m, ahead) + min(late, max(0, m - ahead)) * part
        if m >= kind * (p - 1) + 1:
            assert peak == ahead + late * part
    if m >= kind * (p - 1) + 1:
        assert max(peaks) == {"zb-h1": p, "zb-h2": 2 * p - 1}[name]
    if kind == 1:
        assert max(peaks) == max(peak_activations(make("1f1b", p, m)))  # no more memory than 1F1B


@given(ranks, microbatches, chunks, duration, duration, duration)
def test_interleaved_zb_h1_has_a_vth_of_the_bubble(p, m, v, t_f, t_b, t_w):
    """Nothing is published for torch's InterleavedZeroBubble. With times of a chunk it idles as ZB-H1 does, for m >= p."""
    assume(m >= p)
    times = run("zb-h1", p, m, (t_f, t_b, t_w), v)
    assert idle(times, m, (t_f, t_b, t_w), v) == (p - 1) * (t_b + max(0, t_f - t_w))
    assert times.makespan == m * v * (t_f + t_b + t_w) + (p - 1) * max(t_f, t_b + max(0, t_f - t_w))


@given(st.integers(2, 8), st.data(), chunks, duration, duration, duration)
def test_interleaved_zb_h1_of_few_microbatches(p, data, v, t_f, t_b, t_w):
    """m < p: p - m holes at each change of chunk, as in interleaved 1F1B. Without time for weights that is all there is;
    with it, they fill holes, but stand in the way of backwards in places that depend on how the chunks meet.
    """
    m = data.draw(st.integers(1, p - 1))
    steps = p * (v - 1) + m + p - 1
    assert run("zb-h1", p, m, (t_f, t_b, 0), v).cost == steps * (t_f + t_b)
    cost = run("zb-h1", p, m, (t_f, t_b, t_w), v).cost
    assert steps * (t_f + t_b) + t_w <= cost <= steps * (t_f + t_b + t_w)


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), GRID)
def test_activations_of_interleaved_zb_h1(p, m, v):
    """One forward more a rank that follows (interleaved 1F1B: two), over the chunks before the last, and i-1 late weights."""
    longest = -(-m // max(1, m // p))
    peaks = peak_activations(make("zb-h1", p, m, v), 0.25)
    for i, peak in zip(range(1, p + 1), peaks):
        ahead = (v - 1) * longest + p - i + 1
        assert peak == min(m * v, ahead) + 0.25 * min(i - 1, max(0, m * v - ahead))


# Negative controls: a generator that is a little off is told from the published one.


@pytest.mark.parametrize(("generator", "name"), [(zb_h1, "zb-h1"), (zb_h2, "zb-h2")])
def test_weights_at_once_idle_longer_and_all_at_the_end_hold_more(generator, name, monkeypatch):
    plain = generator.__globals__["in_turn"]
    p, m = 4, 12
    right = make(name, p, m)
    bubble = idle(timed(right), m, (1, 1, 1))

    def at_once(forwards, backwards, ahead, weights, late):
        return plain(forwards, backwards, ahead, weights, 0)

    monkeypatch.setitem(generator.__globals__, "in_turn", at_once)
    assert idle(timed(Schedule.of(generator, p, m)), m, (1, 1, 1)) > bubble

    def at_the_end(forwards, backwards, ahead, weights, late):
        return plain(forwards, backwards, ahead, weights, len(weights))

    monkeypatch.setitem(generator.__globals__, "in_turn", at_the_end)
    assert max(peak_activations(Schedule.of(generator, p, m))) > max(peak_activations(right))


def test_zb_h2_with_the_forwards_of_zb_h1_waits_for_its_first_backward(monkeypatch):
    plain = zb_h2.__globals__["in_turn"]

    def fewer(forwards, backwards, ahead, weights, late):
        return plain(forwards, backwards, ahead // 2, weights, late)

    assert idle(timed(make("zb-h2", 4, 12)), 12, (1, 1, 1)) == 0
    monkeypatch.setitem(zb_h2.__globals__, "in_turn", fewer)
    assert idle(timed(Schedule.of(zb_h2, 4, 12)), 12, (1, 1, 1)) == 3
