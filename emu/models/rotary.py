"""Rotary positions: turn each pair of numbers of a query or key by an angle that grows with its position.

Su et al. 2021, https://arxiv.org/abs/2104.09864; number i is paired with number i + head_dim / 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and signed sines, made once a forward and shared by every layer."""

    cos: Tensor  # [..., seq, 1, head_dim]
    sin: Tensor  # [..., seq, 1, head_dim]; its first half is negative


def rotation(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Rotation:
    """The tables that turn by positions * base ** (-2 i / head_dim), i = 0 .. head_dim / 2 - 1.

    Args:
        positions: [seq] or [batch, seq], integers.
        head_dim: size of one head, even.
        base: of the angles.
        dtype: of the model; angles are worked out in float32 at least.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, -head_dim, -2, dtype=exact, device=positions.device) / head_dim
    angles = positions[..., None] * torch.pow(base, exponents)  # [..., seq, head_dim / 2]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return Rotation(torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2))


def rotate(x: Tensor, tables: Rotation) -> Tensor:
    """Turn queries or keys x: [batch, seq, heads, head_dim]."""
    partner = x.roll(x.shape[-1] // 2, -1)  # the other number of each pair; the sign is in the table
    return (x * tables.cos + partner * tables.sin).to(x.dtype)  # under autocast x may be narrower than the tables
