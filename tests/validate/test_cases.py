"""From a row to a case: what is priced, what was measured, what is assumed, and why a row cannot be used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import GONE, RUN, changed

from emu.planner.closed import Moe
from emu.planner.closed.flops import step_flops
from emu.validate.cases import GB, GIB, case_of, cases_of
from emu.validate.reading import Line, packaged_rows
from emu.validate.rows import RunRow
from emu.validate.timing import counted_flops

TOKENS = 64 * 2048  # of the plain run's batch
DEVICES = 16


def of_row(row: dict):
    return case_of(Line("file", 1, RunRow.model_validate(row)))


def by_hand(pairs: float = 1.0, again: bool = False) -> float:
    """FLOPs of a step of the plain run: SC21's formula, https://arxiv.org/abs/2104.04473, equation 3, taken apart."""
    layers, hidden, vocab, seq = 24, 1024, 50304, 2048
    passes = 4 if again else 3
    layer = 24 * hidden**2 + 4 * seq * hidden * pairs  # a token, forward
    return TOKENS * (passes * layers * layer + 3 * 2 * hidden * vocab)


def test_a_full_row_assumes_nothing_and_keeps_all_it_says(case):
    found = case()
    w = found.workload
    assert (found.assumed, found.why_not, found.measured_s, found.measured_of) == ((), None, 2.0, "iter_time_s")
    assert (found.source, found.section, found.line) == ("Megatron-LM of somebody", "table 1", 1)
    assert (w.layers, w.hidden, w.heads, w.kv_heads, w.head_dim, w.ffn, w.vocab) == (24, 1024, 16, 16, 64, 4096, 50304)
    assert (w.tp, w.sp, w.pp, w.vp, w.dp, w.cp, w.zero, w.fsdp) == (2, True, 2, 1, 4, 1, 1, False)
    assert (w.seq, w.micro_batch, w.global_batch, w.recompute, w.precision) == (2048, 2, 64, "none", "bf16")
    assert (w.schedule, w.stack, w.gated, w.moe, w.devices) == ("1f1b", "megatron-2023", False, None, DEVICES)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"iter_time_s": 2.5}, 2.5),
        ({"iter_time_s_derived": 3.5}, 3.5),
        ({"tokens_per_s": 50_000.0}, TOKENS / 50_000),
        ({"tokens_per_s_per_gpu": 3000}, TOKENS / DEVICES / 3000),
        ({"samples_per_gpu_s": 1.6}, 64 / DEVICES / 1.6),
        ({"tflops_per_gpu": 100}, by_hand() / DEVICES / 100e12),
        ({"aggregate_pflops": 1.6}, by_hand() / 1.6e15),
        ({"mfu": 0.4}, by_hand() / DEVICES / (0.4 * 312e12)),
        ({"iter_time_s": None, "tokens_per_s": 50_000.0, "tflops_per_gpu": 1.0}, TOKENS / 50_000),
        ({"iter_time_s": 2.5, "iter_time_s_derived": 2.52, "tflops_per_gpu": 1.0}, 2.5),
    ],
)
def test_the_measured_time_is_that_of_the_figure_nearest_to_a_clock(case, measured, seconds):
    assert case(measured=measured).measured_s == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("convention", "flops"),
    [
        ("model FLOPs, attention full (12Lhs)", by_hand()),
        ("model flops = s*(72Lh^2 + 12Lhs + 6Vh): attention FULL (non-causal)", by_hand()),
        ("model FLOPs, causal-half attention", by_hand(pairs=0.5)),
        ("hardware FLOPs eq(3)", by_hand(again=True)),
        ("MaxText", by_hand()),
        (None, by_hand()),
    ],
)
def test_a_rate_of_flops_is_turned_into_time_as_its_source_counts(case, convention, flops):
    found = case(measured={"tflops_per_gpu": 100}, flops_convention=convention, recompute="full")
    assert found.measured_s == pytest.approx(flops / DEVICES / 100e12, rel=1e-9)
    assert any(told.startswith("FLOPs:") for told in found.assumed) == (convention is None)


def test_palms_convention_counts_all_parameters(case):
    found = case(measured={"mfu": 0.5}, flops_convention="6N + 12LHS, N includes (tied) embeddings", peak_tflops=300)
    layer = 12 * 1024**2 + 13 * 1024  # matrices, biases and norms of a GPT's layer
    n = 24 * layer + 50304 * 1024 + 2048 * 1024 + 2 * 1024
    flops = TOKENS * (6 * n + 12 * 24 * 1024 * 2048)
    assert found.measured_s == pytest.approx(flops / DEVICES / (0.5 * 300e12), rel=1e-9)


def test_hardware_utilisation_counts_what_is_computed_again(case):
    found = case(measured={"hfu": 0.5}, recompute="full", peak_tflops=312)
    assert found.measured_s == pytest.approx(by_hand(again=True) / DEVICES / 156e12, rel=1e-9)


def test_conventions_differ_as_they_should(case):
    w = case().workload
    full, causal, parameters = (counted_flops(w, name) for name in ("full", "causal", "parameters"))
    assert causal < full < parameters  # which also counts positions, norms and biases
    assert full == pytest.approx(step_flops(w)) == pytest.approx(by_hand())


def test_memory_is_read_in_both_units(case):
    assert case(measured={"mem_gb": 33}).measured_bytes == 33 * GB
    assert case(measured={"mem_gib": 5.5}).measured_bytes == 5.5 * GIB
    assert case(measured={"mem_gb": None, "iter_time_s": 1.0}).measured_bytes is None


def test_the_time_of_one_layer_is_kept_apart(case):
    assert case(measured={"layer_total_ms": 19.5}).layer_s == pytest.approx(0.0195)
    both = case(measured={"layer_fwd_ms": 7.0, "layer_bwd_ms": 12.0})
    assert (both.layer_s, both.measured_s, both.why_not) == (pytest.approx(0.019), None, None)


def test_a_run_out_of_memory_has_no_time(case):
    found = case(measured={"oom": True, "iter_time_s": 2.0})
    assert (found.out_of_memory, found.measured_s, found.why_not) == (True, None, None)
    assert case(measured={"oom": True}).workload is not None


@pytest.mark.parametrize(
    ("fields", "name", "value", "told"),
    [
        ({"model__vocab": None}, "vocab", 51200, "vocab=51200"),
        ({"model__vocab": None, "source__title": "vTrain: a simulator"}, "vocab", 50257, "vocab=50257"),
        ({"model__vocab": None, "source__title": "Zero Bubble Pipeline Parallelism"}, "vocab", 32000, "vocab=32000"),
        ({"model__kv_heads": None}, "kv_heads", 16, None),
        ({"model__ffn": None}, "ffn", 4096, "ffn=4096"),
        ({"model__mlp": None}, "gated", False, "mlp=plain"),
        ({"model__mlp": None, "model__name": "Llama-7"}, "gated", True, "mlp=gated"),
        ({"model__name": "Qwen3-30B"}, "head_dim", 128, "head_dim=128"),
        ({"model__head_dim": 96}, "head_dim", 96, None),
        ({"recompute": None}, "recompute", "none", "recompute=none"),
        ({"recompute": "none?"}, "recompute", "none", None),
        ({"recompute": "selective (per-op AC)"}, "recompute", "per-op", None),
        ({"recompute": "selective (every other layer)"}, "recompute", "every-other-layer", None),
        ({"recompute": "selective"}, "recompute", "selective", None),
        ({"precision": None}, "precision", "bf16", "precision=bf16"),
        ({"precision": "fp16?"}, "precision", "fp16", None),
        ({"precision": "amp_bf16"}, "precision", "bf16", None),
        ({"precision": "bf16 (fp32 master weights)"}, "precision", "bf16", None),
        ({"recompute": "activation checkpointing"}, "recompute", "full", None),
        ({"zero_stage": None}, "zero", 0, "zero=0"),
        ({"zero_stage": None, "fsdp": True}, "zero", 3, None),
        ({"sp": None}, "sp", False, "sp=False"),
        ({"sp": True, "tp": 1, "dp": 8}, "sp", False, None),
        ({"dp": None}, "dp", 4, None),
        ({"n_gpus": None}, "devices", 16, None),
        ({"tp": None, "dp": None}, "dp", 8, "tp=1"),
        ({"cp": None}, "cp", 1, None),
        ({"micro_batch": None}, "micro_batch", None, "micro_batch: the fastest"),
        ({"source__title": "MaxText README"}, "micro_batch", 4, None),  # 2 a device, of tensor groups of 2
        ({"global_batch_seqs": None, "global_batch_tokens": TOKENS}, "global_batch", 64, None),
        ({"global_batch_seqs": None, "n_microbatches": 8}, "global_batch", 64, None),
        ({"schedule": None}, "schedule", "1f1b", None),
        ({"schedule": "ZB-2p"}, "schedule", "zb-h2", None),
        ({"schedule": "ZB-1p"}, "schedule", "zb-h1", None),
        ({"schedule": "interleaved 1F1B", "vp": 3}, "vp", 3, None),
        ({"schedule": "interleaved 1F1B", "vp": None}, "vp", 4, "vp=4"),
        ({"schedule": "interleaved 1F1B", "vp": None, "source__title": "SC21"}, "vp", 3, "vp=3"),
        ({"schedule": "interleaved", "vp": None, "model__layers": 46}, "vp", 4, "vp=4"),  # 48 with ends that lack one
        ({"schedule": "interleaved", "vp": None, "model__layers": 25}, "vp", 1, "vp=1"),
        ({"schedule": "1F1B", "vp": 2}, "schedule", "interleaved", None),
        ({"schedule": "interleaved", "pp": 1, "vp": None, "dp": 8}, "schedule", "1f1b", None),
        ({"schedule": "ZB-2p with optimizer all-reduce sync"}, "optimizer_sync", True, None),
        ({"notes": "LLAMA3_70B; LoRA (adapter training)"}, "adapters", True, None),
        ({"fsdp": True, "hsdp_group": 2}, "hsdp", 2, None),
        ({"source__title": "some paper"}, "stack", "assumed-a100", "software: assumed on an A100"),
    ],
)
def test_what_is_not_stated_is_assumed_and_said(case, fields, name, value, told):
    found = case(**fields)
    assert found.why_not is None
    assert getattr(found.workload, name) == value
    assert [text for text in found.assumed if told is None or not text.startswith(told)] == []
    assert bool(found.assumed) == (told is not None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": None}, "the model's number of layers is not stated"),
        ({"model__hidden": None}, "the model's hidden size is not stated"),
        ({"model__heads": None}, "the model's number of heads is not stated"),
        ({"model__ffn": None, "model__mlp": "swiglu"}, "width of the MLP is not stated"),
        ({"seq": None}, "the sequence length is not stated"),
        ({"global_batch_seqs": None}, "the global batch is not stated"),
        ({"global_batch_tokens": 5}, "global_batch_tokens says 5"),
        ({"global_batch_seqs": None, "global_batch_tokens": 2049}, "no whole number of sequences"),
        ({"n_gpus": 24}, "are 16 devices, and n_gpus says 24"),
        ({"n_gpus": 18, "dp": None}, "do not divide 18 devices"),
        ({"n_gpus": None, "dp": None}, "the number of devices is not stated"),
        ({"hardware": None}, "the hardware is not stated"),
        ({"hardware": "RTX 4090"}, "names no chip that emu knows"),
        ({"n_gpus": 2**40, "dp": None, "global_batch_seqs": 2**40}, "more than emu places"),
        (
            {"recompute": "sometimes"},
            'recompute "sometimes" is none that emu prices; it can be every-other-layer, full',
        ),
        ({"precision": "nvfp4"}, 'precision "nvfp4" is none'),
        ({"precision": "fp32"}, 'precision "fp32" is none'),
        ({"schedule": "breadth first"}, 'schedule "breadth first" is none'),
        ({"model__mlp": "convolution"}, 'mlp "convolution" is none'),
        ({"model__kv_heads": 32}, "more than 16 query heads"),
        ({"pp": 32, "n_gpus": 256}, "cannot be cut into 32 pipeline stages"),
        ({"pp": 512, "n_gpus": 4096, "model__layers": 512}, "512 pipeline stages are more than emu prices"),
        ({"ep": 8}, "there are none"),
        ({"measured": {}}, "no time, rate or memory of a step is stated"),
        ({"measured": None}, "no time, rate or memory of a step is stated"),
        ({"measured": {"bubble_theory": 0.1}}, "no time, rate or memory of a step is stated"),
        ({"measured": {"layer_fwd_ms": 19.0}}, "no time, rate or memory of a step is stated"),
    ],
)
def test_a_row_that_says_too_little_or_contradicts_itself_is_not_usable(case, fields, why):
    found = case(**fields)
    assert why in found.why_not
    assert found.row.id == "one"


def test_experts_are_read_and_dropped_tokens_are_in_the_notes(case):
    moe = {"experts": 8, "topk": 2, "moe_ffn": 512, "shared": 1, "active_b": 1.2}
    assert case(model__moe=moe, model__ffn=None, ep=2).workload.moe == Moe(8, 2, 512, shared=1)
    assert case(model__moe=moe, notes="Token-drop, capacity factor 1.").workload.moe.dropless is False
    assert case(model__moe=moe, notes="DeepSeekV3 (dropless), no tokendrop").workload.moe.dropless is True
    assert case(model__moe={**moe, "attn": "MLA", "first_dense": 3}).workload.moe.mla is True


def test_the_software_is_what_the_source_says_not_what_the_row_is_called(case):
    def stack(**fields):
        return case(**fields).workload.stack

    assert stack(source__title="torchtitan", notes="FSDP+compile.") == "torchtitan-compiled"
    assert stack(id="titan-compile", source__title="vTrain") == stack(id="zb-bloom", source__title="vTrain")
    assert stack(source__title="a talk", source__url="https://github.com/bigscience-workshop/x").startswith(
        "megatron-deep"
    )
    assert stack(source__title="a talk", source__section="MaxText on TPU", hardware="TPU v4") == "maxtext"


def test_no_packaged_case_is_treated_by_its_id():
    for line in packaged_rows():
        if isinstance(line.row, RunRow) and line.row.kind == "measured":
            found, other = case_of(line), case_of(line._replace(row=line.row.model_copy(update={"id": "x"})))
            assert (found.workload, found.measured_s, found.fit) == (other.workload, other.measured_s, other.fit)


def test_the_packaged_rows_that_cannot_be_used_are_known():
    cases = cases_of(packaged_rows())
    why = [case.why_not for case in cases if case.why_not]
    assert (
        {reason: why.count(reason) for reason in why}
        == {
            "the model's number of layers is not stated": 6,
            "the global batch is not stated": 4,
            "the model's dimensions make 25.8 billion parameters, and params_b says 22": 1,  # of a gated MLP, MaxText's later one
        }
    )
    assert sum(case.measured_s is not None for case in cases) == 599
    assert sum(case.measured_bytes is not None for case in cases) == 54
    assert sum(case.layer_s is not None for case in cases) == 5
    assert sum(case.out_of_memory is True for case in cases) == 2


FIELDS = [name for name in RUN if name not in ("id", "kind", "model", "measured", "source")]
VALUES = st.sampled_from([None, GONE, 1, 3, 8, 1000, 2**40, 7.0, "fp8", "full", "H200", "", "x", True])


@given(st.dictionaries(st.sampled_from([*FIELDS, *(f"model__{name}" for name in RUN["model"])]), VALUES, max_size=6))
def test_any_row_that_can_be_read_is_a_case_or_says_why_not(fields):
    try:
        row = RunRow.model_validate(changed(RUN, **fields))
    except ValueError:
        return
    found = case_of(Line("file", 1, row))
    assert (found.workload is None) <= (found.why_not is not None)
    assert found.measured_s is None or found.measured_s > 0
