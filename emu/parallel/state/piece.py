"""The one thing a strategy has to say about its state: which part of which tensor lies where on this rank."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """A run of elements of one named tensor, as this rank holds it.

    Fields:
        name: of the whole tensor, e.g. the parameter's name.
        shape: of the whole tensor.
        start: the first element held, counted in the flattened whole (row after row).
        tensor: the elements [start, start + len(tensor)), one-dimensional; it may be a view. Never padding. Several ranks
            may hold the same elements (replicas), and pieces of different ranks may overlap anyhow.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
