"""Attention cut into tiles that fit a core's own memory: how large they may be, and which of them are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from emu.parallel.attention.tokens import values
from emu.spmd import EmuError

# Shared memory that one thread block of an H100 may use, of the 228 KiB of its SM: NVIDIA Hopper Tuning Guide, Occupancy.
H100_BLOCK_BYTES = 227 * 1024
TENSOR_CORE = 16  # tokens


@dataclass(frozen=True)
class Tiles:
    """How many queries and keys a tile has, going forward and back. Going back holds more, so its tiles are smaller.

    Args:
        queries, keys: of a tile, forward.
        back_queries, back_keys: of a tile, backward.
    """

    queries: int
    keys: int
    back_queries: int
    back_keys: int

    def __post_init__(self) -> None:
        if min(self.queries, self.keys, self.back_queries, self.back_keys) < 1:
            raise EmuError(f"{self} has empty tiles", "give every tile a query and a key at least")


@dataclass(frozen=True, eq=False)
class Shape:
    """What attends to what.

    Args:
        batch, heads, kv_heads, queries, keys, head_dim: sizes of q [batch, heads, queries, head_dim] and of k and v.
        element_bytes: of a number of q, k, v and out.
        sum_bytes: of a number that is a sum: running maxima and sums, outputs while they grow, the log-sum-exp.
        causal: query i sees keys 0 .. i.
        documents: [batch or 1, tokens] int64 on the host: tokens with unlike numbers do not see each other. None: one document.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    element_bytes: int
    sum_bytes: int
    causal: bool = True
    documents: Tensor | None = None

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents: Tensor | None = None) -> Shape:
        """The shape of tensors q [batch, heads, queries, head_dim], k and v [batch, kv_heads, keys, head_dim].

        Raises:
            EmuError: they do not fit each other, or the documents.
        """
        batch, heads, queries, head_dim = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, head_dim) or not kv_heads or heads % kv_heads:
            raise EmuError(
                f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit",
                "give q [batch, heads, queries, head_dim], k and v [batch, kv_heads, keys, head_dim]; kv_heads divides heads",
            )
        if documents is not None and (queries != keys or documents.shape not in ((batch, keys), (1, keys))):
            raise EmuError(
                f"documents {tuple(documents.shape)} do not fit {batch} rows of {queries} queries and {keys} keys",
                "give the number of every token's document, [batch, tokens], and let tokens attend to themselves",
            )
        wide = max(q.element_size(), 4)
        return Shape(batch, heads, kv_heads, queries, keys, head_dim, q.element_size(), wide, causal, documents)

    def hidden(self, row: int, q: slice, k: slice) -> np.ndarray | None:
        """What a tile's queries do not see, [queries, keys] bool; None where they see all of it."""
        hidden = np.zeros((q.stop - q.start, k.stop - k.start), dtype=bool)
        if self.causal:
            hidden |= np.arange(k.start, k.stop) > np.arange(q.start, q.stop)[:, None]
        if self.documents is not None:
            own = values(self.documents)[row % len(self.documents)]
            hidden |= own[q][:, None] != own[k]
        return hidden if hidden.any() else None

    def sees(self, row: int, q: slice, k: slice) -> bool:
        """Whether a tile is needed: any of its queries sees any of its keys."""
        if self.causal and k.start > q.stop - 1:
            return False
        if self.documents is None:
            return True
        hidden = self.hidden(row, q, k)
        return hidden is None or not hidden.all()


def parts(length: int, size: int) -> Iterator[slice]:
    """A length in parts of a size; the last may be smaller."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def forward_bytes(queries: int, keys: int, head_dim: int, element_bytes: int, sum_bytes: int) -> int:
    """What one tile holds in the core's memory going forward: Q, K, V; scores, the growing output, row maxima and sums."""
    loaded = (queries + 2 * keys) * head_dim * element_bytes
    return loaded + (queries * keys + queries * head_dim + 2 * queries) * sum_bytes


def backward_bytes(queries: int, keys: int, head_dim: int, element_bytes: int, sum_bytes: int) -> int:
    """The same going back: Q, dO, K, V; weights and their gradient, dQ, dK, dV, log-sum-exp and row sums."""
    loaded = 2 * (queries + keys) * head_dim * element_bytes
    return loaded + (2 * queries * keys + (queries + 2 * keys) * head_dim + 2 * queries) * sum_bytes


def tiles_for(shape: Shape, sram_bytes: int) -> Tiles:
    """The tiles that fit and move least: those that pass by are small, so that the one that stays is large.

    Queries stay going forward, and keys going back; what passes by does so once for every tile that stays. Tiles that
    pass have 16 tokens, the least that tensor cores take, and those that stay a multiple of 16; less only where that
    does not fit.

    Raises:
        EmuError: not even a tile of one query and one key fits.
    """
    rest = (shape.head_dim, shape.element_bytes, shape.sum_bytes)
    queries, keys = _stay_and_pass(lambda stays, passes: forward_bytes(stays, passes, *rest), sram_bytes, shape)
    back_keys, back_queries = _stay_and_pass(
        lambda stays, passes: backward_bytes(passes, stays, *rest), sram_bytes, shape
    )
    return Tiles(queries, keys, back_queries, back_keys)


def _stay_and_pass(needed: Callable[[int, int], int], sram_bytes: int, shape: Shape) -> tuple[int, int]:
    if needed(1, 1) > sram_bytes:
        raise EmuError(
            f"a tile of one query and one key holds {needed(1, 1):,} bytes at head dim {shape.head_dim}, of {sram_bytes:,}",
            "give more memory, or a smaller head dim",
        )
    passes = next(size for size in range(TENSOR_CORE, 0, -1) if needed(size, size) <= sram_bytes)
    each = needed(1, passes) - needed(0, passes)  # grows by as much with every token that stays
    stays = (sram_bytes - needed(0, passes)) // each
    return (stays // TENSOR_CORE * TENSOR_CORE if passes == TENSOR_CORE else stays), passes
