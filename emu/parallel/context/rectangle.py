"""The rectangle of queries and keys that a kernel is given: no larger than what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from emu.parallel.attention.pieces import Piece


class Block(NamedTuple):
    """Where some queries see some keys: the smallest rectangle that has all of it, and the pieces that it consists of.

    Pieces are in local indices of the rectangle. Where nothing is seen there are none.
    """

    q: slice
    k: slice
    pieces: list[Piece]
    n_keys: int  # of all keys, in the rectangle or not


def around(found: Sequence[Piece], n_keys: int, first: int) -> Block:
    """The rectangle around some pieces, whose keys are counted from the `first` one on."""
    if not found:
        return Block(slice(0, 0), slice(0, 0), [], n_keys)
    q0, q1 = min(piece.q.start for piece in found), max(piece.q.stop for piece in found)
    k0, k1 = min(piece.k.start for piece in found), max(piece.k.stop for piece in found)
    shifted = [replace(piece, q=_moved(piece.q, q0), k=_moved(piece.k, k0)) for piece in found]
    return Block(slice(q0, q1), slice(first + k0, first + k1), shifted, n_keys)


def _moved(s: slice, by: int) -> slice:
    return slice(s.start - by, s.stop - by)
