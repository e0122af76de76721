"""What must hold of every prediction, whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import ideal, llama, mixtral, odd_workloads, on, workload

from emu.hardware import HardwareError, fitted
from emu.planner.closed import Moe, predict, stack
from emu.planner.closed.layer import layer_work
from emu.planner.closed.sharding import beside_s
from emu.planner.closed.step import prepare
from emu.planner.closed.work import Attention

SLACK = 1 + 1e-9


def step_s(w, **changes):
    return predict(replace(w, **changes, **({"n": None} if "n" not in changes else {}))).step_s


def faster_links(w, times):
    """The same with links of so many times the bandwidth, whatever protocols were capped at."""

    def link(one):
        caps = tuple(replace(p, cap_bytes_per_s=p.cap_bytes_per_s and p.cap_bytes_per_s * times) for p in one.protocols)
        return replace(one, bandwidth_bytes_per_s=one.bandwidth_bytes_per_s * times, protocols=caps)

    node = replace(w.cluster.node, scale_up=link(w.cluster.node.scale_up))
    return replace(w, cluster=replace(w.cluster, node=node, scale_out=link(w.cluster.scale_out)))


def faster_chip(w, times):
    """The same with a chip of so many times the arithmetic and bandwidth."""
    chip = w.cluster.chip
    rates = {dtype: rate * times for dtype, rate in chip.peak_flops.items()}
    chip = replace(chip, peak_flops=rates, hbm_bytes_per_s=chip.hbm_bytes_per_s * times)
    return replace(w, cluster=replace(w.cluster, chip=chip))


@settings(max_examples=80, deadline=None)
@given(odd_workloads(), st.floats(1, 100))
def test_faster_links_never_slow_a_step(w, times):
    assert predict(faster_links(w, times)).step_s <= predict(w).step_s * SLACK


@settings(max_examples=80, deadline=None)
@given(odd_workloads(), st.floats(1, 100))
def test_a_faster_chip_never_slows_a_step(w, times):
    assert predict(faster_chip(w, times)).step_s <= predict(w).step_s * SLACK


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([workload, llama, mixtral]),
    st.sampled_from(["megatron-2021", "nemo-2024", "torchtitan", "llm-foundry"]),
    st.sampled_from([{}, {"zero": 1}, {"zero": 3, "fsdp": True}]),
    st.integers(0, 4),
)
def test_more_data_parallel_ranks_never_slow_a_step_on_an_ideal_network(model, software, shards, doubled):
    """Per token: the batch is the same."""
    few = ideal(model(dp=2**doubled, stack=software, **shards))
    more = ideal(model(dp=2 ** (doubled + 1), stack=software, **shards))
    assert predict(more).step_s <= predict(few).step_s * SLACK


@settings(max_examples=60, deadline=None)
@given(odd_workloads())
def test_a_larger_batch_takes_longer(w):
    if w.micro_batch is None:
        return  # it is tuned, and a larger batch may allow a better one
    assert predict(replace(w, global_batch=2 * w.global_batch)).step_s >= predict(w).step_s / SLACK


@settings(max_examples=60, deadline=None)
@given(odd_workloads())
def test_computing_again_takes_longer_and_holds_less(w):
    plain, again = replace(w, recompute="none"), replace(w, recompute="full")
    assert predict(again).step_s >= predict(plain).step_s / SLACK


@pytest.mark.parametrize("model", [workload, llama])
def test_chunks_and_zero_bubble_schedules_shorten_bubbles(model):
    run = {"pp": 8, "global_batch": 32}
    plain = predict(model(**run))
    for better in ({"vp": 2, "schedule": "interleaved"}, {"schedule": "zb-h1"}, {"schedule": "zb-h2"}):
        assert predict(model(**run, **better)).parts["bubble"] < plain.parts["bubble"]


def test_more_micro_batches_have_a_smaller_share_of_bubble():
    shares = [(p := predict(workload(pp=8, global_batch=n))).parts["bubble"] / p.step_s for n in (8, 32, 128)]
    assert shares == sorted(shares, reverse=True)


def test_fp8_pays_where_products_are_large():
    run = {"tp": 8, "sp": True, "global_batch": 8, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
    assert predict(llama(**run, precision="fp8")).step_s < predict(llama(**run)).step_s


def test_a_lower_power_limit_is_slower_and_none_is_the_chips_own():
    w = llama(dp=8)
    assert step_s(w, power_w=500.0) > step_s(w) == step_s(w, power_w=w.cluster.chip.tdp_w)


def test_tensor_parallelism_across_nodes_costs_more_than_within():
    inside, across = predict(workload(tp=8, sp=True)), predict(workload(tp=16, sp=True))
    assert across.parts["tensor"] > 1.5 * inside.parts["tensor"]


def test_a_micro_batch_that_is_not_stated_is_the_fastest_that_divides_the_batch():
    w = llama(dp=8, global_batch=56, micro_batch=None)
    assert predict(w).micro_batch == 1, "seven sequences a rank: no other divides them"
    assert [prepared.micro_batch for prepared in prepare(w)] == [1]
    w = llama(dp=8, zero=1, layers=4, vocab=8192, global_batch=64, micro_batch=None)
    found = predict(w)
    assert found.fits
    assert found.step_s == min(step_s(w, micro_batch=n) for n in (1, 2, 4, 8))


def test_experts_spread_over_ranks_talk_and_their_products_are_the_same_work():
    apart, together = predict(mixtral(tp=1, dp=8, ep=8)), predict(mixtral(tp=1, dp=8))
    assert apart.parts["experts"] > 0 == together.parts["experts"]
    assert apart.flops == together.flops


def test_a_token_sent_once_to_a_node_costs_less_than_to_every_expert():
    run = {"dp": 64, "ep": 64, "moe": replace(mixtral().moe, experts=64, topk=8), "zero": 1}
    all_seen = {"software.exposed_all_to_all": 1.0}
    plain, nodewise = (predict(mixtral(**run, stack=name), all_seen) for name in ("nemo-2024", "megatron-bridge-2025"))
    assert nodewise.parts["experts"] < 0.9 * plain.parts["experts"]


def test_other_constants_change_what_they_are_about_and_nothing_else():
    w = llama(dp=8)
    slower = {"h100.matmul_bfloat16": fitted()["h100.matmul_bfloat16"].value / 2}
    assert predict(w, slower).step_s > 1.3 * predict(w).step_s
    assert predict(w, {"a100.matmul_bfloat16": 0.1}).step_s == predict(w).step_s
    assert predict(w, {"software.step_s": 1.0}).parts["step"] == 1.0
    with pytest.raises(HardwareError):
        predict(w, {"software.luck": 1.0})


def test_a_chip_that_nobody_fitted_has_a_price():
    assert predict(workload(cluster=on(8, "mi300x"), dp=8)).step_s > 0
    assert predict(workload(cluster=on(64, "tpu-v6e"), dp=64, stack="maxtext")).step_s > 0


def test_a_busy_network_slows_what_crosses_nodes_and_nothing_else():
    busy = {"software.network_share": 0.2}
    one, two = llama(dp=8, zero=1), llama(dp=16, zero=1)
    assert predict(one, busy).step_s == predict(one).step_s
    assert predict(two, busy).parts["data"] > 3 * predict(two).parts["data"]


def test_gathering_beside_compute_costs_its_share_of_it_until_it_takes_longer():
    """By hand: 10 s of compute beside 4 s of messages that slow it by a quarter; then beside 20 s of them."""
    assert beside_s(10.0, 4.0, 0.25) == pytest.approx(11.0)
    assert beside_s(10.0, 20.0, 0.25) == 20.0
    assert beside_s(0.0, 3.0, 0.25) == 3.0


def test_backward_of_fused_attention_computes_scores_again():
    """Five products where forward has two; spelled out, four."""
    fused = [work.flops for work in layer_work(llama(), stack("nemo-2024"), 1) if isinstance(work, Attention)]
    assert fused[1] == 2.5 * fused[0]
    old = layer_work(workload(stack="megatron-2021"), stack("megatron-2021"), 1)
    cores = [work for work in old if work.name in ("attention.scores", "attention.values")]
    assert [sum(w.phase == phase for w in cores) for phase in ("forward", "input")] == [2, 4]


def test_only_eager_gated_models_spell_out_their_norms():
    def bytes_of(w):
        return sum(work.bytes for work in layer_work(w, stack(w.stack), 1) if work.name == "norms")

    assert bytes_of(llama(stack="torchtitan")) > 2 * bytes_of(llama(stack="torchtitan-compiled"))
    assert bytes_of(workload(stack="torchtitan")) == bytes_of(workload(stack="llm-foundry"))


def test_sums_beside_weights_gradients_are_hidden_as_far_as_these_last():
    """Megatron-LM of 2022 against that of 2021, whose kernels are the same."""
    run = {"tp": 8, "hidden": 12288, "heads": 96, "kv_heads": 96, "ffn": 49152, "chip": "a100"}
    before, after = (predict(workload(stack=name, **run)) for name in ("megatron-2021", "megatron-2022"))
    assert after.parts["kernels"] == before.parts["kernels"]
    assert 0.4 * before.parts["tensor"] < after.parts["tensor"] < 0.8 * before.parts["tensor"]


def test_products_of_unequal_experts_are_slower_where_none_is_dropped():
    equal, unequal = (predict(mixtral(dp=8, ep=8, moe=Moe(8, 2, 16384, dropless=one))) for one in (False, True))
    assert unequal.parts["kernels"] > 1.1 * equal.parts["kernels"]
