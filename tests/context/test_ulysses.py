"""Heads exchanged for tokens: shares, copies, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import emu
from emu.parallel.context import KINDS, attention, ulysses
from emu.parallel.context.ulysses import heads_of, to_heads, to_tokens
from emu.spmd import PlanError, split_sizes

from .cases import FLOAT64, Case, across, cases, errors, full


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 16))
def test_every_query_head_has_one_rank_and_its_keys_there(kv_heads, group, ranks):
    heads = kv_heads * group
    if ranks > heads:
        with pytest.raises(PlanError) as told:
            heads_of(heads, kv_heads, ranks)
        assert told.value.field == "context" and str(ranks) in str(told.value) and str(heads) in str(told.value)
        return
    shares = heads_of(heads, kv_heads, ranks)
    assert [head for a, b in shares.queries for head in range(a, b)] == list(range(heads))
    assert [b - a for a, b in shares.queries] == split_sizes(heads, ranks)
    for rank, ((a, b), (first, last)) in enumerate(zip(shares.queries, shares.keys)):
        wanted = [head // group for head in range(a, b)]
        assert list(range(first, last)) == sorted(set(wanted))
        readers = shares.readers(rank) or ((b - a) // (last - first),) * (last - first)
        assert [head for head, n in enumerate(readers, first) for _ in range(n)] == wanted
    assert shares.shared == (sum(b - a for a, b in shares.keys) > kv_heads)


@given(cases(("ulysses",)), st.data())
def test_what_is_exchanged_comes_back(case, data):
    """Each head's tokens are all there, in order; and back again, where copies add up, times their number."""
    shares = heads_of(case.heads, case.kv_heads, case.ranks)
    q, k, *_ = case.tensors()

    def program(rank):
        group, cut = rank.group("cp"), case.cut()
        mine = [cut.own(x, rank, 2) for x in (q, k)]
        wholes = to_heads(mine, [shares.queries, shares.keys], group, cut.sizes, "there")
        for whole, x, (a, b) in zip(wholes, (q, k), (shares.queries[rank], shares.keys[rank])):
            assert torch.equal(whole, x[:, a:b])
        return mine, to_tokens(wholes, [shares.queries, shares.keys], group, cut.sizes, "back")

    copies = torch.tensor([sum(a <= head < b for a, b in shares.keys) for head in range(case.kv_heads)])
    for (mine_q, mine_k), (back_q, back_k) in emu.launch(program, emu.Mesh(cp=case.ranks), backend="virtual").results:
        assert torch.equal(back_q, mine_q)
        assert torch.allclose(back_k, mine_k * copies[:, None, None], rtol=1e-14)


@pytest.mark.parametrize("kind", ["ulysses", "usp"])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 8), (2, 4), (3, 3), (2, 5), (8, 1)])
def test_more_ranks_than_key_heads(kind, kv_heads, group):
    """Copied evenly, unevenly, or not at all."""
    case = Case(kind, 8, 21, 2, kv_heads, group, 4, (6, 9), 4 if kind == "usp" else None)
    assert max(errors(across(case), full(case))) <= FLOAT64


@pytest.mark.parametrize("fault", ["the last copy wins", "a mean of the copies", "heads in rank order"])
def test_wrong_ways_back_are_seen(monkeypatch, fault):
    case = Case("ulysses", 4, 16, 1, 2, 4, 4)
    right = full(case)
    assert max(errors(across(case), right)) <= FLOAT64
    back = ulysses.to_tokens

    def wrong(tensors, shares, *rest):
        found = back(tensors, shares, *rest)
        if fault == "a mean of the copies" and len(found) > 1:
            return [found[0], *(x / 2 for x in found[1:])]
        if fault == "heads in rank order":
            return [x.roll(1, 1) for x in found]
        return found

    if fault == "the last copy wins":
        monkeypatch.setattr(torch.Tensor, "add_", lambda self, other: self.copy_(other))
    else:
        from emu.parallel.context import mixed

        monkeypatch.setattr(mixed, "to_tokens", wrong)
    assert max(errors(across(case), right)) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_backward_may_come_twice_and_in_a_checkpoint(kind):
    """What is kept stays as it is, and attention computed again is the same."""
    case = Case(kind, 4, 19, documents=(8, 3))
    tensors, numbers = case.tensors(), case.numbers()

    def program(rank, again):
        group, cut = rank.group("cp"), case.cut()
        *inputs, grad = (cut.own(x, group.rank, 2).clone() for x in tensors)
        q, k, v = (x.requires_grad_() for x in inputs)
        if again:
            out = checkpoint(attention, q, k, v, cut, group, rank, use_reentrant=False)
        else:
            out = attention(q, k, v, cut, group, rank)
        first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=not again)
        second = first if again else torch.autograd.grad(out, (q, k, v), grad)
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, cut, group, rank), out)
        return first

    assert numbers is not None
    once, twice = (emu.launch(program, emu.Mesh(cp=4), args=(a,), backend="virtual").results for a in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(once, twice) for a, b in zip(x, y))
