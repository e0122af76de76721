"""How a rank's tensor relates to the whole, in DTensor's words: one placement for every mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from emu.spmd.errors import EmuError, ReplicasDisagree
from emu.spmd.mesh import FOLDED, Mesh
from emu.spmd.slices import Range, Slices, chosen, merged

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


@dataclass(frozen=True)
class Only:
    """Only the ranks at these indices of the axis hold it, all the same, bit for bit: a layer of one pipeline stage.

    Args:
        at: indices along the axis, lowest first.
    """

    at: tuple[int, ...]


Placement = Shard | Slices | Replicate | Partial | Only


def split_sizes(length: int, parts: int) -> list[int]:
    """Lengths of the pieces of a balanced cut: they differ by at most one, the longer ones first.

    >>> emu.spmd.split_sizes(10, 4)
    [3, 3, 2, 2]
    """
    short, longer = divmod(length, parts)
    return [short + (i < longer) for i in range(parts)]


@dataclass(frozen=True)
class Layout:
    """One placement per mesh axis; an axis that is not named is replicated.

    Cuts of the outer axes come first: an inner axis cuts what they leave. The axes may be the expert axes "ep" and "etp",
    into which the ranks of a stage are folded, instead of the dense ones; what is not named among them and "edp" is
    replicated, as among the dense ones. "pp" goes with either.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)

    def __getitem__(self, axis: str) -> Placement:
        return self.placements.get(axis, Replicate())

    def holds(self, mesh: Mesh, rank: int) -> bool:
        """Whether a rank holds any of it (or an empty piece): not where the layout says that only others do."""
        coords = mesh.coords(rank)
        only = [(axis, p) for axis, p in self.placements.items() if isinstance(p, Only)]
        return all(coords.get(axis, 0) in p.at for axis, p in only)

    def held(self, shape: Sequence[int], mesh: Mesh, rank: int, name: str = "tensor") -> tuple[tuple[Range, ...], ...]:
        """For every dimension of a whole of that shape, the ranges of it that `rank` holds, end to end, without empty ones.

        Shard cuts are balanced. What is partial is held whole.

        >>> layout = emu.Layout({"dp": emu.Shard(0), "tp": emu.Shard(1)})
        >>> layout.held((4, 6), emu.Mesh(dp=2, tp=2), rank=1)  # rows 0 and 1, columns 3 to 5
        (((0, 2),), ((3, 6),))

        Args:
            name: what to call it in an error.

        Raises:
            EmuError: an axis that the mesh lacks, a dimension that the shape lacks, ranges that are not the shape's.
        """
        folded = self._folded(mesh, name)
        if not self.holds(mesh, rank):
            return tuple(() for _ in shape)
        kept = [[(0, int(n))] for n in shape]
        sizes, coords = mesh.sizes(folded), mesh.coords(rank, folded)
        for axis, placement in self._placed(mesh, folded):
            if not isinstance(placement, (Shard, Slices)):
                continue
            n, index, dim = sizes[axis], coords[axis], placement.dim
            if not -len(kept) <= dim < len(kept):
                raise EmuError(
                    f"{name!r} of shape {list(shape)} has no dimension {dim} that {axis!r} could cut",
                    f"cut one of its {len(kept)} dimensions" if kept else "replicate a single number",
                )
            length = sum(stop - start for start, stop in kept[dim])
            if isinstance(placement, Slices):
                placement.check(n, length, repr(name), axis)
                wanted = placement.ranges[index]
            else:
                cut = split_sizes(length, n)
                wanted = ((sum(cut[:index]), sum(cut[: index + 1])),)
            kept[dim] = [part for start, stop in wanted for part in chosen(kept[dim], start, stop)]
        return tuple(merged(ranges) for ranges in kept)

    def local(self, whole: Tensor, mesh: Mesh, rank: int, name: str = "tensor") -> Tensor:
        """The piece of `whole` that `rank` holds. A partial sum or product is whole on index 0.

        It is a view, unless it takes several ranges of a dimension.

        Raises:
            EmuError: as for `held`.
        """
        piece = whole
        for dim, ranges in enumerate(self.held(whole.shape, mesh, rank, name)):
            if ranges == ((0, whole.shape[dim]),):
                continue
            parts = [piece.narrow(dim, start, stop - start) for start, stop in ranges or ((0, 0),)]
            piece = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        folded = self._folded(mesh, name)
        coords = mesh.coords(rank, folded)
        for axis, placement in self._placed(mesh, folded):
            if isinstance(placement, Partial) and coords[axis] and placement.op in ("sum", "prod"):
                piece = torch.zeros_like(piece) if placement.op == "sum" else torch.ones_like(piece)
        return piece

    def whole(self, pieces: Mapping[int, Tensor], mesh: Mesh, name: str = "tensor") -> Tensor:
        """The whole tensor from every rank's piece.

        Args:
            pieces: global rank -> its tensor.
            name: what to call it in an error.

        Raises:
            ReplicasDisagree: replicas differ in shape or in any bit; names the ranks.
            EmuError: the layout names an axis that the mesh lacks, or a piece has not the length that the layout says.
        """
        folded = self._folded(mesh, name)
        # Replicas are joined first: as single pieces, they are named if they differ.
        axes = sorted(mesh.sizes(folded), key=lambda axis: isinstance(self[axis], (Replicate, Only)))
        return self._join(pieces, mesh, folded, axes, {}, name)[0]

    def _folded(self, mesh: Mesh, name: str) -> bool:
        """Whether ranks are arranged along the expert axes."""
        known = (*mesh.axes, *FOLDED)
        if foreign := [axis for axis in self.placements if axis not in known]:
            raise EmuError(
                f"the layout of {name!r} names axis {foreign[0]!r}, but the mesh has {', '.join(mesh.axes) or 'no axes'}",
                "name axes of the mesh",
            )
        folded = [axis for axis in self.placements if axis in FOLDED]
        if folded and (dense := [axis for axis in self.placements if axis not in (*FOLDED, "pp")]):
            raise EmuError(
                f"the layout of {name!r} names the expert axis {folded[0]!r} and the dense axis {dense[0]!r}",
                "describe it along ep and etp, or along the dense axes: both arrange the same ranks",
            )
        return bool(folded)

    def _placed(self, mesh: Mesh, folded: bool) -> list[tuple[str, Placement]]:
        return [(axis, self.placements[axis]) for axis in mesh.sizes(folded) if axis in self.placements]

    def _join(
        self, pieces: Mapping[int, Tensor], mesh: Mesh, folded: bool, axes: Sequence[str], at: dict[str, int], name: str
    ) -> tuple[Tensor, int]:
        """What lies along some axes at a place along the others, and the first rank there."""
        if not axes:
            rank = mesh.rank_at(at, folded)
            return pieces[rank], rank
        axis, rest = axes[0], axes[1:]
        placement = self[axis]
        indices = placement.at if isinstance(placement, Only) else range(mesh.sizes(folded)[axis])
        parts = [self._join(pieces, mesh, folded, rest, {**at, axis: i}, name) for i in indices]
        tensors, ranks = [t for t, _ in parts], [rank for _, rank in parts]
        if isinstance(placement, Shard):
            return torch.cat(tensors, placement.dim), ranks[0]
        if isinstance(placement, Slices):
            return _joined(placement, tensors, ranks, axis, name), ranks[0]
        if isinstance(placement, Partial):
            return COMBINE[placement.op](torch.stack(tensors)), ranks[0]
        for tensor, rank in zip(tensors[1:], ranks[1:]):
            if not same_bits(tensor, tensors[0]):
                raise ReplicasDisagree(
                    f"{name!r} should be the same on ranks {ranks[0]} and {rank} (replicated along {axis!r}), "
                    f"but differs{_how(tensors[0], tensor)}",
                    f"reduce it over {axis!r}, or state its layout if it is meant to differ",
                    name=name,
                    ranks=(ranks[0], rank),
                    axis=axis,
                )
        return tensors[0], ranks[0]


def _joined(slices: Slices, tensors: Sequence[Tensor], ranks: Sequence[int], axis: str, name: str) -> Tensor:
    """The whole from its slices, of which one rank each is named."""
    slices.check(len(tensors), None, repr(name), axis)
    for index, (tensor, rank) in enumerate(zip(tensors, ranks)):
        if not -tensor.dim() <= slices.dim < tensor.dim() or tensor.shape[slices.dim] != slices.length(index):
            raise EmuError(
                f"{name!r} on rank {rank} has shape {list(tensor.shape)}, but its ranges of dimension {slices.dim} along "
                f"{axis!r} are {slices.length(index)} long",
                "let the layout say what the rank holds",
                name=name,
                rank=rank,
            )
    parts = [tensors[0].narrow(slices.dim, 0, 0)]
    for start, stop, holders in slices.cells():
        held = [(tensors[i].narrow(slices.dim, at, stop - start), ranks[i]) for i, at in holders]
        (first, first_rank), others = held[0], held[1:]
        for tensor, rank in others:
            if not same_bits(tensor, first):
                raise ReplicasDisagree(
                    f"{name!r} should be the same on ranks {first_rank} and {rank} in {start} to {stop} of dimension "
                    f"{slices.dim} (both hold it along {axis!r}), but differs{_how(first, tensor)}",
                    "let whoever holds the same elements sum their gradients, and start from the same values",
                    name=name,
                    ranks=(first_rank, rank),
                    axis=axis,
                    range=(start, stop),
                )
        parts.append(first)
    return torch.cat(parts, slices.dim)


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
