"""What is taken for a run that leaves it out and would not fit with its usual value."""

from __future__ import annotations

from emu.planner.closed import predict

BIG = {
    "model__layers": 48,
    "model__hidden": 8192,
    "model__heads": 64,
    "model__kv_heads": 64,
    "model__ffn": 32768,
    "tp": 8,
    "pp": 4,
    "dp": 4,
    "n_gpus": 128,
    "sp": False,
    "micro_batch": 8,
    "global_batch_seqs": 512,
}


def test_a_timed_run_that_does_not_state_recomputation_did_as_much_as_it_needed(case):
    stated, open_ = case(**BIG), case(**BIG, recompute=None)
    assert not predict(stated.workload).fits
    assert open_.workload.recompute != "none"
    assert predict(open_.workload).fits
    assert "recompute=" + open_.workload.recompute + ": it ran" in " ".join(open_.assumed)


def test_what_is_stated_is_never_changed(case):
    assert case(**BIG).workload.recompute == "none"
    assert not any("it ran" in told for told in case(**BIG).assumed)


def test_a_run_that_fits_recomputes_nothing(case):
    found = case(recompute=None)
    assert found.workload.recompute == "none"
    assert not any("it ran" in told for told in found.assumed)


def test_a_run_out_of_memory_is_priced_with_the_usual_value(case):
    assert case(**BIG, recompute=None, measured={"oom": True}).workload.recompute == "none"


def test_cutting_states_comes_before_recomputation(case):
    wide = {**BIG, "micro_batch": 1, "tp": 2, "dp": 16, "zero_stage": None}
    assert not predict(case(**{**wide, "zero_stage": 0}).workload).fits
    found = case(**wide, recompute=None)
    assert (found.workload.zero, found.workload.recompute) == (1, "none")
    assert any(told.startswith("zero=1: it ran") for told in found.assumed)


def test_nothing_is_taken_where_nothing_would_do(case):
    tiny = {**BIG, "model__layers": 480, "recompute": None}
    found = case(**tiny)
    assert (found.workload.recompute, found.workload.zero) == ("none", 1)
    assert not any("it ran" in told for told in found.assumed)
