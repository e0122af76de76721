"""Rows two of whose numbers cannot both be true: each says which, and neither is priced."""

from __future__ import annotations

import pytest
from published import GONE

from emu.validate.cases import is_run
from emu.validate.contradictions import refuse_memory
from emu.validate.reading import packaged_rows


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"micro_batch": 32}, "micro-batches of 32 on dp 4 ranks are 128 sequences, and the batch has 64"),
        ({"n_microbatches": 7}, "are 8 micro-batches of 2 on each of dp 4 ranks, and n_microbatches says 7"),
        ({"global_batch_seqs": 3, "micro_batch": GONE}, "a batch of 3 sequences leaves some of dp 4 ranks without any"),
        ({"model__params_b": 7}, "dimensions make 0.356 billion parameters, and params_b says 7"),
        ({"measured": {"mem_gb": 80, "mem_gib": 10}}, "mem_gb says 80 GB, and mem_gib 10 GiB"),
        (
            {"measured": {"iter_time_s": 1.0, "tokens_per_s_per_gpu": 109}},
            "iter_time_s says that a step takes 1 s, and tokens_per_s_per_gpu 75.16 s",
        ),
        ({"measured": {"iter_time_s": 2.0, "iter_time_s_derived": 2.1}}, "iter_time_s_derived 2.1 s"),
        ({"fsdp": True, "hsdp_group": 3}, "groups of hsdp_group 3 ranks do not divide dp 4"),
        ({"fsdp": True, "hsdp_group": 64}, "groups of hsdp_group 64 ranks do not divide dp 4"),
        ({"vp": 4, "pp": 1, "dp": 8}, "vp 4 chunks are of a pipeline's stages, and pp is 1"),
        ({"model__heads": 12, "model__kv_heads": 12}, "12 heads do not divide hidden 1024, and head_dim is not stated"),
    ],
)
def test_a_row_that_contradicts_itself_says_how(case, fields, why):
    found = case(**fields)
    assert why in (found.why_not or "")
    assert found.row.id == "one"


@pytest.mark.parametrize(
    "fields",
    [
        {"n_microbatches": 8},
        {"global_batch_seqs": 63, "n_microbatches": 8},  # the last one is smaller
        {"micro_batch": 16},
        {"global_batch_seqs": 4, "micro_batch": GONE},
        {"model__params_b": 0.35},
        {"model__params_b": 7, "model__moe": {"experts": 8, "topk": 2, "moe_ffn": 512}},
        {"measured": {"mem_gb": 33, "mem_gib": 30.7}},
        {"measured": {"iter_time_s": 2.0, "iter_time_s_derived": 2.03}},
        {"measured": {"iter_time_s": 2.0, "tflops_per_gpu": 1.0}},  # what FLOPs a source counts is its own affair
        {"fsdp": True, "hsdp_group": 4},
        {"vp": 1, "pp": 1, "dp": 8},
        {"model__heads": 12, "model__kv_heads": 12, "model__head_dim": 85},
    ],
)
def test_a_row_whose_numbers_agree_is_used(case, fields):
    assert case(**fields).why_not is None


def test_no_packaged_row_says_its_memory_twice_and_differently():
    for line in packaged_rows():
        if is_run(line):
            refuse_memory(line.row.measured)
