"""What a run achieves, worked out by hand for small traces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost import price
from emu.cost.energy import BUSY_SHARE, IDLE_SHARE
from emu.cost.metrics import _length, _union
from emu.trace.events import Alloc, Free, Recategorise
from emu.trace.trace import Trace

MB = 10**6


def metrics(events, cluster, axes=None, **options):
    return price(Trace(axes or {"dp": len(events)}, dict(enumerate(events))), cluster).metrics(**options)


def test_mfu_counts_products_and_attention_and_hfu_recomputation_too(toy):
    events = [
        toy.kernel(0.5, dims=(1, 1, 1, 1)),
        toy.kernel(0.2, name="flash_attention"),
        toy.kernel(0.1, dims=(1, 1, 1, 1), phase="recompute"),
        toy.kernel(0.2, name="gelu"),
    ]
    m = metrics([events], toy.cluster())
    step = m.step_time_s  # what attention takes is for its price to say
    assert step >= 1.0
    assert m.mfu == pytest.approx(0.7 / step)
    assert m.hfu == pytest.approx(0.8 / step)
    assert m.tflops_per_device == pytest.approx(0.7 / step)
    assert m.busy_fraction == pytest.approx(1)
    assert "as executed" in m.flops_convention


def test_kernel_hfu_is_what_matrix_kernels_reach_while_they_run(toy):
    events = [
        toy.kernel(0.5, dims=(1, 1, 1, 1)),
        toy.kernel(0.1, dims=(1, 1, 1, 1), phase="recompute"),
        toy.kernel(0.4, name="gelu"),
    ]
    m = metrics([events, events[:2]], toy.cluster())
    assert m.hfu == pytest.approx(1.2 / 2.0)
    assert m.kernel_hfu == pytest.approx(1.0)  # nothing but the roofline holds these up
    slow = toy.replace(toy.cluster(), chip=toy.replace(toy.cluster().chip, kernel_s=1.2))
    assert 0 < metrics([events[:1]], slow).kernel_hfu < 0.5
    assert metrics([events[2:]], toy.cluster()).kernel_hfu == 0.0


def test_energy_counts_devices_that_wait_for_less(toy):
    chip = toy.replace(toy.cluster().chip, tdp_w=700.0)
    work = [toy.kernel(1.0, dims=(1, 1, 1, 1))]
    busy, half = (metrics(events, toy.replace(toy.cluster(), chip=chip)) for events in ([work, work], [work, []]))
    assert busy.energy_j == pytest.approx(2 * 700 * BUSY_SHARE)
    assert half.energy_j == pytest.approx(700 * (BUSY_SHARE + IDLE_SHARE))
    assert metrics([work], toy.cluster()).energy_j is None  # whose power is not known


def test_one_rank_that_stands_for_several_takes_the_energy_of_all(toy):
    on = toy.replace(toy.cluster(), chip=toy.replace(toy.cluster().chip, tdp_w=700.0))
    work = [toy.kernel(1.0, dims=(1, 1, 1, 1))]
    assert metrics([work], on, axes={"dp": 4}).energy_j == pytest.approx(metrics([work] * 4, on).energy_j)


def test_the_yardstick_is_the_peak_of_the_main_dtype(toy):
    slow = toy.replace(
        toy.cluster(), chip=toy.replace(toy.cluster().chip, peak_flops={"float32": 1e12, "bfloat16": 4e12})
    )
    events = [toy.kernel(0.5, dims=(1, 1, 1, 1), dtype="bfloat16"), toy.kernel(0.1, dims=(1, 1, 1, 1))]
    m = metrics([events], slow)
    assert m.dtype == "bfloat16"
    assert m.mfu == pytest.approx(0.6e12 / (m.step_time_s * 4e12))


def test_idle_ranks_lower_mfu(toy):
    work = [toy.kernel(0.5, dims=(1, 1, 1, 1))]
    assert metrics([work, []], toy.cluster()).mfu == pytest.approx(0.5)
    assert metrics([work, work], toy.cluster()).mfu == pytest.approx(1.0)


@pytest.mark.parametrize(("after_s", "exposed_s"), [(0.0, 0.102), (0.05, 0.052), (0.2, 0.0)])
def test_communication_is_exposed_where_no_kernel_runs(toy, after_s, exposed_s):
    events = [toy.kernel(0.2), toy.collective((0, 1), 0, 100 * MB, 1), toy.kernel(after_s), toy.wait(1)]
    m = metrics([events, events], toy.cluster())
    assert m.exposed_comm_s == pytest.approx(exposed_s, abs=1e-12)
    assert m.exposed_comm_fraction == pytest.approx(exposed_s / m.step_time_s, abs=1e-12)
    assert m.comm_s == pytest.approx(0.102)


def test_waiting_for_a_late_rank_is_exposed_too(toy):
    late, early = toy.kernel(0.7), toy.kernel(0.1)
    reduce = toy.collective((0, 1), 0, 100 * MB, 1)
    m = metrics([[early, reduce], [late, reduce]], toy.cluster())
    assert m.exposed_comm_s == pytest.approx(0.6 + 0.102)


def test_traffic_is_that_of_the_rank_that_sends_most(toy):
    pieces = (30, 10, 60)
    gather = [toy.collective((0, 1, 2), n, 100, n, kind="all_gather", sizes=pieces) for n in range(2)]
    sends = [toy.transfer("send", 0, 1, 0, 7, 9, stream="p"), toy.transfer("recv", 0, 1, 0, 7, 9, stream="p")]
    m = metrics([[*gather, sends[0]], [*gather, sends[1]], gather], toy.cluster())
    assert m.comm_bytes == {"dp": 2 * 90, "pp": 7}  # rank 0 passes on all pieces but the 10 of its successor


def test_traffic_is_rounded_once_for_all_calls(toy):
    reduces = [toy.collective((0, 1, 2), n, 10, n) for n in range(3)]  # 2 * 2/3 * 10 bytes each, three times
    assert metrics([reduces] * 3, toy.cluster()).comm_bytes == {"dp": 40}
    assert metrics([reduces[:1]] * 3, toy.cluster()).comm_bytes == {"dp": 14}


def test_peak_memory_is_the_most_alive_at_once(toy):
    events = [
        Alloc(1, 100, "parameters", "default"),
        Alloc(2, 50, "temporary", "default"),
        Recategorise(2, 50, "temporary", "activations"),
        Free(2, 50, "activations"),
        Alloc(3, 20, "temporary", "default"),
    ]
    assert metrics([events, events[:1]], toy.cluster()).peak_hbm_bytes == [150, 100]


def test_tokens_per_second(toy):
    m = metrics([[toy.kernel(0.5)]] * 2, toy.cluster(), tokens=1000)
    assert (m.tokens_per_s, m.tokens_per_s_per_device) == pytest.approx((2000, 1000))
    assert metrics([[toy.kernel(0.5)]], toy.cluster()).tokens_per_s is None


def test_metrics_go_into_json_and_an_empty_trace_has_some(toy):
    m = metrics([], toy.cluster(), axes={})
    assert json.loads(json.dumps(m.as_dict()))["mfu"] == 0.0
    assert m.step_time_s == m.exposed_comm_s == m.busy_fraction == 0.0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=8))
def test_a_union_covers_the_same_instants_once(pairs):
    intervals = [(a, a + length) for a, length in pairs]
    union = _union(intervals)
    covered = {t for a, b in intervals for t in range(a, b)}
    assert _length(union) == len(covered)
    assert all(b < c for (_, b), (c, _) in pairwise(union))
