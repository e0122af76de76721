"""Whether a step fits a device, and what software's facts make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workloads import llama, workload

from emu.planner.closed import predict, stack
from emu.planner.closed.activations import layer_bytes
from emu.planner.closed.memory import BUCKET, CONTEXT_BYTES, GROUP_BYTES, RESERVED, _stage_bytes, needed_bytes
from emu.planner.closed.stages import laid


def test_what_must_fit_is_what_is_allocated_beside_contexts_and_not_what_an_allocator_reserves():
    w = llama(dp=8, tp=1, stack="megatron-2023")
    (allocated,) = [_stage_bytes(w, stack(w.stack), 1, 0, laid(w))]
    (needed,) = needed_bytes(w, stack(w.stack), 1, laid(w))
    assert needed == allocated + CONTEXT_BYTES + GROUP_BYTES
    assert predict(w).peak_bytes == (RESERVED * allocated,)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (1, True), (-1, False)])
def test_a_step_fits_up_to_the_last_byte(spare, fits):
    w = llama(dp=8)
    (needed,) = needed_bytes(w, stack(w.stack), predict(w).micro_batch, laid(w))
    chip = replace(w.cluster.chip, hbm_bytes=int(needed + 0.5) + spare)
    w = replace(w, cluster=replace(w.cluster, chip=chip))
    assert predict(w).fits is fits


def test_a_micro_batch_that_is_not_stated_is_the_fastest_that_fits():
    w = llama(dp=8, zero=1, layers=8, global_batch=64, micro_batch=None)
    each = {size: predict(replace(w, micro_batch=size)) for size in (1, 2, 4, 8)}
    fitting = {size: found for size, found in each.items() if found.fits}
    assert 0 < len(fitting) < len(each)
    assert predict(w).micro_batch == min(fitting, key=lambda size: fitting[size].step_s)


def test_where_no_micro_batch_fits_the_smallest_is_taken():
    w = llama(dp=8, global_batch=64, micro_batch=None, layers=400)
    found = predict(w)
    assert (found.micro_batch, found.fits) == (1, False)


def test_a_fused_loss_holds_less_and_moves_less():
    vocabulary = {"dp": 8, "vocab": 512_000, "fsdp": True, "zero": 3, "layers": 1}
    fused = llama(stack="llm-foundry", **vocabulary)
    w = replace(fused, stack="torchtitan")
    assert stack("llm-foundry").moved_logit_bytes == 6 < stack("nemo-2024").moved_logit_bytes == 24
    apart = predict(w).peak_bytes[0] - predict(fused).peak_bytes[0]
    logits = 8192 * 512_000
    assert apart == pytest.approx(RESERVED * (12 - 4) * logits, rel=0.05)
    assert predict(fused).parts["ends"] < predict(w).parts["ends"]


def test_where_products_alone_are_kept_a_layer_holds_what_they_are():
    """MaxText's "minimal": query, key, value and out_proj, mlpwi_0, mlpwi_1, mlpwo, and the layer's input."""
    w = llama(tp=4, stack="maxtext")
    h, q, k, ffn = 4096, 32 * 128, 8 * 128, 14336
    by_hand = 8192 * 2 * (3 * h + q + 2 * k + 2 * ffn) / 4  # all of it lies on tensor
    assert layer_bytes(w, stack("maxtext"), 1, "none") == pytest.approx(by_hand)
    kept = layer_bytes(w, stack("maxtext"), 1, "per-op")
    assert by_hand - kept == pytest.approx(8192 * 2 * 2 * ffn / 4)
    assert layer_bytes(w, stack("maxtext"), 1, "full") == 8192 * 2 * h / 4


def test_deepspeed_copies_a_bucket_of_float32_gradients_in_bf16_training_alone():
    w = workload(dp=4, zero=1, stack="megatron-deepspeed-2022", precision="bf16")
    bare = replace(stack(w.stack), deepspeed=False, accumulator_bytes=6)
    with_bucket, without = (_stage_bytes(w, one, 1, 0, laid(w)) for one in (stack(w.stack), bare))
    assert with_bucket - without == pytest.approx(4 * BUCKET)  # 2 + 2 + 4 + 12 / 4 bytes each way
