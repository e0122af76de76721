"""Where attention takes place: which tokens this rank holds, with whom it shares the sequence, on which device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from emu.parallel.attention import block
from emu.parallel.attention.block import Partial
from emu.parallel.attention.pieces import Piece
from emu.parallel.context.cut import Cut
from emu.spmd import Group, Rank

FORWARD_FLOPS, BACKWARD_FLOPS = (
    4,
    8,
)  # a pair and a head dim: two products, and four; scores computed again do not count


class Kept(NamedTuple):
    """What attention keeps for backward, and nothing else."""

    q: Tensor  # [batch, heads, queries, head_dim]
    k: Tensor  # [batch, kv_heads, keys, head_dim]
    v: Tensor
    out: Tensor  # as q
    lse: Tensor  # [batch, heads, queries], float32 at least


class Gradients(NamedTuple):
    """Of queries, keys and values, in float32 at least."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Place:
    """One rank's part in attention across a cut.

    Args:
        cut: of the sequence over the group.
        group: its ranks.
        rank: this one.
        scale: of the scores; None: 1 / sqrt(head_dim).
        readers: for every key and value head how many query heads read it, where they are not equally many.
    """

    cut: Cut
    group: Group
    rank: Rank
    scale: float | None = None
    readers: tuple[int, ...] | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], so_far: Partial | None = None
    ) -> Partial:
        """Attention to some keys in one kernel, merged into what there is so far."""
        with self._kernel("attention", FORWARD_FLOPS, q, pieces):
            part = block.attend(q, self._read(k), self._read(v), pieces, self.scale)
            return part if so_far is None else block.merged(so_far, part)

    def backward(
        self, grad: Tensor, kept: Kept, k: Tensor, v: Tensor, pieces: Sequence[Piece], dq: Tensor
    ) -> list[Tensor]:
        """The gradients of some keys and values through this rank's queries, in one kernel; adds those of the queries to dq."""
        if not pieces:
            return [torch.zeros_like(x, dtype=dq.dtype) for x in (k, v)]
        q, _, _, out, lse = kept
        with self._kernel("attention_backward", BACKWARD_FLOPS, q, pieces):
            more, dk, dv = block.backward(grad, q, self._read(k), self._read(v), out, lse, pieces, self.scale)
            dq.add_(more)
            del more
            return [self._summed(dk), self._summed(dv)]

    @contextmanager
    def _kernel(self, name: str, a_pair: int, q: Tensor, pieces: Sequence[Piece]) -> Iterator[None]:
        pairs = sum(piece.pairs if piece.summed else piece.pairs * q.shape[0] for piece in pieces)
        name = f"ring_{name}" if self.group.size > 1 and self.cut.kind != "all-gather" else name
        with self.rank.kernel(name, flops=a_pair * pairs * q.shape[1] * q.shape[3]):
            yield

    def _read(self, x: Tensor) -> Tensor:
        """Heads of keys or values, again for every query head that reads them, where these are not equally many."""
        if self.readers is None:
            return x
        return torch.cat([head.expand(-1, n, -1, -1) for head, n in zip(x.split(1, 1), self.readers)], 1)

    def _summed(self, grad: Tensor) -> Tensor:
        """The adjoint of _read."""
        if self.readers is None:
            return grad
        return torch.cat([some.sum(1, keepdim=True) for some in grad.split(list(self.readers), 1)], 1)
