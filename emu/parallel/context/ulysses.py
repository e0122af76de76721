"""Ulysses: ranks exchange tokens for heads, attend to whole sequences with some of the heads, and exchange back.

Jacobs et al. 2023, https://arxiv.org/abs/2309.14509. Head i of n ranks' heads goes to the rank whose share it lies in;
shares may be uneven. A key and value head goes to every rank that has a query head which reads it, so it is copied where
ranks are more than such heads; its gradients from all of them are added up as those of an activation, in group order, in
float32 at least, before any projection reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from emu.spmd import Group, PlanError, split_sizes

Range = tuple[int, int]


@dataclass(frozen=True)
class Heads:
    """Who gets which heads.

    Args:
        queries, keys: for every rank the range of query heads it gets, and of key and value heads that these read.
        group: how many query heads read one key and value head.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    group: int

    @property
    def shared(self) -> bool:
        """Whether any key and value head goes to several ranks."""
        return any(a[1] > b[0] for a, b in pairwise(self.keys))

    def readers(self, rank: int) -> tuple[int, ...] | None:
        """For every key and value head of a rank how many of its query heads read it; None where all are read alike."""
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        counts = [min(stop, (head + 1) * self.group) - max(start, head * self.group) for head in range(first, last)]
        return None if len(set(counts)) == 1 else tuple(counts)


def heads_of(heads: int, kv_heads: int, ranks: int) -> Heads:
    """The shares of ranks in heads.

    Raises:
        PlanError: more ranks than heads.
    """
    if ranks > heads:
        raise PlanError(
            f"context: {ranks} ranks exchange tokens for heads, but there are only {heads} query heads on each",
            f"let at most {heads} ranks exchange heads (tp leaves each rank fewer), or use context='zigzag', which needs none",
            field="context",
            value=ranks,
            nearest=heads,
        )
    group = heads // kv_heads
    sizes = split_sizes(heads, ranks)
    queries = tuple((sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(ranks))
    return Heads(queries, tuple((start // group, (stop - 1) // group + 1) for start, stop in queries), group)


def to_heads(
    tensors: Sequence[Tensor], shares: Sequence[Sequence[Range]], group: Group, sizes: Sequence[int], name: str
) -> list[Tensor]:
    """All tokens for this rank's heads.

    Args:
        tensors: [batch, heads, n, head_dim] with all heads and this rank's tokens.
        shares: of each tensor the range of heads that every rank gets.
        sizes: how many tokens every rank has.

    Returns:
        of each tensor [batch, its heads, all tokens, head_dim]; tokens in group order.
    """
    under_way, arrivals = [], []
    for x, share in zip(tensors, shares):
        batch, _, n, head_dim = x.shape
        by_head = x.permute(1, 2, 0, 3)
        sent = torch.cat([by_head[a:b] for a, b in share]).flatten(0, 1)
        mine = share[group.rank][1] - share[group.rank][0]
        arrivals.append([(mine, size, batch, head_dim) for size in sizes])
        lengths = [(b - a) * n for a, b in share], [mine * size for size in sizes]
        under_way.append(group.all_to_all(sent, *lengths, async_op=True, name=name))
    found = []
    for work, shapes in zip(under_way, arrivals):
        found.append(torch.cat(_parts(work.wait(), shapes), 1).permute(2, 0, 1, 3))
    return found


def to_tokens(
    tensors: Sequence[Tensor], shares: Sequence[Sequence[Range]], group: Group, sizes: Sequence[int], name: str
) -> list[Tensor]:
    """The adjoint of to_heads: this rank's tokens for all heads. What several ranks have of a head is added up in group order.

    Args:
        tensors: [batch, this rank's heads, all tokens, head_dim].
        shares, sizes: as for to_heads.

    Returns:
        of each tensor [batch, heads, n, head_dim].
    """
    under_way, arrivals = [], []
    for x, share in zip(tensors, shares):
        batch, mine, _, head_dim = x.shape
        n = sizes[group.rank]
        sent = x.permute(2, 1, 0, 3).contiguous().flatten(0, 1)
        arrivals.append([(n, b - a, batch, head_dim) for a, b in share])
        lengths = [size * mine for size in sizes], [n * (b - a) for a, b in share]
        under_way.append(group.all_to_all(sent, *lengths, async_op=True, name=name))
    found = []
    for work, shapes, share in zip(under_way, arrivals, shares):
        parts = _parts(work.wait(), shapes)
        if all(a[1] == b[0] for a, b in pairwise(share)):
            whole = torch.cat(parts, 1)
        else:
            n, _, batch, head_dim = shapes[0]
            whole = parts[0].new_zeros(n, share[-1][1], batch, head_dim)
            for part, (a, b) in zip(parts, share):
                whole[:, a:b].add_(part)
        found.append(whole.permute(2, 1, 0, 3))
    return found


def _parts(x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """What came from every rank, in its shape: the first two dims are one in x."""
    lengths = [shape[0] * shape[1] for shape in shapes]
    return [part.view(shape) for part, shape in zip(x.split(lengths), shapes)]
