"""Which rectangles of queries and keys meet: whole, causal, or by a mask.

Query i of some tokens sees the first seen[i] of some keys: those whose position is not later than its own. Drawn over
queries that is a staircase, and for every usual cut of a sequence it has few corners: it stays level, jumps, or grows by
one key a query. So a few whole and causal rectangles tile what is below it: few calls of a fast kernel, and no mask.
Documents break that; then keys are taken in strips, each with the queries that see any of it and a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from emu.parallel.attention.tokens import Tokens, host, values

# A staircase with more corners than that is one masked rectangle: no usual cut has so many.
MOST_TILES = 32
# Keys of one masked piece, so that queries of later documents need not meet the keys of earlier ones.
STRIP_KEYS = 512


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of queries and keys, in local indices. No two pieces share a pair.

    Args:
        q, k: which queries and which keys.
        causal: the i-th query of the rectangle sees its first i + 1 keys (where there are more queries than keys, the
            rest see all). False: every query sees every key, unless there is a mask.
        mask: [rows or 1, queries, keys] bool on the host, True where a key is seen; None for whole and causal pieces.
        pairs: how many pairs of a query and a key attend: in one row, or in all rows together if `summed`.
        summed: whether pairs are of all rows together, because rows differ (documents, positions by row).
    """

    q: slice
    k: slice
    causal: bool
    mask: Tensor | None
    pairs: int
    summed: bool = False

    @property
    def queries(self) -> int:
        return self.q.stop - self.q.start

    @property
    def keys(self) -> int:
        return self.k.stop - self.k.start


def pieces(queries: Tokens, keys: Tokens) -> list[Piece]:
    """The rectangles in which queries see keys: those at their own or an earlier position, in the same document.

    Args:
        queries, keys: of the same rows, either both with documents or both without.

    Returns:
        pieces in increasing order of keys; [] where nothing is seen.

    Raises:
        ValueError: only one of the two has documents.
    """
    if (queries.documents is None) != (keys.documents is None):
        raise ValueError("of queries and keys only one knows its documents: give documents to both or to neither")
    if not len(queries) or not len(keys):
        return []
    q, k = values(queries.positions), values(keys.positions)
    if queries.documents is None and keys.documents is None and q.ndim == k.ndim == 1:
        return _tiles(np.searchsorted(k, q, side="right")) or _strips(queries, keys, summed=False)
    return _strips(queries, keys, summed=True)


def attended(found: list[Piece]) -> int:
    """How many pairs of a query and a key attend in all pieces (see Piece.pairs)."""
    return sum(piece.pairs for piece in found)


def causal_pairs(queries: int, keys: int) -> int:
    """How many pairs a causal rectangle has: query i sees min(i + 1, keys)."""
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def _tiles(seen: np.ndarray) -> list[Piece]:
    """Rectangles that tile the area below a staircase; [] where it is empty or has too many corners."""
    queries, found, done = len(seen), [], 0
    grows = np.diff(seen) == 1
    ends = np.append(np.flatnonzero(~grows), queries - 1)  # a diagonal ends where the next query sees not one key more
    while done < seen[-1]:
        first = int(np.searchsorted(seen, done, side="right"))  # the first query that sees a new key
        last = int(ends[np.searchsorted(ends, first)])
        corner, top = int(seen[first]) - 1, int(seen[last])
        if last == first:  # no diagonal
            corner = top
        if corner > done:
            found.append(_tile(first, queries, done, corner, causal=False))
        if top > corner:
            found.append(_tile(first, queries, corner, top, causal=True))
        done = top
        if len(found) > MOST_TILES:
            return []
    return found


def _tile(q0: int, q1: int, k0: int, k1: int, causal: bool) -> Piece:
    pairs = causal_pairs(q1 - q0, k1 - k0) if causal else (q1 - q0) * (k1 - k0)
    return Piece(slice(q0, q1), slice(k0, k1), causal, None, pairs)


def _strips(queries: Tokens, keys: Tokens, summed: bool) -> list[Piece]:
    """Strips of keys with the queries that see any of them, in any row."""
    found = []
    for k0 in range(0, len(keys), STRIP_KEYS):
        seen = _seen(queries, keys, slice(k0, min(k0 + STRIP_KEYS, len(keys))))
        q, k = np.flatnonzero(seen.any((0, 2))), np.flatnonzero(seen.any((0, 1)))
        if len(q):
            box = slice(int(q[0]), int(q[-1]) + 1), slice(int(k[0]), int(k[-1]) + 1)
            part = seen[:, box[0], box[1]]
            whole = bool(part.all())
            causal = not whole and bool((part == np.tri(*part.shape[1:], dtype=bool)).all())
            mask = None if whole or causal else host(part)
            at = slice(k0 + box[1].start, k0 + box[1].stop)
            found.append(Piece(box[0], at, causal, mask, int(part.sum()), summed))
    return found


def _seen(queries: Tokens, keys: Tokens, strip: slice) -> np.ndarray:
    """[rows or 1, queries, keys of the strip] bool."""
    q, k = (np.atleast_2d(values(t.positions)) for t in (queries, keys))
    seen = k[:, None, strip] <= q[:, :, None]
    if queries.documents is not None and keys.documents is not None:
        seen = seen & (values(queries.documents)[:, :, None] == values(keys.documents)[:, None, strip])
    return seen
