"""What stages must know of each other's outputs: shapes and dtypes, which travel on the host, once for every kind of batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


class Form(NamedTuple):
    """What an output is like.

    Fields:
        shape, dtype: of the tensor.
        length: tokens of the whole sequence, where a rank has some of them; otherwise 0.
        units: the shape and dtype that every unit up to here returned, in the units' order; None: no single tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    length: int = 0
    units: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...] = ()

    def words(self) -> list[int]:
        """The same as whole numbers."""
        out = [self.length]
        for unit in ((self.shape, self.dtype), *self.units):
            out += [-1] if unit is None else [DTYPES.index(unit[1]), len(unit[0]), *unit[0]]
        return out

    @classmethod
    def of(cls, words: Sequence[int]) -> Form:
        """What `words` said."""
        units: list[Any] = []
        at = 1
        while at < len(words):
            if words[at] < 0:
                units.append(None)
                at += 1
                continue
            end = at + 2 + words[at + 1]
            units.append((tuple(words[at + 2 : end]), DTYPES[words[at]]))
            at = end
        (shape, dtype), *rest = units
        return cls(shape, dtype, words[0], tuple(rest))
