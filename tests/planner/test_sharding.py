"""Over how many ranks states are cut, and what data parallelism then costs and holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workloads import llama, mixtral

from emu.planner.closed import Moe, predict, stack
from emu.planner.closed.communication import all_to_all_s, layer_messages
from emu.planner.closed.params import LayerParams, embedding_params, on_rank
from emu.planner.closed.placing import cut
from emu.planner.closed.prices import Prices
from emu.planner.closed.sharding import fsdp_layer, mirrored_s, optimizer_s, reduction_s
from emu.planner.closed.stages import StageTime

EXPERTS = Moe(8, 2, 14336)


def prices(w):
    return Prices(w.cluster, stack(w.stack))


def optimizer(**changes):
    w = llama(**changes)
    return optimizer_s(w, prices(w))


def test_the_optimizer_works_on_what_a_rank_holds_whichever_axes_cut_it():
    across = optimizer(dp=128, zero=1)
    assert optimizer(dp=16, cp=8, zero=1) == pytest.approx(across)
    assert optimizer(dp=1, cp=1) > 5 * across


def test_under_hsdp_the_optimizer_works_on_a_share_of_one_copy():
    """A 16th of the ranks share a copy, so each has 16 times as many parameters."""
    full, hybrid = (optimizer(dp=128, zero=3, fsdp=True, hsdp=n) for n in (None, 8))
    assert hybrid == pytest.approx(16 * full, rel=0.05)


def test_under_expert_parallelism_the_optimizer_works_on_more_of_each_expert():
    """By bytes: experts on 8 ranks are shared by a ranks' 8th, and all else by all: cut by hand."""
    w = mixtral(dp=64, ep=8, zero=1)
    assert (cut(w).ranks, cut(w, experts=True).ranks) == (64, 8)
    plain = mixtral(dp=64, zero=1)
    assert cut(plain, experts=True).ranks == 64
    # The same experts' states a rank either way (1/8 on a rank, cut by 8); gradients read to clip are fewer.
    assert optimizer_s(w, prices(w)) < optimizer_s(plain, prices(plain))


@given(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]), st.sampled_from([1, 2, 8]))
def test_copies_times_ranks_of_one_are_all(hsdp, ep):
    w = mixtral(dp=128, ep=ep, fsdp=True, zero=3, hsdp=hsdp)
    for experts, all_ranks in ((False, 128), (True, 128 // ep)):
        found = cut(w, experts)
        assert found.ranks * found.copies == all_ranks


def test_copies_sum_the_gradients_of_experts_too():
    """By hand: eight experts' gradients, four bytes each, pass twice over a device's 50 GB/s (cut by 8), or a node's 400."""
    run = {"dp": 128, "fsdp": True, "zero": 3, "seq": 4096, "global_batch": 128, "ffn": 0, "moe": EXPERTS}
    bytes_ = 4 * 8 * 3 * 4096 * 14336
    for hsdp, least_s in ((8, 2 * bytes_ / 8 / 50e9), (1, 2 * bytes_ / 400e9)):
        w = llama(hsdp=hsdp, **run)
        assert least_s < fsdp_layer(w, prices(w), 1).reduce < 2 * least_s
    steps = [predict(llama(hsdp=n, **run)).step_s for n in (None, 64, 8, 1)]
    assert steps == sorted(steps), "to sum gradients this large takes longer than to gather over fewer ranks saves"


def test_a_mean_layer_gathers_what_layers_with_experts_and_without_do_on_average():
    def of(first_dense):
        w = llama(dp=64, fsdp=True, zero=3, moe=Moe(8, 2, 14336, first_dense=first_dense))
        return fsdp_layer(w, prices(w), 1)

    none, half, every = of(0), of(16), of(32)
    assert every.gather < half.gather < none.gather
    assert half == pytest.approx([(a + b) / 2 for a, b in zip(none, every)])


def test_a_few_copies_within_a_node_are_summed_within_it():
    w = llama(dp=8, fsdp=True, zero=3, hsdp=1)
    one = fsdp_layer(w, prices(w), 1)
    far = llama(dp=64, tp=8, fsdp=True, zero=3, hsdp=8)
    assert one.gather == 0 < one.reduce
    assert cut(far).stride * cut(far).ranks == 64, "the next copy lies eight nodes on"


def test_zeros_third_stage_is_gathered_whether_or_not_it_is_called_fsdp():
    """ZeRO's section 7.2.2: 3 Psi, half as much again as stages below it."""
    named, plain = (llama(dp=8, zero=3, fsdp=fsdp, micro_batch=1) for fsdp in (True, False))
    assert predict(named) == predict(plain)
    assert predict(plain).parts["data"] == 0 < predict(plain).parts["fsdp"]
    assert predict(llama(dp=8, zero=2, micro_batch=1)).parts["fsdp"] == 0


def test_all_of_zero_below_three_is_reduced_over_dp_and_cp():
    nothing = StageTime(0.0, 0.0, 0.0)
    cp, dp = llama(dp=2, cp=4, zero=1), llama(dp=8, zero=1)
    assert reduction_s(cp, prices(cp), nothing) == pytest.approx(reduction_s(dp, prices(dp), nothing))
    assert embedding_params(cp) == embedding_params(dp)


def test_reductions_hide_behind_a_long_backward_but_for_a_bucket():
    """By hand: 8 % have nothing to hide behind, and the rest slows what it runs beside."""
    w = llama(dp=16, zero=0)
    bare = reduction_s(w, prices(w), StageTime(0.0, 0.0, 0.0))
    hidden = reduction_s(w, prices(w), StageTime(1e3, 1e3, 0.0))
    assert "data" in prices(w).stack.overlaps
    assert hidden == pytest.approx(bare * (1 - 0.92 + prices(w).chip.overlap_loss))


def test_stages_on_two_devices_sum_their_gradients_between_these_too():
    """DualPipe's two copies of each stage; no other schedule has any."""
    run = {"pp": 4, "dp": 2, "global_batch": 64}
    for schedule in ("1f1b", "zb-v", "dualpipe-v"):
        w = llama(schedule=schedule, **run)
        assert mirrored_s(w, prices(w)) == 0
    w, sharded = (llama(schedule="dualpipe", zero=zero, **run) for zero in (0, 1))
    bytes_ = predict(w).params_per_rank * prices(w).stack.gradient_bytes
    assert bytes_ / 450e9 < mirrored_s(w, prices(w)) < 3 * bytes_ / 50e9
    assert mirrored_s(sharded, prices(w)) < 0.6 * mirrored_s(w, prices(w))


def test_experts_are_cut_over_ep_and_etp():
    assert on_rank(mixtral(tp=2, dp=8, ep=4, etp=2), LayerParams(16.0, 64.0)) == (8.0, 8.0)


def test_experts_whose_parts_lie_beside_one_another_reach_fewer_in_a_node():
    """Eight ranks of experts, two devices each: half of them lie in another node."""
    far, near = (mixtral(tp=2, dp=8, ep=8, etp=etp) for etp in (2, 1))
    assert all_to_all_s(far, prices(far), 4096) > 2 * all_to_all_s(near, prices(near), 4096)


def test_rings_hide_behind_attention_but_for_their_first_steps():
    """By hand: a tenth stays in sight behind long attention, all and a tenth behind none; gradients pass, too, in backward."""
    w = llama(cp=4)

    def context(attention):
        return layer_messages(w, prices(w), 1, attention, 0.0, False)[2:4]

    bare, behind = context((0.0, 0.0)), context((1.0, 1.0))
    assert bare[1] == pytest.approx(2 * bare[0]) and behind[1] == pytest.approx(2 * behind[0])
    assert behind[0] == pytest.approx(0.1 * bare[0] / 1.1) and behind[0] > 0
