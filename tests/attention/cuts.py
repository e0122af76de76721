"""Ways to cut a sequence among holders, what its queries may see, and full attention to compare with."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from emu.parallel.attention.tokens import Run, tokens, tokens_by_row

CUTS = ("contiguous", "zigzag", "striped")


def cut(kind, length, ranks, documents=None, seed=0):
    """The Tokens of every holder."""
    if kind == "contiguous":
        ends = [length * i // ranks for i in range(ranks + 1)]
        return [tokens([Run(a, b)], documents) for a, b in pairwise(ends)]
    if kind == "zigzag":
        ends = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
        chunks = [Run(a, b) for a, b in pairwise(ends)]
        return [tokens([chunks[i], chunks[-1 - i]], documents) for i in range(ranks)]
    if kind == "striped":
        return [tokens([Run(i, length, ranks)], documents) for i in range(ranks)]
    assert kind == "dealt"  # to every row of the batch its own cut, of equal sizes
    draw = np.random.default_rng(seed)
    rows = [draw.permutation(length) for _ in range(1 if documents is None else len(documents))]
    ends = [length * i // ranks for i in range(ranks + 1)]
    parts = [np.stack([np.sort(row[a:b]) for row in rows]) for a, b in pairwise(ends)]
    return [tokens_by_row(part, documents) for part in parts]


def seen(queries, keys):
    """[rows, queries, keys] bool, pair by pair."""
    q, k = (t.positions if t.positions.dim() == 2 else t.positions[None] for t in (queries, keys))
    visible = q[:, :, None] >= k[:, None, :]
    if queries.documents is not None:
        visible = visible & (queries.documents[:, :, None] == keys.documents[:, None, :])
    return visible


def taken(x, own):
    """The tokens of one holder: x [batch, heads, length, ...]."""
    if own.positions.dim() == 1:
        return x[:, :, own.positions]
    rows = own.positions.expand(x.shape[0], -1)
    return torch.stack([row[:, at] for row, at in zip(x, rows)])


class Case(NamedTuple):
    """A sequence, its cut, and what attends: sizes of q and of k, v."""

    kind: str
    length: int
    ranks: int
    batch: int
    documents: torch.Tensor | None
    kv_heads: int
    group: int
    head_dim: int
    seed: int

    def holders(self):
        return cut(self.kind, self.length, self.ranks, self.documents, self.seed)

    def tensors(self, dtype=torch.float64):
        """q, k, v and a gradient of the output."""
        draw = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group
        return tuple(
            torch.randn(self.batch, h, self.length, self.head_dim, generator=draw, dtype=dtype)
            for h in (heads, self.kv_heads, self.kv_heads, heads)
        )


@st.composite
def cases(draw, kinds=(*CUTS, "dealt"), most_length=40):
    kind = draw(st.sampled_from(kinds))
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, most_length))
    documents = None
    if draw(st.booleans()):
        rows = st.lists(st.integers(0, 3), min_size=length, max_size=length)
        documents = torch.tensor(
            [sorted(row) if draw(st.booleans()) else row for row in [draw(rows) for _ in range(batch)]]
        )
    return Case(
        kind,
        length,
        draw(st.integers(1, 8)),
        batch,
        documents,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2, 3, 8, 17))),
        draw(st.integers(0, 2**20)),
    )


def full(q, k, v, grad, documents=None, scale=None):
    """out, dq, dk, dv of torch's own attention in float64, over the whole sequence."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    length = q.shape[2]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double()))
