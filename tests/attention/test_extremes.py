"""Blocks of attention at extremes: huge scores, -inf, rows that see nothing, no tokens at all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.attention.block import attend, backward, merged, nothing
from emu.parallel.attention.pieces import Piece, pieces
from emu.parallel.attention.tokens import Run, tokens

from .cuts import CUTS, Case, cut, full
from .merging import blockwise, error


def rows_of(scores, dtype=torch.float64):
    """q, k, v with head_dim 1 whose scores are given: every query scores key j as scores[j]."""
    k = torch.tensor(scores, dtype=dtype).reshape(1, 1, -1, 1)
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(1, 1, len(scores), 1, generator=draw, dtype=torch.float64).to(dtype)
    return torch.ones_like(k), k, v


SCORES = st.sampled_from((1000.0, -1000.0, 999.0, 0.0, -0.5, 3.0, 1e6, -1e6))


@given(st.lists(SCORES, min_size=1, max_size=12), st.integers(1, 6), st.sampled_from(CUTS))
def test_scores_of_a_thousand_are_as_right_as_others(scores, ranks, kind):
    q, k, v = rows_of(scores)
    holders = cut(kind, len(scores), ranks)
    grad = torch.arange(1.0, len(scores) + 1).double().reshape(q.shape)
    agree(blockwise(holders, q, k, v, grad), full(q, k, v, grad), k)


def agree(ours, theirs, k):
    """A score of s is known to eps * s, and so are its weight and the log-sum-exp; dq sums weights times keys."""
    largest = max([1.0, *k[k.isfinite()].abs().tolist()])
    for a, b, size in zip(ours, theirs, (1.0, largest, 1.0, 1.0)):
        assert bool(a.isfinite().all())
        assert error(a / size, b / size) < 20 * largest * torch.finfo(k.dtype).eps


INFINITE = st.lists(st.sampled_from((-math.inf, -math.inf, 0.0, 1.0, 1000.0, -1000.0)), min_size=1, max_size=10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(scores=INFINITE, ranks=st.integers(1, 5), kind=st.sampled_from(CUTS))
def test_scores_of_minus_infinity_hide_a_key_and_leave_gradients_finite(dtype, scores, ranks, kind):
    q, k, v = rows_of(scores, dtype)
    hidden = k.flatten() == -math.inf
    grad = torch.ones_like(q)
    ours = blockwise(cut(kind, len(scores), ranks), q, k, v, grad)
    # The same with a mask in place of infinities; a query that sees nothing gives 0 and gets no gradient.
    visible = torch.ones(len(scores), len(scores), dtype=torch.bool).tril() & ~hidden
    inputs = [x.double().masked_fill(x == -math.inf, 0.0).requires_grad_() for x in (q, k, v)]
    weights = (inputs[0] @ inputs[1].mT).masked_fill(~visible, -1e30).softmax(-1) * visible
    out = weights @ inputs[2]
    theirs = (out.detach(), *torch.autograd.grad(out, inputs, grad.double()))
    agree(ours, theirs, k)


@pytest.mark.parametrize("place", [3, 1090])
def test_an_infinite_key_or_query_far_inside_leaves_gradients_finite(place):
    """The kernel multiplies an infinity by a gradient of zero only in the blocks that meet it."""
    whole = tokens([Run(0, 1100)])
    for infinite in range(2):
        parts = [torch.ones(1, 1, 1100, 1, dtype=torch.float64) for _ in range(4)]
        parts[infinite][:, :, place] = -math.inf
        q, k, v, grad = parts
        row = attend(q, k, v, pieces(whole, whole))
        grads = backward(grad, q, k, v, row.out, row.lse, pieces(whole, whole))
        dead = [place] if infinite == 0 else []
        assert row.out.flatten().eq(0).nonzero().flatten().tolist() == dead
        assert all(bool(x.isfinite().all()) for x in grads)
        assert grads[infinite].flatten()[place] == 0


def test_products_that_overflow_to_minus_infinity():
    q, k = torch.full((1, 1, 4, 2), 1e30), torch.full((1, 1, 4, 2), -1e30)
    k[:, :, 1] = 0.0
    v = torch.arange(8.0).reshape(1, 1, 4, 2)
    whole = tokens([Run(0, 4)])
    row = attend(q, k, v, pieces(whole, whole))
    assert row.lse[0, 0].tolist() == [-math.inf, 0.0, 0.0, 0.0]
    assert row.out[0, 0].tolist() == [[0.0, 0.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0]]
    grads = backward(torch.ones_like(q), q, k, v, row.out, row.lse, pieces(whole, whole))
    assert all(bool(x.isfinite().all()) for x in grads)
    assert grads[2][0, 0].tolist() == [[0.0, 0.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


def test_a_weight_of_zero_is_told_from_a_score_of_zero():
    """The kernel says 0 for the log-sum-exp of both; a value of 0 under a score of 0 still takes its share."""
    q, k, v = (torch.zeros(1, 1, 2, 1, dtype=torch.float64) for _ in range(3))
    v[0, 0, 1] = 1.0
    first, second = (Piece(slice(1, 2), slice(i, i + 1), False, None, 1) for i in range(2))
    row = merged(attend(q, k, v, [first]), attend(q, k, v, [second]))
    assert row.out[0, 0, 1, 0] == 0.5
    assert row.lse[0, 0].tolist() == [-math.inf, math.log(2)]


def test_blocks_in_which_nothing_is_seen_change_nothing():
    q, k, v, grad = Case("contiguous", 6, 1, 2, None, 2, 1, 4, 0).tensors()
    whole = tokens([Run(0, 6)])
    row = attend(q, k, v, pieces(whole, whole))
    hidden = [Piece(slice(0, 6), slice(0, 6), False, torch.zeros(1, 6, 6, dtype=torch.bool), 0)]
    for empty in (attend(q, k, v, hidden), attend(q, k, v, []), nothing(q)):
        assert bool((empty.lse == -math.inf).all()) and not empty.out.any()
        for both in (merged(empty, row), merged(row, empty)):
            assert torch.equal(both.out, row.out) and torch.equal(both.lse, row.lse)
        assert not merged(empty, empty).out.any()
        assert not any(x.any() for x in backward(grad, q, k, v, empty.out, empty.lse, hidden))
    assert not any(x.any() for x in backward(grad, q, k, v, row.out, row.lse, []))


@pytest.mark.parametrize(
    "sizes", [(0, 2, 1, 3, 3, 4), (1, 0, 0, 3, 3, 4), (1, 2, 1, 0, 3, 4), (1, 2, 1, 3, 0, 4), (1, 2, 1, 3, 3, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(sizes, causal):
    batch, heads, kv_heads, queries, keys, head_dim = sizes
    q, k = torch.randn(batch, heads, queries, head_dim), torch.randn(batch, kv_heads, keys, head_dim)
    for found in ([], [Piece(slice(0, queries), slice(0, keys), causal, None, queries * keys)]):
        row = attend(q, k, k, found)
        assert row.out.shape == q.shape and row.lse.shape == q.shape[:3]
        assert [x.shape for x in backward(q, q, k, k, row.out, row.lse, found)] == [q.shape, k.shape, k.shape]
    assert head_dim or causal or bool((row.lse == math.log(3)).all())
