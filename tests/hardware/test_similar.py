"""A toy on a similar chip behaves as the real model does on the real chip."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost.prices import attention_flops_per_s, matmul_s
from emu.hardware import HardwareError, Workload, chip_names, cluster
from emu.hardware.similar import scale_between

REAL = Workload(n_params=8.03e9, width=4096, tokens=8192)
TOY = Workload(n_params=1e6, width=128, tokens=512)

sizes = st.builds(
    Workload,
    n_params=st.integers(10**5, 10**12),
    width=st.integers(16, 2**15),
    tokens=st.integers(16, 2**17),
)
names = st.sampled_from(chip_names())

# A handful of multiplications and divisions of float64: some 1e-16 each.
ROUNDING = 1e-12


class Step:
    """One matrix product [tokens, width] x [width, width] in bfloat16 on a cluster, priced here by the roofline alone."""

    def __init__(self, work, cluster):
        chip, link = cluster.chip, cluster.node.scale_up
        flops = 2 * work.tokens * work.width**2
        hbm_bytes = 2 * (2 * work.tokens * work.width + work.width**2)
        self.compute_s = flops / chip.flops_per_s("bfloat16")
        self.memory_s = hbm_bytes / chip.memory_bytes_per_s
        self.kernel_s = max(self.compute_s, self.memory_s, chip.kernel_s)
        self.gradients_s = 2 * work.width**2 / link.bytes_per_s
        self.activations_s = 2 * work.tokens * work.width / link.bytes_per_s
        self.elementwise_s = 2 * work.tokens * work.width / chip.memory_bytes_per_s
        self.launch_to_kernel = cluster.host.launch_s / self.kernel_s
        self.latency_to_kernel = link.latency_s / self.kernel_s
        self.memory_share = 16 * work.n_params / chip.hbm_bytes


@given(names, sizes, sizes)
def test_ratios_of_the_real_run_hold_on_the_similar_cluster(name, toy, real):
    there = cluster(name)
    a, b = Step(real, there), Step(toy, there.similar(toy, to=real))
    assert (b.compute_s > b.memory_s) == (a.compute_s > a.memory_s) or a.compute_s == pytest.approx(a.memory_s)
    for ratio in ("compute_s", "memory_s", "kernel_s", "gradients_s", "launch_to_kernel", "latency_to_kernel"):
        assert getattr(b, ratio) == pytest.approx(getattr(a, ratio), rel=ROUNDING), ratio
    # The capacity is a whole number of bytes.
    capacity = there.similar(toy, to=real).chip.hbm_bytes
    assert b.memory_share == pytest.approx(a.memory_share, rel=ROUNDING + 1 / capacity)


@given(names, sizes, sizes)
def test_activations_keep_their_ratio_if_asked(name, toy, real):
    there = cluster(name)
    a, b = Step(real, there), Step(toy, there.similar(toy, to=real, communication="activations"))
    assert b.activations_s == pytest.approx(a.activations_s, rel=ROUNDING)


@given(names, st.integers(1, 64), sizes)
def test_all_keep_their_ratio_if_tokens_shrink_as_the_width_does(name, shrink, real):
    real = replace(real, width=real.width * shrink, tokens=real.tokens * shrink)
    toy = Workload(real.n_params / shrink**2, real.width // shrink, real.tokens // shrink)
    there = cluster(name)
    a, b = Step(real, there), Step(toy, there.similar(toy, to=real))
    for ratio in ("gradients_s", "activations_s", "elementwise_s"):
        assert getattr(b, ratio) == pytest.approx(getattr(a, ratio), rel=ROUNDING), ratio
    assert scale_between(toy, real).elementwise == pytest.approx(1, rel=ROUNDING)


def test_elementwise_kernels_are_off_by_what_the_scale_says():
    there = cluster("h100")
    a, b = Step(REAL, there), Step(TOY, there.similar(TOY, to=REAL))
    off = scale_between(TOY, REAL).elementwise
    assert off != pytest.approx(1, rel=0.05)
    assert b.elementwise_s / a.elementwise_s == pytest.approx(off, rel=ROUNDING)


def test_on_the_real_cluster_no_ratio_of_the_toy_is_the_real_ones():
    # The negative control: without similar the toy is all launch and latency, and fills nothing.
    there = cluster("h100")
    a, b = Step(REAL, there), Step(TOY, there)
    assert b.launch_to_kernel > 10 * a.launch_to_kernel
    assert b.memory_share < a.memory_share / 1000
    assert b.gradients_s / b.kernel_s != pytest.approx(a.gradients_s / a.kernel_s, rel=0.1)
    assert (b.compute_s > b.memory_s) != (a.compute_s > a.memory_s)


@pytest.mark.parametrize("rate", ["hbm_bytes", "hbm_bytes_per_s", "flops"])
def test_a_chip_scaled_by_one_number_less_is_not_similar(rate):
    # A mutant for each factor: the ratios see every one of them.
    there = cluster("h100")
    similar = there.similar(TOY, to=REAL)
    real = there.chip
    undone = {
        "hbm_bytes": {"hbm_bytes": real.hbm_bytes},
        "hbm_bytes_per_s": {"hbm_bytes_per_s": real.hbm_bytes_per_s},
        "flops": {"peak_flops": real.peak_flops, "achievable_flops": real.achievable_flops},
    }[rate]
    a, b = Step(REAL, there), Step(TOY, replace(similar, chip=replace(similar.chip, **undone)))
    same = [getattr(a, r) == pytest.approx(getattr(b, r), rel=1e-3) for r in ("compute_s", "memory_s", "memory_share")]
    assert not all(same)


def test_a_chip_alone_scales_as_in_its_cluster_and_is_itself_beside_its_equal():
    there = cluster("h100")
    assert there.chip.similar(TOY, to=REAL) == there.similar(TOY, to=REAL).chip
    same = there.chip.similar(REAL, to=REAL)
    assert replace(same, name=there.chip.name, sources=there.chip.sources) == there.chip


def test_a_toys_product_is_cut_into_no_tiles_and_lasts_nearly_as_long_as_the_real_one():
    there = cluster("h100").chip
    small = there.similar(TOY, to=REAL)
    real_s, toy_s = (matmul_s(it, "bfloat16", w.tokens, w.width, w.width) for it, w in ((there, REAL), (small, TOY)))
    assert 0.7 * real_s < toy_s < real_s
    # With the real chip's tiles, or what their ends cost, it would last many times as long.
    for kept in ({"tiled": True}, {"tiled": True, "matmul_ends": there.matmul_ends}):
        assert matmul_s(replace(small, **kept), "bfloat16", TOY.tokens, TOY.width, TOY.width) > 1.5 * real_s
    assert small.matmul_ends == 0
    reached = {attention_flops_per_s(small, "flash2", seq, 128) for seq in (8, 65536)}
    assert len(reached) == 1  # a toy's sequence is short beside any block


def test_times_cores_and_host_are_left_alone_and_caps_scale_with_bandwidth():
    there = cluster("h100", nodes=2)
    small = there.similar(TOY, to=REAL)
    assert small.host == there.host
    assert (small.chip.kernel_s, small.chip.sm_count) == (there.chip.kernel_s, there.chip.sm_count)
    k = (TOY.width / REAL.width) ** 2
    for before, after in ((there.node.scale_up, small.node.scale_up), (there.scale_out, small.scale_out)):
        assert (after.latency_s, after.base_s) == (before.latency_s, before.base_s)
        assert after.bandwidth_bytes_per_s == pytest.approx(before.bandwidth_bytes_per_s * k, rel=ROUNDING)
        assert after.protocols[0].cap_bytes_per_s == pytest.approx(
            before.protocols[0].cap_bytes_per_s * k, rel=ROUNDING
        )


def test_the_vector_unit_scales_as_the_matrix_unit_does():
    there = cluster("h100").chip
    small = there.similar(TOY, to=REAL)
    k = small.peak("bfloat16") / there.peak("bfloat16")
    assert small.vector_flops == {d: pytest.approx(rate * k, rel=ROUNDING) for d, rate in there.vector_flops.items()}
    assert set(small.flops_by_unit()["matrix"]) == set(there.flops_by_unit()["matrix"])


def test_the_host_link_scales_with_activations_whatever_the_links_between_devices_carry():
    there = cluster("h100")
    k = TOY.tokens * TOY.width / (REAL.tokens * REAL.width)
    for communication in ("gradients", "activations"):
        small = there.similar(TOY, to=REAL, communication=communication).node.host_link
        assert small is not None and there.node.host_link is not None
        assert small.bytes_per_s == pytest.approx(there.node.host_link.bytes_per_s * k, rel=ROUNDING)
        assert small.latency_s == there.node.host_link.latency_s
    assert cluster("tpu-v5p-64").similar(TOY, to=REAL).node.host_link is None


def test_scaled_numbers_say_that_they_are_scaled():
    c = cluster("h100").similar(TOY, to=REAL)
    assert "for a similar chip" in c.sources["chip.peak_flops.bfloat16"]
    assert "for a similar chip" in c.sources["node.scale_up.bandwidth_bytes_per_s"]
    assert "for a similar chip" not in c.sources["chip.kernel_s"] + c.sources["node.scale_up.latency_s"]


def test_anything_with_the_three_attributes_is_a_model():
    real = SimpleNamespace(n_params=8.03e9, width=4096, tokens=8192, layers=32)
    assert cluster("h100").similar(TOY, to=real) == cluster("h100").similar(TOY, to=REAL)


@pytest.mark.parametrize("value", [None, 0, -1, float("nan"), float("inf"), "4096", True])
def test_a_model_that_lacks_a_number_is_refused(value):
    model = SimpleNamespace(n_params=1e6, width=value, tokens=512)
    with pytest.raises(HardwareError, match=r"needs model\.width.*Workload\(n_params="):
        cluster("h100").chip.similar(model, to=REAL)


def test_a_chip_without_a_byte_and_an_unknown_traffic_are_refused():
    with pytest.raises(HardwareError, match="less than one byte"):
        cluster("h100").chip.similar(Workload(1, 1, 1), to=Workload(1e12, 1, 1))
    with pytest.raises(HardwareError, match="gradients"):
        cluster("h100").similar(TOY, to=REAL, communication="tensor")
