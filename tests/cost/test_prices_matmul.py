"""What a matrix product costs: tiles, waves, short k, bytes; and what must hold of any chip and shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emu.cost.prices import matmul_flops_per_s, matmul_s, memory_s
from emu.cost.prices.tiles import padded_share, tiled_share
from emu.hardware import HardwareError, chip, chip_names

A100, H100, TPU = chip("a100"), chip("h100"), chip("tpu-v5p")
EVERY = [chip(name) for name in chip_names()]

sizes = st.one_of(st.integers(1, 300), st.integers(1, 40_000))
shapes = st.tuples(sizes, sizes, sizes, st.integers(1, 64))  # m, n, k, batch
chips = st.sampled_from(EVERY)
dtypes = st.sampled_from(("bfloat16", "float16", "float8", "float32", "tf32"))
ROUNDING = 1 + 1e-12


def bytes_of(dtype, m, n, k, batch):
    operand, result = {"float32": (4, 4), "tf32": (4, 4), "float8": (1, 2)}.get(dtype, (2, 2))
    return batch * (operand * (m * k + k * n) + result * m * n)


@given(chips, dtypes, shapes)
def test_no_product_is_faster_than_peak_or_than_its_bytes(it, dtype, shape):
    m, n, k, batch = shape
    rate = matmul_flops_per_s(it, dtype, *shape)
    assert 0 < rate <= it.flops_per_s(dtype) * ROUNDING <= it.peak(dtype) * ROUNDING**2
    seconds = matmul_s(it, dtype, *shape) - it.kernel_s
    least = max(2 * batch * m * n * k / it.peak(dtype), bytes_of(dtype, *shape) / it.memory_bytes_per_s)
    assert seconds >= least * (1 - 1e-6) - 1e-15  # the price is a sum that kernel_s was taken from again


@given(chips, dtypes, shapes, st.integers(0, 3), st.integers(1, 5_000))
@example(A100, "bfloat16", (8192, 2304, 1023, 1), 2, 1)  # where a split along k becomes worthwhile
def test_a_larger_product_never_takes_less(it, dtype, shape, dim, more):
    """In every dimension, and not only up to steps: each way of cutting takes no less, so neither does the best one."""
    larger = [size + more * (i == dim) for i, size in enumerate(shape)]
    assert matmul_s(it, dtype, *shape) <= matmul_s(it, dtype, *larger) * ROUNDING


@given(chips, dtypes, shapes, st.floats(1, 8), st.floats(1, 8))
def test_a_chip_with_higher_rates_is_never_slower(it, dtype, shape, compute, memory):
    faster = replace(
        it,
        peak_flops={d: rate * compute for d, rate in it.peak_flops.items()},
        hbm_bytes_per_s=it.hbm_bytes_per_s * memory,
    )
    assert matmul_s(faster, dtype, *shape) <= matmul_s(it, dtype, *shape) * ROUNDING
    twice = replace(
        it,
        peak_flops={d: rate * 2 for d, rate in it.peak_flops.items()},
        hbm_bytes_per_s=it.hbm_bytes_per_s * 2,
        kernel_s=it.kernel_s / 2,
    )
    assert matmul_s(twice, dtype, *shape) == pytest.approx(matmul_s(it, dtype, *shape) / 2)


@given(chips, dtypes, shapes)
def test_a_product_and_its_transpose_cost_the_same_where_cores_take_tiles(it, dtype, shape):
    m, n, k, batch = shape
    if not it.array_side:
        assert matmul_s(it, dtype, m, n, k, batch) == pytest.approx(matmul_s(it, dtype, n, m, k, batch))


def test_one_tile_more_than_there_are_cores_takes_another_wave():
    """Tiles of 256 x 128 on 108 cores, k too short to be worth splitting.

    Another whole wave would double the time; with tiles of half the size, which a library then takes, it is half a wave
    more, at their lower rate: 1.5 / 0.93 = 1.6.
    """
    cores = A100.sm_count
    assert cores is not None

    def compute_s(tiles):
        return 2.0 * 256 * 128 * tiles * 256 / matmul_flops_per_s(A100, "bfloat16", 256 * tiles, 128, 256)

    for waves in (1, 2, 3):
        full, over = compute_s(waves * cores), compute_s(waves * cores + 1)
        assert full == pytest.approx(waves * compute_s(cores))
        assert full * (1 + 0.5 / waves) < over < full * (1 + 1 / waves) * ROUNDING
        assert over == pytest.approx(compute_s(waves * cores + 20))  # ... and then more tiles cost nothing for a while
    assert compute_s(cores + 1) == pytest.approx(1.5 / 0.93 * compute_s(cores))


def test_the_saw_tooth_has_a_tooth_for_every_wave_and_gets_flatter():
    cores = H100.sm_count
    assert cores is not None
    shares = [tiled_share(1, 256 * tiles, 128, 256, cores, 200.0) for tiles in range(1, 5 * cores + 1)]
    whole = 256 / (256 + 200)
    teeth = [i + 1 for i in range(len(shares) - 1) if shares[i] > shares[i + 1] * 1.05]
    assert {cores * waves for waves in (1, 2, 3, 4)} <= set(teeth)
    assert all(shares[waves * cores - 1] == pytest.approx(whole) for waves in (1, 2, 3, 4, 5))
    troughs = [shares[waves * cores] for waves in (1, 2, 3, 4)]
    assert troughs == sorted(troughs) and troughs[0] < 0.65 * whole


def test_a_partial_tile_costs_a_whole_one():
    whole, over = (matmul_flops_per_s(H100, "bfloat16", 132 * 256, n, 1024) for n in (128, 136))
    assert over < 0.8 * whole
    narrow = matmul_flops_per_s(H100, "bfloat16", 132 * 256, 1, 4096)
    assert matmul_flops_per_s(H100, "bfloat16", 132 * 256, 64, 4096) == pytest.approx(64 * narrow)


def test_a_product_with_little_output_and_a_long_k_is_split_along_it():
    """Weight gradients of small layers: 16 tiles of 108 cores' worth would leave most cores idle."""
    unsplit = 16 / 108
    share = tiled_share(1, 1024, 512, 65536, 108, 150.0)
    assert 4 * unsplit < share < 8 * unsplit
    # ... but not a short one, whose parts would be ends more than products.
    assert tiled_share(1, 1024, 512, 64, 108, 150.0) < 0.45 * unsplit * 4


def test_a_part_of_a_split_product_pays_for_its_ends_twice():
    """One tile in 8 parts on 8 cores: an eighth of k each, and partial sums written in float32 and read again."""
    k, ends_k = 65536, 500.0
    assert tiled_share(1, 256, 128, k, 8, ends_k) == pytest.approx(k / 8 / (k / 8 + 2 * ends_k))


def test_short_k_is_slow_because_tiles_must_be_written():
    """While a wave of results is written, cores could have computed so many multiply-adds along k."""
    ends_k = H100.matmul_ends * 2 / H100.memory_bytes_per_s * H100.flops_per_s("bfloat16") / 2
    full_waves = (256 * 11 * 8, 128 * 12 * 8)
    for k in (64, 256, 1024, 16384):
        reached = matmul_flops_per_s(H100, "bfloat16", *full_waves, k) / H100.flops_per_s("bfloat16")
        assert reached == pytest.approx(k / (k + ends_k), rel=1e-3)
    ends_in_float32 = 2 * ends_k * H100.flops_per_s("float32") / H100.flops_per_s("bfloat16")  # results twice as wide
    reached = matmul_flops_per_s(H100, "float32", *full_waves, 64) / H100.flops_per_s("float32")
    assert reached == pytest.approx(64 / (64 + ends_in_float32), rel=1e-3)
    slow = [
        matmul_flops_per_s(H100, d, *full_waves, 1024) / H100.flops_per_s(d) for d in ("float32", "bfloat16", "float8")
    ]
    assert slow == sorted(slow, reverse=True)  # the faster the dtype, the more the ends weigh


def test_many_members_of_a_batch_fill_the_cores_together():
    one = matmul_flops_per_s(A100, "bfloat16", 128, 128, 128)
    assert matmul_flops_per_s(A100, "bfloat16", 128, 128, 128, 500) > 20 * one


def test_a_systolic_array_pads_to_its_side():
    rate = TPU.flops_per_s("bfloat16")
    assert matmul_flops_per_s(TPU, "bfloat16", 4096, 4096, 4096) == rate
    assert matmul_flops_per_s(TPU, "bfloat16", 4096, 64, 4096) == rate / 2
    assert matmul_flops_per_s(TPU, "bfloat16", 4096, 129, 4096) == pytest.approx(rate * 129 / 256)
    assert matmul_flops_per_s(TPU, "bfloat16", 4096, 4096, 64) == rate / 2
    assert padded_share(8, 128, 128, 128) == 1 and padded_share(9, 128, 128, 128) == 9 / 16


def test_a_chip_nothing_is_known_of_loses_nothing_to_shape():
    gaudi = chip("gaudi2")
    assert matmul_flops_per_s(gaudi, "bfloat16", 1, 1, 1) == gaudi.flops_per_s("bfloat16")


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_has_a_price_for_every_dtype_that_it_runs(name):
    for dtype in ("float64", "float32", "tf32", "float16", "bfloat16", "float8"):
        if dtype == "float64" and dtype not in chip(name).peak_flops:
            with pytest.raises(HardwareError):
                matmul_s(chip(name), dtype, 64, 64, 64)
        else:
            assert 0 < matmul_s(chip(name), dtype, 4096, 4096, 4096) < 10


def test_nothing_costs_nothing_and_everything_else_costs_a_kernel():
    assert matmul_s(H100, "bfloat16", 0, 5, 5) == matmul_s(H100, "bfloat16", 5, 5, 5, 0) == 0
    assert matmul_s(H100, "bfloat16", 1, 1, 1) > H100.kernel_s
    assert memory_s(H100, 0, kernels=3) == 3 * H100.kernel_s
    assert memory_s(H100, 2e9, 2) == pytest.approx(2 * memory_s(H100, 1e9, 1))


def test_under_a_power_limit_products_slow_down_but_not_memory():
    held = replace(H100, power_limit_w=500)
    assert held.flops_per_s("bfloat16") == pytest.approx(H100.flops_per_s("bfloat16") * (5 / 7) ** H100.power_exponent)
    assert held.memory_bytes_per_s == H100.memory_bytes_per_s
    assert replace(H100, power_limit_w=900).flops_per_s("bfloat16") == H100.flops_per_s("bfloat16")
