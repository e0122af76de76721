"""Where attention takes place: which tokens this rank holds, with whom it shares the sequence, on which device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from emu.parallel.attention import block
from emu.parallel.attention.block import Partial, some
from emu.parallel.context.cut import Block, Cut
from emu.spmd import Group, Rank

# Of a pair and a head dim: two products, and four; scores computed again do not count.
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 8


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Block, so_far: Partial | None) -> Partial | None:
        """Attention to some keys in one kernel, merged into what there is so far; where nothing is, every query sees some."""
        if not seen.pieces:
            return so_far
        with self._kernel("attention", FORWARD_FLOPS, q, seen):
            k, v = self._read(some(k, seen.k)), self._read(some(v, seen.k))
            part = block.attend(some(q, seen.q), k, v, seen.pieces, self.scale)
            if so_far is None:
                return part
            block.merge_into(Partial(some(so_far.out, seen.q), some(so_far.lse, seen.q)), part)
            return so_far

    def backward(self, grad: Tensor, kept: Kept, k: Tensor, v: Tensor, seen: Block, dq: Tensor) -> list[Tensor]:
        """The gradients of some keys and values through this rank's queries, in one kernel; adds those of the queries to dq.

        Returns:
            dk and dv of the keys that are seen, seen.k.
        """
        if not seen.pieces:
            return [some(x, seen.k) for x in (k, v)]
        with self._kernel("attention_backward", BACKWARD_FLOPS, kept.q, seen):
            k, v = self._read(some(k, seen.k)), self._read(some(v, seen.k))
            grad, q, out, lse = (some(x, seen.q) for x in (grad, kept.q, kept.out, kept.lse))
            more, dk, dv = block.backward(grad, q, k, v, out, lse, seen.pieces, self.scale)
            some(dq, seen.q).add_(more)
            del more
            return [self._summed(dk), self._summed(dv)]

    @contextmanager
    def _kernel(self, name: str, a_pair: int, q: Tensor, seen: Block) -> Iterator[None]:
        pairs = sum(piece.pairs if piece.summed else piece.pairs * q.shape[0] for piece in seen.pieces)
        name = f"ring_{name}" if self.group.size > 1 and self.cut.kind != "all-gather" else name
        with self.rank.kernel(name, flops=a_pair * pairs * q.shape[1] * q.shape[3], dtype=q.dtype):
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
        return torch.cat([part.sum(1, keepdim=True) for part in grad.split(list(self.readers), 1)], 1)


def put(parts: list[Tensor], seen: Block, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of all keys, where those of the keys that are seen are known."""
    if seen.pieces and seen.k == slice(0, seen.n_keys):
        return parts
    shapes = [(*x.shape[:2], seen.n_keys, x.shape[3]) for x in parts]
    return add([x.new_zeros(shape, dtype=dtype) for x, shape in zip(parts, shapes)], parts, seen.k)


def add(to: list[Tensor], parts: list[Tensor], keys: slice) -> list[Tensor]:
    """Adds gradients of some of the keys."""
    for x, part in zip(to, parts):
        if part.shape[2]:
            some(x, keys).add_(part)
    return to
