"""Blocks of attention, merged, are full attention: forward, backward, in few bits, without values, in the exact tier."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.equivalence.exact import ExactMode
from emu.parallel.attention.block import Partial, attend, backward, merge_into, merged, nothing
from emu.parallel.attention.pieces import pieces
from emu.parallel.attention.tokens import Run, tokens

from .cuts import CUTS, Case, cases, full, taken
from .merging import FLOAT64, blockwise, error


@given(cases())
def test_any_cut_equals_full_attention(case):
    q, k, v, grad = case.tensors()
    for ours, theirs in zip(blockwise(case.holders(), q, k, v, grad), full(q, k, v, grad, case.documents)):
        assert ours.dtype == torch.float64
        assert error(ours, theirs) < FLOAT64  # float64 sums in another order


@given(cases(kinds=CUTS))
def test_queries_of_one_holder_meet_all_keys_at_once(case):
    q, k, v, grad = case.tensors()
    out, dq, _, _ = full(q, k, v, grad, case.documents)
    everything = tokens([Run(0, case.length)], case.documents)
    for own in case.holders():
        found = pieces(own, everything)
        row = attend(taken(q, own), k, v, found)
        grads = backward(taken(grad, own), taken(q, own), k, v, row.out, row.lse, found)
        assert error(row.out, taken(out, own)) < FLOAT64
        assert error(grads[0], taken(dq, own)) < FLOAT64


@pytest.mark.parametrize(("length", "ranks"), [(2100, 2), (700, 1), (513, 1)])
def test_long_sequences_go_through_every_block_of_the_kernel(length, ranks):
    case = Case("zigzag", length, ranks, 1, None, 1, 2, 8, 0)
    q, k, v, grad = case.tensors()
    for ours, theirs in zip(blockwise(case.holders(), q, k, v, grad), full(q, k, v, grad)):
        assert error(ours, theirs) < FLOAT64


@given(cases(kinds=("zigzag",)))
def test_merging_in_place_gives_the_same_bits(case):
    q, k, v, _ = case.tensors(torch.float32)
    holders = case.holders()
    parts = [attend(taken(q, holders[-1]), taken(k, own), taken(v, own), pieces(holders[-1], own)) for own in holders]
    apart = into = nothing(taken(q, holders[-1]))
    for part in parts:
        apart = merged(apart, part)
        merge_into(into, part)
    assert torch.equal(apart.out, into.out) and torch.equal(apart.lse, into.lse)


def test_a_wrong_block_shows():
    """A piece left out, weights of a block alone in backward, or a plain sum of partial results are far off."""
    case = Case("zigzag", 24, 3, 2, None, 1, 2, 8, 3)
    q, k, v, grad = case.tensors()
    right, holders = full(q, k, v, grad), case.holders()
    summed = blockwise(holders, q, k, v, grad, lambda a, b: Partial(a.out + b.out, torch.logaddexp(a.lse, b.lse)))
    assert error(summed[0], right[0]) > 1e-2
    dropped = blockwise(holders, q, k, v, grad, lambda a, b: a if bool((a.lse > -math.inf).all()) else merged(a, b))
    assert error(dropped[0], right[0]) > 1e-2
    own, other = holders[1], holders[0]
    parts = taken(q, own), taken(k, other), taken(v, other)
    alone = attend(*parts, pieces(own, other))
    row = merged(alone, attend(parts[0], taken(k, own), taken(v, own), pieces(own, own)))
    grads = [backward(taken(grad, own), *parts, r.out, r.lse, pieces(own, other)) for r in (row, alone)]
    assert error(grads[0][1], grads[1][1]) > 1e-2


def errors_of(ranks, dtype, rounds):
    """Median errors of out, dq, dk, dv. rounds: what would be, did every block round its result."""

    def merge(a, b):
        both = merged(a, b)
        return both._replace(out=both.out.to(dtype).float()) if rounds else both

    found = []
    for seed in range(6):
        case = Case("zigzag", 256, ranks, 1, None, 1, 1, 16, seed)
        q, k, v, grad = case.tensors(dtype)
        ours = blockwise(case.holders(), q, k, v, grad, merge)
        assert all(x.dtype == torch.float32 for x in ours)
        found.append([error(a, b) for a, b in zip(ours, full(q, k, v, grad))])
    return torch.tensor(found).median(0).values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_results_are_float32_and_their_error_does_not_grow_with_blocks(dtype):
    one, two, many = (errors_of(ranks, dtype, rounds=False) for ranks in (1, 2, 16))
    # Inputs are exact in float32, so what is left is float32's own rounding, 2^-24 a number; 16 bits have 2^-9 or 2^-12.
    assert float(torch.stack((one, two, many)).max()) < 4e-6
    assert bool((many < 2 * one).all())
    rounded = errors_of(16, dtype, rounds=True)
    assert float(rounded[0]) > 100 * float(many[0])


@settings(max_examples=8)
@given(cases(most_length=12))
def test_on_meta_tensors_shapes_and_types_are_the_same(case):
    for dtype in (torch.float64, torch.bfloat16):
        parts = case.tensors(dtype)
        real, shapes = (blockwise_once(case, [x.to(device) for x in parts]) for device in ("cpu", "meta"))
        for a, b in zip(real, shapes):
            assert b.is_meta and a.shape == b.shape and a.dtype == b.dtype


def blockwise_once(case, parts):
    whole = tokens([Run(0, case.length)], case.documents)
    q, k, v, grad = parts
    row = attend(q, k, v, pieces(whole, whole))
    return (*merged(row, row), *backward(grad, q, k, v, row.out, row.lse, pieces(whole, whole)))


def mixed_exactly(case, inside=True):
    """x -> q, k, v -> attention -> y, as a layer would, in the exact tier: y and what reaches x and the weights."""
    mode, width = ExactMode(), case.head_dim * case.group
    draw = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.batch * case.length, width, generator=draw, dtype=torch.float64)
    weights = [
        torch.randn(width, n, generator=draw, dtype=torch.float64) for n in (width, case.head_dim, case.head_dim)
    ]

    def heads(flat):
        return flat.view(case.batch, case.length, -1, case.head_dim).transpose(1, 2)

    with mode:
        q, k, v = (heads(x @ weight) for weight in weights)
        with mode.kernel(q, k, v) as (q, k, v):
            out, dq, dk, dv = blockwise(case.holders(), q, k, v, heads(x))
        y = out.transpose(1, 2).reshape(x.shape) @ weights[0]
        grads = [g.transpose(1, 2).reshape(len(x), -1) @ w.T for g, w in zip((dq, dk, dv), weights)]
    return [y, *grads]


@settings(max_examples=10)
@given(cases(kinds=("zigzag", "striped"), most_length=24), st.integers(1, 6))
def test_in_the_exact_tier_every_cut_gives_the_same_bits(case, ranks):
    case = case._replace(kv_heads=1)
    for a, b in zip(mixed_exactly(case), mixed_exactly(case._replace(ranks=ranks, kind="contiguous"))):
        assert torch.equal(a, b)
