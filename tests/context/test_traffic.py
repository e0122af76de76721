"""Bytes that ranks send, from the trace, are what closed forms say, forward and backward.

The forms for lengths that divide are those of the papers: a ring and an all-gather move 2 s b g d_h (c - 1) / c elements of
keys and values forward (Llama 3, arXiv 2407.21783), and about twice that backward, whose sums are of 4 bytes at least;
Ulysses moves 2 (h + g) d_h elements of a rank's s / c tokens, less its own share (arXiv 2309.14509).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings

import emu
from emu.cost.collectives import sent_bytes
from emu.trace.events import Collective
from emu.trace.trace import Trace

from .cases import Case, cases, program

WIDE = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 4}  # bytes of what gradients are added up in


def sent(trace: Trace, rank: int, *, backward: bool) -> int:
    """Bytes that a rank sends before or after its first kernel of backward."""
    events = trace[rank]
    first = next(i for i, e in enumerate(events) if getattr(e, "phase", "") == "backward")
    some = events[first:] if backward else events[:first]
    return int(sum(sent_bytes(e, rank) for e in some if type(e) is Collective))


def traced(case: Case) -> Trace:
    return emu.launch(
        program, emu.Mesh(cp=case.ranks), args=(case, case.tensors(), case.numbers()), backend="virtual"
    ).trace


def closed_form(case: Case, me: int) -> tuple[int, int]:
    """Bytes that one rank sends, forward and backward."""
    sizes, n = case.cut().sizes, case.ranks
    element, wide = torch.empty(0, dtype=case.dtype).element_size(), WIDE[case.dtype]
    token = case.batch * case.head_dim  # numbers of one head
    pair = 2 * case.kv_heads * token  # of a token's keys and values
    if case.kind in ("ring", "zigzag", "striped"):
        passed = sum(sizes[(me - step) % n] for step in range(n - 1)) * pair
        back = sum(sizes[(me - step) % n] for step in range(1, n)) * pair
        return passed * element, passed * element + back * wide
    if case.kind == "all-gather":
        gathered = (sum(sizes) - sizes[(me + 1) % n]) * pair  # all but its successor's own
        return gathered * element, gathered * element + (sum(sizes) - sizes[me]) * pair * wide
    near = case.cut().ulysses
    start = me - me % near
    neighbours = [i for i in range(start, start + near) if i != me]
    heads = {start + i: range(a, b) for i, (a, b) in enumerate(_ranges(case.heads, near))}
    keys = {i: len({head // case.group for head in mine}) for i, mine in heads.items()}
    copied = sum(keys.values()) > case.kv_heads
    inward = sum(sizes[me] * (len(heads[i]) + 2 * keys[i]) for i in neighbours) * token * element
    outward = sum(sizes[i] for i in neighbours) * len(heads[me]) * token * element
    grads = sum(sizes[i] for i in neighbours) * token
    back = sum(sizes[me] * len(heads[i]) for i in neighbours) * token * element
    back += grads * len(heads[me]) * element + grads * 2 * keys[me] * (wide if copied else element)
    across = n // near
    groups = [sum(sizes[i * near : (i + 1) * near]) for i in range(across)]
    mine = start // near
    ring = 2 * keys[me] * token
    passed = sum(groups[(mine - step) % across] for step in range(across - 1)) * ring
    sums = sum(groups[(mine - step) % across] for step in range(1, across)) * ring
    return inward + outward + passed * element, back + passed * element + sums * wide


def _ranges(heads: int, ranks: int) -> list[tuple[int, int]]:
    ends = [heads * i // ranks for i in range(ranks + 1)]
    sizes = sorted((b - a for a, b in pairwise(ends)), reverse=True)  # the larger ones first
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(ranks)]


@settings(max_examples=50)
@given(cases())
def test_bytes_are_the_closed_forms(case):
    for dtype in (torch.float64, torch.bfloat16):
        case = replace(case, dtype=dtype)
        trace = traced(case)
        for rank in range(case.ranks):
            found = sent(trace, rank, backward=False), sent(trace, rank, backward=True)
            assert found == closed_form(case, rank)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_papers_where_ranks_divide(ranks):
    """In bfloat16; of all ranks alike."""
    s, b, g, group, d = 64, 2, 8, 2, 4
    case = Case("zigzag", ranks, s, b, g, group, d, dtype=torch.bfloat16)
    keys_and_values = 2 * s * b * g * d * (ranks - 1) // ranks
    for kind in ("ring", "zigzag", "striped", "all-gather"):
        trace = traced(replace(case, kind=kind))
        for rank in range(ranks):
            assert sent(trace, rank, backward=False) == 2 * keys_and_values
            assert sent(trace, rank, backward=True) == 2 * keys_and_values + 4 * keys_and_values
    trace = traced(replace(case, kind="ulysses"))
    exchanged = 2 * (g * group + g) * d * b * (s // ranks) * (ranks - 1) // ranks
    for rank in range(ranks):
        assert sent(trace, rank, backward=False) == sent(trace, rank, backward=True) == 2 * exchanged


def test_of_one_head_a_key_ulysses_sends_as_the_blog_says():
    """4 N h / P elements a rank, of which 1 / P stay: with as many key and value heads as query heads."""
    for ranks in (2, 4):
        case = Case("ulysses", ranks, 32, 1, 4, 1, 8, dtype=torch.bfloat16)
        elements = 4 * case.length * case.heads * case.head_dim // ranks
        assert sent(traced(case), 0, backward=False) == 2 * elements * (ranks - 1) // ranks


def test_a_copied_head_costs_what_its_copies_do():
    """Eight ranks, two key and value heads: each goes to four ranks, and its gradients come back in four bytes."""
    case = Case("ulysses", 8, 16, 1, 2, 4, 4, dtype=torch.bfloat16)
    trace = traced(case)
    tokens = case.length // 8
    assert sent(trace, 0, backward=False) == 7 * tokens * 4 * (1 + 2 + 1) * 2
    assert sent(trace, 0, backward=True) == 7 * tokens * 4 * ((1 + 1) * 2 + 2 * 4)


@settings(max_examples=10)
@given(cases(("ring", "zigzag", "all-gather", "usp")))
def test_flops_of_all_ranks_are_those_of_one_device(case):
    """4 a pair and head dim forward, 8 backward: none twice, none for nothing."""
    trace = traced(case)
    numbers = case.numbers()
    seen = torch.ones(case.batch, case.length, case.length).tril()
    if numbers is not None:
        seen = seen * (numbers[:, :, None] == numbers[:, None, :])
    pairs = int(seen.sum()) * case.heads * case.head_dim
    for a_pair, word in ((4, "attention"), (8, "attention_backward")):
        names = (word, f"ring_{word}")
        found = sum(getattr(e, "flops", 0) for r in trace.ranks for e in trace[r] if getattr(e, "name", "") in names)
        assert found == a_pair * pairs
