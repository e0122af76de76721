"""The fused kernel and the spelled out way agree, and what was found of the kernel is still so."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.attention import fast, spelled

from .merging import FLOAT64, error


@st.composite
def rectangles(draw):
    """One rectangle: whole, causal (also tall) or masked, some of whose queries may see nothing."""
    queries, keys = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    kind = draw(st.sampled_from(("whole", "causal", "mask")))
    rows, kv_heads, group, head_dim = (draw(st.integers(1, n)) for n in (3, 2, 3, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    q = torch.randn(rows, queries, kv_heads * group, head_dim, generator=generator, dtype=torch.float64).transpose(1, 2)
    k, v = torch.randn(2, rows, kv_heads, keys, head_dim, generator=generator, dtype=torch.float64)
    mask = None
    if kind == "mask":
        mask = torch.rand(draw(st.sampled_from((1, rows))), queries, keys, generator=generator) < draw(st.floats(0, 1))
    return q, k, v, kind == "causal", mask, draw(st.floats(0.1, 2)), torch.randn(q.shape, generator=generator).double()


@given(rectangles())
def test_the_kernel_and_the_spelled_out_way_agree(rectangle):
    q, k, v, causal, mask, scale, grad = rectangle
    ours, plain = (way.forward(q, k, v, causal, mask, scale) for way in (fast, spelled))
    for a, b in zip(ours, plain):
        assert torch.equal(a.isinf(), b.isinf())
        assert error(a.nan_to_num(), b.nan_to_num()) < FLOAT64
    lse = plain[1].masked_fill(plain[1] == -math.inf, math.inf)
    backs = [way.backward(grad, q, k, v, plain[0], lse, causal, mask, scale) for way in (fast, spelled)]
    for a, b in zip(*backs):
        assert error(a, b) < FLOAT64


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, 1e-300])
@pytest.mark.parametrize("causal", [True, False])
def test_scales_at_which_the_kernel_breaks_are_spelled_out(scale, causal):
    """1e-300 is 0 in float32. Negative control: the kernel gives nan."""
    q, k, v, grad = torch.randn(4, 1, 2, 6, 4)
    right = spelled.forward(q, k, v, causal, None, scale)
    back = spelled.backward(grad, q, k, v, *right, causal, None, scale)
    assert all(x.isfinite().all() for x in (*right, *back))
    assert all(torch.equal(a, b) for a, b in zip(fast.forward(q, k, v, causal, None, scale), right))
    ours = fast.backward(grad, q, k, v, *right, causal, None, scale)
    assert all(torch.equal(a, b) for a, b in zip(ours, back))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert kernel(q, k, v, 0.0, causal, scale=scale)[0].isnan().any() == causal


@given(rectangles())
def test_the_spelled_out_way_is_what_autograd_gives(rectangle):
    q, k, v, causal, mask, scale, grad = rectangle
    if mask is not None:
        mask[..., 0] = True  # torch's softmax of nothing is nan
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
    seen = seen.tril() if causal else seen
    out = F.scaled_dot_product_attention(*inputs, attn_mask=seen[:, None], scale=scale, enable_gqa=True)
    theirs = torch.autograd.grad(out, inputs, grad)
    ours = spelled.forward(q, k, v, causal, mask, scale)
    assert error(ours[0], out.detach()) < FLOAT64
    for a, b in zip(spelled.backward(grad, q, k, v, *ours, causal, mask, scale), theirs):
        assert error(a, b) < FLOAT64


def test_the_kernel_is_as_was_found():
    """Where one of these fails, torch has changed: read emu/parallel/attention/fast.py again."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    out, lse = kernel(q, k, k, 0.0, True)
    assert torch.allclose(out[0, 0, 0], k[0, 0, 0])  # aligned at the top left
    mask = torch.zeros(1, 1, 3, 5).index_fill(2, torch.tensor(1), -math.inf)
    out, lse = kernel(q, k, k, 0.0, False, attn_mask=mask)
    assert not out[0, 0, 1].any() and lse[0, 0, 1] == 0.0  # not -inf
    grads = back(q, q, k, k, out, lse.index_fill(2, torch.tensor(1), -math.inf), 0.0, False, attn_mask=mask)
    assert grads[0].isnan().any()
    with pytest.raises(RuntimeError, match="same data type"):
        kernel(q, k, k, 0.0, False, attn_mask=mask == 0)
    out, lse = kernel(q.bfloat16(), k.bfloat16(), k.bfloat16())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
