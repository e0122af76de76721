"""How many bytes of HBM attention moves, in closed form: by tiles, and spelled out operator by operator.

Written apart from the algorithm that counts its own bytes (emu.parallel.attention.flash), so that each checks the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from emu.parallel.attention.pieces import causal_pairs
from emu.parallel.attention.tiles import Shape, Tiles
from emu.parallel.attention.tokens import values


class Traffic(NamedTuple):
    """Bytes of HBM."""

    read: int
    written: int


def forward_traffic(shape: Shape, tiles: Tiles) -> Traffic:
    """Of the tiled forward pass: Q once, K and V once for every tile of queries that needs them; O and log-sum-exp once."""
    q_rows = shape.batch * shape.heads * shape.queries
    met = _met(shape, tiles.queries, tiles.keys).sum((0, 1)) @ _sizes(shape.keys, tiles.keys)
    read = q_rows * shape.head_dim + 2 * shape.heads * int(met) * shape.head_dim
    return Traffic(read * shape.element_bytes, q_rows * (shape.head_dim * shape.element_bytes + shape.sum_bytes))


def backward_traffic(shape: Shape, tiles: Tiles) -> Traffic:
    """Of the tiled backward pass.

    K and V once, Q, dO, log-sum-exp and row sums once for every tile of keys that needs them; O and dO once before, for
    the row sums; dQ written as often as it is added to and read all but the first time, in the precision of sums, and
    rounded at the end where that is not the precision of q; dK and dV written once.
    """
    d, e, w = shape.head_dim, shape.element_bytes, shape.sum_bytes
    q_rows, k_rows = shape.batch * shape.heads * shape.queries, shape.batch * shape.kv_heads * shape.keys
    met = _met(shape, tiles.back_queries, tiles.back_keys)  # [batch, tiles of queries, tiles of keys]
    rows = _sizes(shape.queries, tiles.back_queries)
    visits = shape.heads * int((met.sum(2) @ rows).sum())  # of queries by tiles of keys
    reached = shape.heads * int((met.any(2) @ rows).sum())
    rounded = reached * d if e < w else 0
    read = (
        2 * k_rows * d * e
        + visits * (2 * d * e + 2 * w)
        + 2 * q_rows * d * e
        + (visits - reached) * d * w
        + rounded * w
    )
    written = 2 * k_rows * d * e + visits * d * w + q_rows * w + rounded * e + (q_rows - reached) * d * e
    return Traffic(read, written)


def plain_traffic(shape: Shape) -> tuple[Traffic, Traffic]:
    """Of attention spelled out operator by operator, forward and backward, as emu.models does it, without dropout.

    Every operator reads its operands and writes its result: queries are scaled; scores, masked scores and weights are
    matrices in memory, and so are their gradients. With as many queries as keys, and k and v dense.
    """
    q = shape.batch * shape.heads * shape.queries * shape.head_dim * shape.element_bytes
    k = shape.batch * shape.kv_heads * shape.keys * shape.head_dim * shape.element_bytes
    scores = shape.batch * shape.heads * shape.queries * shape.keys * shape.element_bytes
    mask = shape.queries * shape.keys  # one byte each
    # In the order in which they run: what each operator reads and writes.
    forward = [(q, q), (q + k, scores), (scores + mask, scores), (scores, scores), (scores + k, q)]
    backward = [
        (scores + q, k),  # dV
        (q + k, scores),  # gradient of the weights
        (2 * scores, scores),  # softmax
        (scores + mask, scores),
        (scores + q, k),  # dK
        (scores + k, q),  # dQ
        (q, q),
    ]
    return Traffic(*map(sum, zip(*forward))), Traffic(*map(sum, zip(*backward)))


def attention_flops(shape: Shape) -> int:
    """Of the forward pass: four a pair of query and key that attends, and number of a head."""
    if shape.documents is None:
        pairs = causal_pairs(shape.queries, shape.keys) if shape.causal else shape.queries * shape.keys
        return 4 * shape.batch * shape.heads * pairs * shape.head_dim
    same = values(shape.documents)[:, :, None] == values(shape.documents)[:, None, :]
    pairs = int((np.tril(same) if shape.causal else same).sum()) * (shape.batch // len(same))
    return 4 * shape.heads * pairs * shape.head_dim


def _sizes(length: int, size: int) -> np.ndarray:
    """Of the tiles of a length."""
    return np.diff(np.append(np.arange(0, length, size), length))


def _met(shape: Shape, queries: int, keys: int) -> np.ndarray:
    """[batch, tiles of queries, tiles of keys]: whether any query of the one sees any key of the other."""
    ends, starts = np.append(np.arange(queries, shape.queries, queries), shape.queries), np.arange(0, shape.keys, keys)
    if not shape.queries:
        ends = ends[:0]
    met = starts < ends[:, None] if shape.causal else np.ones((len(ends), len(starts)), dtype=bool)
    if shape.documents is None or not met.size:
        return np.broadcast_to(met, (shape.batch, *met.shape))
    documents = values(shape.documents)
    seen = documents[:, :, None] == documents[:, None, :]
    seen = np.tril(seen) if shape.causal else seen
    by_query = np.logical_or.reduceat(seen, np.arange(0, shape.queries, queries), axis=1)
    met = np.logical_or.reduceat(by_query, starts, axis=2)
    return np.broadcast_to(met, (shape.batch, *met.shape[1:]))
