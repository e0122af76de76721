"""What is asked of a closed form is checked when it is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from workloads import llama, mixtral, odd_workloads, workload

from emu.planner.closed import Moe, WorkloadError, predict


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 2.5}, "layers"),
        ({"hidden": True}, "hidden"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"gated": None}, "gated"),
        ({"schedule": "round robin"}, "schedule"),
        ({"recompute": "some"}, "recompute"),
        ({"precision": "int4"}, "precision"),
        ({"zero": 4}, "zero"),
        ({"zero": True}, "zero"),
        ({"cluster": "h100-8"}, "cluster"),
        ({"power_w": 0}, "power_w"),
        ({"power_w": float("nan")}, "power_w"),
        ({"n": 3}, "n"),
        ({"kv_heads": 17}, "kv_heads"),
        ({"pp": 25}, "pp"),
        ({"ffn": 0}, "ffn"),
        ({"dp": 2, "ep": 2}, "ep"),
        ({"moe": Moe(4, 2, 64), "dp": 8, "ep": 8}, "ep"),
        ({"moe": Moe(64, 2, 64), "dp": 8, "ep": 16}, "ep"),
        ({"moe": Moe(64, 2, 64), "dp": 8, "ep": 8, "etp": 2}, "ep"),
    ],
)
def test_what_cannot_be_is_refused_by_field(changes, field):
    with pytest.raises(WorkloadError) as caught:
        workload(**changes)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert caught.value.hint


def test_a_run_larger_than_its_cluster_is_refused():
    with pytest.raises(WorkloadError, match="the run has 16 devices, and h100-8 has 8"):
        workload(dp=16, cluster=workload(dp=8).cluster)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(WorkloadError, match="a token cannot go to 3 of 2 experts"):
        Moe(2, 3, 64)


def test_what_is_not_said_follows_from_the_rest():
    assert workload(tp=2, dp=4).n == 8
    assert workload().tied and not llama().tied
    assert mixtral(tp=2, dp=8).expert_tp == 2 and mixtral(tp=2, dp=8, ep=8).expert_tp == 1
    assert mixtral().dense_layers == 0 and workload().dense_layers == 24
    assert workload(dp=5, global_batch=64, micro_batch=2).microbatches(2) == 7, "the last one counts as whole"


def test_a_stack_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(WorkloadError, match="did you mean nemo-2024"):
        predict(workload(stack="nemo2024"))


@settings(max_examples=150, deadline=None)
@given(odd_workloads())
def test_odd_sizes_have_a_sensible_number(w):
    """Whatever fits the checks is priced: finite, positive, its parts adding up, something held on every stage."""
    found = predict(w)
    assert 0 < found.step_s < float("inf")
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert len(found.peak_bytes) == w.pp and all(0 < held < float("inf") for held in found.peak_bytes)
    assert found.flops > 0 and found.params_per_rank > 0
    assert all(
        value >= -1e-9 * found.step_s for name, value in found.parts.items() if name not in ("host", "bubble")
    ), found.parts
