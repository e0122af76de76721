"""Attention to be cut: drawn cases, full attention on one device, and the same across ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import emu
from emu.parallel.context import KINDS, Cut, attention, make_cut

FLOAT64 = 1e-12  # the float64 tier: other orders of sums


class Results(NamedTuple):
    """Of the whole sequence, [batch, heads, length, head_dim]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Case:
    """One attention and one cut of it. Documents: after how many tokens each ends, in turn; None: one document."""

    kind: str
    ranks: int
    length: int
    batch: int = 1
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 4
    documents: tuple[int, ...] | None = None
    ulysses: int | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float64

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def numbers(self) -> Tensor | None:
        """The document of every token, [batch, length]; rows differ."""
        if self.documents is None:
            return None
        lengths = self.documents * (self.length + self.batch)
        row = [number for number, length in enumerate(lengths) for _ in range(length)]
        return torch.tensor([row[at : at + self.length] for at in range(self.batch)])

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        g = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, n, self.length, self.head_dim) for n in heads]
        return [torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype) for shape in shapes]

    def cut(self) -> Cut:
        return make_cut(self.kind, self.length, self.ranks, self.numbers(), self.ulysses)


@st.composite
def cases(draw: Any, kinds: tuple[str, ...] = KINDS, ranks: int = 8, longest: int = 40) -> Case:
    kind, size = draw(st.sampled_from(kinds)), draw(st.integers(1, ranks))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ulysses = None
    if kind == "ulysses":
        size = min(size, kv_heads * group)
    elif kind == "usp":
        ulysses = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0 and n <= kv_heads * group]))
    return Case(
        kind,
        size,
        draw(st.integers(1, longest)),
        draw(st.integers(1, 2)),
        kv_heads,
        group,
        draw(st.integers(1, 9)),
        draw(st.none() | st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple)),
        ulysses,
        draw(st.integers(0, 100)),
    )


def full(case: Case, tensors: list[Tensor] | None = None) -> Results:
    """torch's attention of the whole sequence, in float64."""
    *inputs, grad = (x.double() for x in tensors or case.tensors())
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    seen = torch.ones(case.length, case.length, dtype=torch.bool).tril()
    numbers = case.numbers()
    if numbers is not None:
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    keys, values = (x.repeat_interleave(case.group, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, keys, values, seen)
    found = torch.autograd.grad(out, (q, k, v), grad)
    return Results(out.detach(), *found)


def program(rank: emu.Rank, case: Case, tensors: list[Tensor], numbers: Tensor | None) -> list[Tensor]:
    """This rank's part of the output and of the gradients."""
    group, cut = rank.group("cp"), make_cut(case.kind, case.length, case.ranks, numbers, case.ulysses)
    *inputs, grad = (cut.own(x, group.rank, 2).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention(q, k, v, cut, group, rank)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def run(case: Case, tensors: list[Tensor] | None = None, **options: Any) -> emu.Run:
    options = {"backend": "virtual", **options}
    return emu.launch(
        program, emu.Mesh(cp=case.ranks), args=(case, tensors or case.tensors(), case.numbers()), **options
    )


def joined(case: Case, results: Any) -> Results:
    """What all ranks have, as one."""
    cut = case.cut()
    return Results(*(cut.joined([results[i][n] for i in range(case.ranks)], 2) for n in range(4)))


def across(case: Case, tensors: list[Tensor] | None = None, **options: Any) -> Results:
    return joined(case, run(case, tensors, **options).results)


def error(u: Tensor, v: Tensor) -> float:
    """The largest difference, relative to the largest value; of gradients that are truly zero, to a tenth of what was given."""
    if u.shape != v.shape:
        return float("inf")
    return float((u.double() - v).abs().max() / v.abs().max().clamp(min=0.1)) if v.numel() else 0.0


def errors(u: Results, v: Results) -> list[float]:
    return [error(a, b) for a, b in zip(u, v)]
