"""From the record of a kernel to its price."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.cost import kernel_s
from emu.cost.prices import attention_s, matmul_s, memory_s
from emu.hardware import HardwareError, chip
from emu.trace.events import Kernel

H100, A100 = chip("h100"), chip("a100")
LARGE = (1, 8192, 8192, 8192)
FORWARD, BACKWARD = (f"_scaled_dot_product_flash_attention_for_cpu{pass_}" for pass_ in ("", "_backward"))


def kernel(flops=0, size=0, dtype="bfloat16", dims=(), name="k", phase="forward"):
    return Kernel(name, "", phase, flops, size, dtype, dims, "default")


def product(batch, m, n, k, dtype="bfloat16"):
    width = {"float32": 4, "float64": 8}.get(dtype, 2)
    return kernel(2 * batch * m * n * k, width * batch * (m * k + k * n + m * n), dtype, (batch, m, n, k), "mm")


def test_a_kernel_that_does_nothing_costs_what_every_kernel_does():
    assert kernel_s(kernel(), H100) == H100.kernel_s > 0
    assert kernel_s(kernel(10, 10), H100) == pytest.approx(H100.kernel_s, rel=1e-4)


def test_a_copy_is_bound_by_memory():
    assert kernel_s(kernel(size=10**9), H100) == memory_s(H100, 1e9)
    assert memory_s(H100, 1e9) - H100.kernel_s == pytest.approx(1e9 / (H100.hbm_bytes_per_s * H100.hbm_fraction))


@pytest.mark.parametrize("name", ["h100", "a100", "k40", "p100", "tpu-v4", "mi300x", "gaudi2"])
@pytest.mark.parametrize("shape", [(1, 8192, 8192, 8192), (16, 512, 512, 64), (1, 7, 3, 5)])
def test_a_product_costs_what_the_price_list_says_for_its_shape(name, shape):
    batch, m, n, k = shape
    assert kernel_s(product(*shape), chip(name)) == pytest.approx(matmul_s(chip(name), "bfloat16", m, n, k, batch))


def test_a_kernel_of_several_ops_runs_at_the_rate_of_its_largest_product():
    """rank.kernel(...) records all flops, and the shape of one product."""
    one, twice = product(*LARGE), product(*LARGE)._replace(flops=4 * 8192**3)
    assert kernel_s(twice, H100) - H100.kernel_s == pytest.approx(2 * (kernel_s(one, H100) - H100.kernel_s))


def test_only_products_and_attention_use_tensor_cores():
    flops = 2 * 8192**3
    times = [
        kernel_s(k, H100)
        for k in (kernel(flops, dims=LARGE), kernel(flops, name="flash_attention"), kernel(flops, name="gelu"))
    ]
    assert times == sorted(times)
    assert times[2] - H100.kernel_s == pytest.approx(flops / 67e12)  # the float32 rate of the ordinary cores
    assert times[1] < times[2] / 3
    exact = kernel_s(
        kernel(flops, dtype="float64", name="gelu"), replace(A100, peak_flops={"float64": 9.7e12, "float32": 1})
    )
    assert exact - A100.kernel_s == pytest.approx(flops / 9.7e12)


def test_wider_dtypes_are_slower_in_products():
    times = [kernel_s(product(*LARGE, dtype=d), H100) for d in ("float8", "bfloat16", "tf32", "float32")]
    assert times == sorted(times) and len(set(times)) == 4
    assert kernel_s(product(*LARGE, dtype="float16"), H100) == kernel_s(product(*LARGE), H100)
    assert kernel_s(product(*LARGE, dtype="float64"), A100) > kernel_s(product(*LARGE), A100)


def test_a_dtype_without_a_rate_is_an_error():
    with pytest.raises(HardwareError):
        kernel_s(kernel(1, dims=(1, 1, 1, 1), dtype="complex64"), H100)


def attention_kernels(heads, seq, head_dim, causal):
    """The two kernels that a program records for torch's own attention, priced by nothing yet."""

    def program(rank):
        q, k, v = (torch.zeros(2, heads, seq, head_dim, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

    trace = emu.launch(program, emu.Mesh(dp=1), backend="virtual").trace
    return [e for e in trace.events[0] if isinstance(e, Kernel) and e.name in (FORWARD, BACKWARD)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "seq", "head_dim"), [(4, 512, 64), (2, 256, 128)])
def test_attention_as_a_program_records_it_is_priced_by_its_length_head_and_mask(heads, seq, head_dim, causal):
    forward, backward = attention_kernels(heads, seq, head_dim, causal)
    pairs = seq * (seq + 1) / 2 if causal else seq * seq
    for event, products, is_backward in ((forward, 2, False), (backward, 5, True)):
        flops = 2 * products * 2 * heads * pairs * head_dim
        for kind, it in (("flash2", event), ("flash3", event._replace(name="cudnn_" + event.name))):
            priced = attention_s(
                H100, kind, flops, seq, head_dim, backward=is_backward, dtype="float32", causal=causal, bytes_=it.bytes
            )
            assert kernel_s(it, H100) == pytest.approx(priced)


def test_attention_reaches_the_share_of_the_peak_that_its_chip_has_for_it():
    """Of long sequences, whose ends hardly weigh: FlashAttention-2's share."""
    seq = 2**20
    attention = kernel(4 * seq * seq * 128, dims=(1, seq, seq, 128), name=FORWARD)
    for it in (A100, H100):
        reached = attention.flops / kernel_s(attention, it) / it.peak("bfloat16")
        assert reached == pytest.approx(it.attention["flash2"], rel=1e-3)
    assert A100.attention["flash2"] > 1.5 * H100.attention["flash2"]


def test_attention_of_a_programs_own_kernel_counts_what_it_computes():
    own = kernel(10**12, name="my_attention", phase="backward", dims=(1, 4096, 4096, 128))
    torchs = own._replace(name=BACKWARD)
    work = [kernel_s(k, H100) - H100.kernel_s for k in (own, torchs)]
    assert work[1] == pytest.approx(1.25 * work[0])
    named = own._replace(name="my_attention_backward")
    assert kernel_s(named, H100) == kernel_s(own, H100)  # a name alone does not say that torch counted it
    forward = own._replace(phase="forward")
    assert kernel_s(forward, H100) < kernel_s(own, H100)  # a pass backward reaches less


def test_attention_without_a_shape_is_taken_to_be_long():
    it = kernel(10**12, name="flash_attention")
    long = it._replace(dims=(1, 8192, 8192, 128))
    assert kernel_s(it, H100) == pytest.approx(kernel_s(long, H100))


work = st.tuples(st.integers(0, 10**15), st.integers(0, 10**12))


@given(work, work, st.sampled_from([(), LARGE, (3, 100, 70, 9)]), st.sampled_from(["k", FORWARD, BACKWARD]))
def test_more_work_never_takes_less(some, more, dims, name):
    less = kernel(*some, dims=dims, name=name)
    most = kernel(some[0] + more[0], some[1] + more[1], dims=dims, name=name)
    if name == "k":
        assert kernel_s(less, H100) <= kernel_s(most, H100)
    assert kernel_s(less, H100) >= max(H100.kernel_s, less.bytes / H100.memory_bytes_per_s)


def test_much_more_work_takes_more():  # negative control: a constant would pass the property above
    assert kernel_s(kernel(10**14), H100) < kernel_s(kernel(10**15), H100)
    assert kernel_s(kernel(0, 10**9), H100) < kernel_s(kernel(0, 10**10), H100)


def test_a_slower_memory_or_a_longer_gap_slows_what_depends_on_it():
    slow = replace(H100, hbm_bytes_per_s=H100.hbm_bytes_per_s / 2, kernel_s=2 * H100.kernel_s)
    copy, large = kernel(size=10**9), product(*LARGE)
    assert kernel_s(copy, slow) == pytest.approx(2 * kernel_s(copy, H100))
    assert kernel_s(large, slow) < 1.1 * kernel_s(large, H100)  # the ends of its tiles alone
