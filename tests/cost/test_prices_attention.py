"""Fused attention against the curves that its papers print, and what must hold of any chip and length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost.prices import attention_flops_per_s, attention_s
from emu.hardware import HardwareError, chip, chip_names

A100, H100, TPU = chip("a100"), chip("h100"), chip("tpu-v4")
KINDS = ("flash1", "flash2", "flash3")

# TFLOP/s forward on H100, bf16, heads of 128, no mask, 512 to 16k tokens: chart text of arXiv 2407.08608, figure 5.
CURVES = {"flash3": (467, 565, 625, 638, 646, 648), "flash2": (309, 350, 362, 368, 370, 370)}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize("kind", CURVES)
def test_the_ramp_with_length_is_that_of_the_papers_curves(kind):
    """One number of the chip (attention_seq) meets both curves, as each is of its own longest."""
    measured = CURVES[kind]
    # A kernel alone, not in a training step: with the share of the peak that the curve itself ends on.
    alone = replace(H100, attention={kind: measured[-1] * 1e12 / H100.peak("bfloat16")})
    for length, tflops in zip(LENGTHS, measured):
        priced = attention_flops_per_s(alone, kind, length, 128, causal=False) / 1e12
        assert priced == pytest.approx(tflops, rel=0.05)


def test_without_the_ramp_the_curves_are_missed():  # the negative control
    alone = replace(H100, attention={"flash3": 648e12 / H100.peak("bfloat16")}, attention_seq=0.0)
    assert attention_flops_per_s(alone, "flash3", 512, 128, causal=False) / 1e12 > 1.3 * CURVES["flash3"][0]


@pytest.mark.parametrize(("kind", "it", "alone"), [("flash3", H100, 648e12), ("flash2", H100, 370e12)])
def test_a_training_step_keeps_up_most_of_what_the_kernel_reaches_alone(kind, it, alone):
    reached = attention_flops_per_s(it, kind, 2**20, 128, causal=False)
    assert 0.75 * alone < reached < alone


def test_the_newest_kernel_for_a_chip_is_its_fastest_and_backward_is_slower():
    for it, kinds in ((A100, KINDS[:2]), (H100, KINDS)):
        rates = [attention_flops_per_s(it, kind, 4096, 128) for kind in kinds]
        assert rates == sorted(rates) and len(set(rates)) == len(rates)
        for kind in kinds:
            forward, backward = (attention_flops_per_s(it, kind, 4096, 128, backward=b) for b in (False, True))
            assert 0.6 * forward < backward < forward
    assert attention_flops_per_s(A100, "flash3", 4096, 128) == attention_flops_per_s(A100, "flash2", 4096, 128)
    assert attention_flops_per_s(TPU, "flash1", 4096, 128) == attention_flops_per_s(TPU, "flash2", 4096, 128)


def test_a_mask_halves_the_work_but_not_quite_the_time():
    full = attention_s(H100, "flash3", 1e12, 4096, 128, causal=False)
    half = attention_s(H100, "flash3", 0.5e12, 4096, 128, causal=True)
    assert 0.5 * full < half < 0.65 * full


def test_a_causal_mask_halves_the_keys_and_wastes_half_a_block_of_128():
    """So short sequences suffer twice as much from the ends of their blocks."""
    share, ends = H100.attention["flash3"], H100.attention_seq * H100.attention["flash3"]
    for seq in (256, 2048, 65536):
        reached = attention_flops_per_s(H100, "flash3", seq, 128) / H100.peak("bfloat16")
        assert reached == pytest.approx(share * (seq / 2) / (seq / 2 + 64 + ends))


def test_small_heads_are_slower_and_a_systolic_array_does_not_mind():
    rates = [attention_flops_per_s(H100, "flash3", 4096, d) for d in (64, 96, 128, 256)]
    assert rates[0] < rates[1] < rates[2] == rates[3]
    assert attention_flops_per_s(TPU, "flash2", 4096, 64) == attention_flops_per_s(TPU, "flash2", 4096, 128)


def test_under_a_power_limit_attention_slows_down_as_products_do():
    held = replace(H100, power_limit_w=500)
    rates = [attention_flops_per_s(it, "flash3", 4096, 128) / it.flops_per_s("bfloat16") for it in (H100, held)]
    assert rates[0] == pytest.approx(rates[1])
    assert held.flops_per_s("bfloat16") < H100.flops_per_s("bfloat16")


def test_attention_of_a_chip_that_nobody_describes_is_a_share_of_its_products():
    bare = replace(H100, attention={}, sustained={"bfloat16": 0.5}, attention_seq=0.0)
    for backward, least in ((False, 0.7), (True, 0.5)):
        rate = attention_flops_per_s(bare, "flash2", 4096, 128, backward=backward)
        assert least * bare.flops_per_s("bfloat16") < rate < bare.flops_per_s("bfloat16")


lengths = st.integers(1, 200_000)


@given(
    st.sampled_from(chip_names()), st.sampled_from(KINDS), lengths, st.integers(1, 512), st.booleans(), st.booleans()
)
def test_attention_is_never_faster_than_peak_or_than_its_bytes(name, kind, seq, head_dim, backward, causal):
    it = chip(name)
    rate = attention_flops_per_s(it, kind, seq, head_dim, backward=backward, causal=causal)
    assert 0 < rate < it.peak("bfloat16")
    least = attention_s(it, kind, 0, seq, head_dim, backward=backward, bytes_=1e9, causal=causal)
    assert least == pytest.approx(1e9 / it.memory_bytes_per_s + it.kernel_s)


@given(st.sampled_from(chip_names()), st.sampled_from(KINDS), lengths, lengths, st.booleans())
def test_longer_sequences_take_longer_at_a_higher_rate(name, kind, seq, more, causal):
    it, longer = chip(name), seq + more
    short_s, long_s = (attention_s(it, kind, 4.0 * s * s * 128, s, 128, causal=causal) for s in (seq, longer))
    assert short_s <= long_s
    short, long = (attention_flops_per_s(it, kind, s, 128, causal=causal) for s in (seq, longer))
    assert short < long


@given(st.sampled_from(chip_names()), lengths, st.floats(1, 8))
def test_a_faster_chip_is_never_slower_at_attention(name, seq, factor):
    it = chip(name)
    faster = replace(it, peak_flops={d: rate * factor for d, rate in it.peak_flops.items()})
    before, after = (attention_s(c, "flash2", 1e12, seq, 128) for c in (it, faster))
    assert after <= before


def test_an_unknown_kind_is_named_with_those_there_are():
    with pytest.raises(HardwareError, match="flash9") as error:
        attention_s(H100, "flash9", 1, 1, 1)
    assert "flash1, flash2, flash3" in error.value.hint
