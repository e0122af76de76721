"""How a rank's tensor relates to the whole, in DTensor's words: one placement for every mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from emu.spmd.errors import EmuError, ReplicasDisagree
from emu.spmd.mesh import Mesh

COMBINE: dict[str, Callable[[Tensor], Tensor]] = {  # pieces stacked along dimension 0 -> the whole
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.sum(0) / len(x),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


@dataclass(frozen=True)
class Shard:
    """The whole is cut along `dim`; pieces may be uneven, and lie in the order of the axis."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same, bit for bit."""


@dataclass(frozen=True)
class Partial:
    """The whole is the sum (or "avg", "max", "min", "prod") of what the ranks of the axis hold."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in COMBINE:
            raise EmuError(f"there is no Partial({self.op!r})", f"use one of {', '.join(COMBINE)}")


Placement = Shard | Replicate | Partial


def split_sizes(length: int, parts: int) -> list[int]:
    """Lengths of the pieces of a balanced cut: they differ by at most one, the longer ones first."""
    short, longer = divmod(length, parts)
    return [short + (i < longer) for i in range(parts)]


@dataclass(frozen=True)
class Layout:
    """One placement per mesh axis; an axis that is not named is replicated."""

    placements: Mapping[str, Placement] = field(default_factory=dict)

    def __getitem__(self, axis: str) -> Placement:
        return self.placements.get(axis, Replicate())

    def local(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        """The piece of `whole` that `rank` holds (a view), under balanced cuts. A partial sum or product is whole on index 0."""
        piece = whole
        for axis, index in mesh.coords(rank).items():
            placement = self[axis]
            if isinstance(placement, Shard):
                sizes = split_sizes(piece.shape[placement.dim], mesh.axes[axis])
                piece = piece.split(sizes, placement.dim)[index]
            elif isinstance(placement, Partial) and index and placement.op in ("sum", "prod"):
                piece = torch.zeros_like(piece) if placement.op == "sum" else torch.ones_like(piece)
        return piece

    def whole(self, pieces: Mapping[int, Tensor], mesh: Mesh, name: str = "tensor") -> Tensor:
        """The whole tensor from every rank's piece.

        Args:
            pieces: global rank -> its tensor.
            name: what to call it in an error.

        Raises:
            ReplicasDisagree: replicas differ in shape or in any bit; names the ranks.
            EmuError: the layout names an axis that the mesh lacks.
        """
        if foreign := [axis for axis in self.placements if axis not in mesh.axes]:
            raise EmuError(
                f"the layout of {name!r} names axis {foreign[0]!r}, but the mesh has {', '.join(mesh.axes) or 'no axes'}",
                "name axes of the mesh",
            )
        return self._join(pieces, mesh, list(mesh.axes), {}, name)[0]

    def _join(
        self, pieces: Mapping[int, Tensor], mesh: Mesh, axes: Sequence[str], at: dict[str, int], name: str
    ) -> tuple[Tensor, int]:
        if not axes:
            rank = mesh.rank_at(at)
            return pieces[rank], rank
        axis, rest = axes[0], axes[1:]
        parts = [self._join(pieces, mesh, rest, {**at, axis: i}, name) for i in range(mesh.axes[axis])]
        tensors, first = [t for t, _ in parts], parts[0][1]
        placement = self[axis]
        if isinstance(placement, Shard):
            return torch.cat(tensors, placement.dim), first
        if isinstance(placement, Partial):
            return COMBINE[placement.op](torch.stack(tensors)), first
        for tensor, rank in parts[1:]:
            if not same_bits(tensor, tensors[0]):
                raise ReplicasDisagree(
                    f"{name!r} should be the same on ranks {first} and {rank} (replicated along {axis!r}), "
                    f"but differs{_how(tensors[0], tensor)}",
                    f"reduce it over {axis!r}, or state its layout if it is meant to differ",
                    name=name,
                    ranks=(first, rank),
                    axis=axis,
                )
        return tensors[0], first


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every value; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _how(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f": shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if a.dtype != b.dtype:
        return f": dtypes {a.dtype} and {b.dtype}"
    return f" by up to {float((a.double() - b.double()).abs().max()):.3g}" if a.numel() else ""
