"""Attention across ranks is attention: any kind, any length, any heads, documents; extremes; few bits; shapes only."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import emu
from emu.parallel.attention import block
from emu.parallel.context import KINDS, attention, make_cut
from emu.spmd import EmuError, PlanError
from emu.trace.compare import first_difference

from .cases import FLOAT64, Case, across, cases, error, errors, full, run


@settings(max_examples=60)
@given(cases())
def test_any_cut_is_full_attention(case):
    assert max(errors(across(case), full(case))) <= FLOAT64


@pytest.mark.exhaustive
@settings(max_examples=3000, derandomize=False)
@given(cases(longest=130))
def test_any_cut_is_full_attention_exhaustively(case):
    assert max(errors(across(case), full(case))) <= FLOAT64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [3, 8, 9, 11])
def test_fewer_than_two_tokens_a_rank(kind, length):
    case = Case(kind, 6, length, kv_heads=3)
    assert max(errors(across(case), full(case))) <= FLOAT64


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_in_which_ranks_run_changes_no_bit(kind):
    case = Case(kind, 4, 21, documents=(5, 9))
    right = across(case)
    for order in (1, 2, "time"):
        assert all(torch.equal(a, b) for a, b in zip(across(case, order=order), right))


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_rows_of_zero_width(kind):
    """A scale is passed on; no rows at all are no rows."""
    case = Case(kind, 4, 13)
    tensors = case.tensors()

    def scaled(rank, batch):
        group, cut = rank.group("cp"), case.cut()
        q, k, v, _ = (cut.own(x[:batch], group.rank, 2) for x in tensors)
        return attention(q, k, v, cut, group, rank, scale=0.1)

    results = emu.launch(scaled, emu.Mesh(cp=4), args=(1,)).results
    q, k, v, _ = tensors
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1, enable_gqa=True)
    assert error(case.cut().joined([results[i] for i in range(4)], 2), right) <= FLOAT64
    empty = emu.launch(scaled, emu.Mesh(cp=4), args=(0,)).results
    assert [tuple(empty[i].shape) for i in range(4)] == [(0, 4, n, 4) for n in case.cut().sizes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, -3.0])
@pytest.mark.parametrize("documents", [None, (5, 20)])
def test_scales_that_are_not_above_zero(kind, documents, scale):
    """Hidden keys stay hidden, though -inf times such a scale is nan or inf; gradients are right too."""
    case = Case(kind, 4, 13, documents=documents)
    *inputs, grad = case.tensors()
    cut = case.cut()

    def scaled(rank):
        group = rank.group("cp")
        own = [cut.own(x, group.rank, 2).clone().requires_grad_() for x in inputs]
        out = attention(*own, cut, group, rank, scale)
        out.backward(cut.own(grad, group.rank, 2))
        return [out.detach(), *(x.grad for x in own)]

    results = emu.launch(scaled, emu.Mesh(cp=4)).results
    found = [cut.joined([results[i][j] for i in range(4)], 2) for j in range(4)]
    # The same scores by a scale above zero.
    scaled_q = (inputs[0] * scale).requires_grad_()
    leaves = [scaled_q, *(x.clone().requires_grad_() for x in inputs[1:])]
    numbers = torch.zeros(1, 13) if documents is None else case.numbers()
    seen = torch.ones(13, 13, dtype=torch.bool).tril() & (numbers[:, None, :, None] == numbers[:, None, None, :])
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=seen, scale=1.0, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    assert all(torch.allclose(a, b, 0, FLOAT64) for a, b in zip(found, [out.detach(), dq * scale, dk, dv]))


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    with pytest.raises(EmuError, match=f"scale {scale} of scores"):
        _attends(scale=scale)


# Wrong variants, each seen.


def _wrong(monkeypatch, what):
    merge, back = block.merge_into, block.backward
    if what == "the last block wins":
        monkeypatch.setattr(block, "merge_into", lambda a, b: (a.out.copy_(b.out), a.lse.copy_(b.lse)))
    elif what == "partial results are added":
        monkeypatch.setattr(
            block, "merge_into", lambda a, b: (merge(block.Partial(a.out.clone(), a.lse), b), a.out.add_(b.out))
        )
    elif what == "a block's own statistics go back":
        monkeypatch.setattr(
            block,
            "backward",
            lambda grad, q, k, v, out, lse, pieces, scale: back(
                grad, q, k, v, *block.attend(q, k, v, pieces, scale), pieces, scale
            ),
        )
    elif what == "no row sum":
        monkeypatch.setattr(
            block, "backward", lambda grad, q, k, v, out, *rest: back(grad, q, k, v, torch.zeros_like(out), *rest)
        )


@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped", "usp"])
@pytest.mark.parametrize(
    "what",
    ["the last block wins", "partial results are added", "a block's own statistics go back", "no row sum"],
)
def test_a_wrong_merge_is_seen(monkeypatch, kind, what):
    case = Case(kind, 4, 24)
    right = full(case)
    _wrong(monkeypatch, what)
    assert max(errors(across(case), right)) > 1e-2


# Extremes.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1000.0, -1000.0])
def test_scores_of_a_thousand_are_right_and_finite(kind, size):
    """One key outweighs all others by far: its value is the output, whichever rank it lies on."""
    case = Case(kind, 4, 19, documents=(7, 12))
    q, k, v, grad = case.tensors()
    tensors = [q.sign() * abs(size) ** 0.5 * 4, k.sign() * math.copysign(abs(size) ** 0.5, size), v, grad]
    found, right = across(case, tensors), full(case, tensors)
    assert all(x.isfinite().all() for x in found)
    assert max(errors(found, right)) <= FLOAT64


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_infinitely_far_do_not_count(kind):
    """Scores of -inf: of one key, on whichever rank; gradients there are zero and finite everywhere."""
    case = Case(kind, 4, 16, kv_heads=2, group=2, head_dim=3)
    q, k, v, grad = case.tensors()
    q = q.abs() + 0.1
    for hidden in (0, 5, 15):
        far = k.clone()
        far[:, :, hidden, 0] = -math.inf
        found = across(case, [q, far, v, grad])
        assert found.dk[:, :, hidden].eq(0).all() and found.dv[:, :, hidden].eq(0).all()
        seen = torch.ones(16, 16, dtype=torch.bool).tril()
        seen[:, hidden] = False  # the first query may see nothing then: 0
        scores = (q @ k.repeat_interleave(2, 1).mT / 3**0.5).masked_fill(~seen, -math.inf)
        right = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)
        assert error(found.out, right) <= FLOAT64
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_that_leave_whole_blocks_unseen(kind):
    """Every token a document of its own, and then its own output; documents that end where ranks do: most blocks are empty."""
    alone = Case(kind, 4, 16, documents=(1,))
    found = across(alone)
    assert torch.equal(found.out, alone.tensors()[2].repeat_interleave(2, 1))
    assert found.dq.abs().max() < FLOAT64
    fitting = Case(kind, 4, 16, documents=(4,))
    assert max(errors(across(fitting), full(fitting))) <= FLOAT64


# Few bits.


def _median_error(kind, ranks):
    """Of 20 seeds, which are rows of one run."""
    case = Case(kind, ranks, 192, batch=20, kv_heads=2, group=2, head_dim=16, dtype=torch.bfloat16)
    found, right = across(case), full(case)
    return [statistics.median(error(a, b) for a, b in zip(u, v)) for u, v in zip(found, right)]


@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped", "all-gather", "usp"])
def test_errors_in_bfloat16_do_not_grow_with_ranks(kind):
    two, eight = _median_error(kind, 2), _median_error(kind, 8)
    assert all(b <= 1.1 * a for a, b in zip(two, eight))
    assert max(eight) < 0.01  # the last of 8 bits, and some


def test_partial_results_in_bfloat16_would_be_seen(monkeypatch):
    """Negative control: rounded at every merge, the error grows with ranks."""
    merge = block.merge_into

    def rounding(a, b):
        merge(a, b)
        a.out.copy_(a.out.bfloat16())
        a.lse.copy_(a.lse.bfloat16())

    monkeypatch.setattr(block, "merge_into", rounding)
    two, eight = _median_error("zigzag", 2), _median_error("zigzag", 8)
    assert eight[0] > 1.1 * two[0]


# Shapes, and misuse.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("documents", "dtype"), [(None, torch.float32), ((5, 3, 9), torch.bfloat16)])
def test_a_run_of_shapes_has_the_same_trace(kind, documents, dtype):
    for ranks in (1, 4):
        case = Case(kind, ranks, 19, 2, 2, 2, 4, documents, dtype=dtype)
        assert first_difference(run(case).trace, run(case, backend="shape").trace) is None
    other = run(replace(case, length=20), backend="shape").trace
    assert first_difference(run(case).trace, other) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_autocast_is_that_of_torchs_attention(dtype):
    """It leaves float64 alone."""
    case = Case("zigzag", 2, 16, kv_heads=2, group=1, dtype=dtype)
    tensors = case.tensors()

    def mixed(rank):
        group, cut = rank.group("cp"), case.cut()
        q, k, v, _ = (cut.own(x, group.rank, 2) for x in tensors)
        with torch.autocast("cpu", torch.bfloat16):
            right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return attention(q, k, v, cut, group, rank).dtype, right.dtype

    right = torch.float64 if dtype == torch.float64 else torch.bfloat16
    assert emu.launch(mixed, emu.Mesh(cp=2)).results == [(right, right)] * 2


def _attends(
    q=(1, 4, 8, 4),
    k=(1, 2, 8, 4),
    length=16,
    cut_ranks=2,
    documents=None,
    kind="zigzag",
    dtype=torch.float32,
    scale=None,
):
    def misused(rank):
        cut = make_cut(kind, length, cut_ranks, documents)
        attention(torch.zeros(q), torch.zeros(k, dtype=dtype), torch.zeros(k), cut, rank.group("cp"), rank, scale)

    emu.launch(misused, emu.Mesh(cp=2), backend="virtual")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"k": (1, 3, 8, 4)}, "multiple"),
        ({"k": (1, 2, 8, 5)}, "do not fit"),
        ({"k": (2, 2, 8, 4)}, "do not fit"),
        ({"dtype": torch.float64}, "one dtype"),
        ({"length": 18}, r"\[9, 9\] tokens"),
        ({"cut_ranks": 4, "length": 32}, "this group's size"),
        ({"documents": torch.zeros(3, 16, dtype=torch.long)}, "other rows"),
    ],
)
def test_what_does_not_fit_is_told(wrong, words):
    _attends()
    with pytest.raises(EmuError, match=words):
        _attends(**wrong)


def test_more_ranks_than_heads_are_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"2 ranks .* only 1 query heads") as told:
        _attends(q=(1, 1, 8, 4), k=(1, 1, 8, 4), kind="ulysses")
    assert told.value.field == "context" and told.value.value == 2 and told.value.nearest == 1
