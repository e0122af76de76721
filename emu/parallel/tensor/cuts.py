"""How one dim of a weight is cut over ranks: evenly, by attention heads, or part by part where several are fused.

A cut gives every rank ranges of the dim. They may be uneven, and ranks may share some: of fewer key and value heads than
ranks, several ranks hold the same one. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from emu.spmd import PlanError, split_sizes

Ranges = tuple[tuple[int, int], ...]  # (start, stop) along a dim, in the order in which a rank holds them


class Cut(Protocol):
    """Ranges of a dim for every rank."""

    def ranges(self, length: int, ranks: int, where: str) -> tuple[Ranges, ...]:
        """One entry per rank.

        Args:
            length: of the dim; ranks: over which it is cut; where: the module, for an error.

        Raises:
            PlanError: it cannot be cut so.
        """
        ...


def refuse(where: str, problem: str, hint: str, nearest: int | None = None) -> PlanError:
    """The error for a module that cannot be cut, in one line."""
    return PlanError(f"{where}: {problem}", hint, field="mesh", nearest=nearest)


@dataclass(frozen=True)
class Even:
    """Lengths that differ by at most one, the longer ones first.

    Args:
        may_be_empty: whether a rank may be left with nothing, as a vocabulary's rows may.
    """

    may_be_empty: bool = False

    def ranges(self, length: int, ranks: int, where: str) -> tuple[Ranges, ...]:
        if length < ranks and not self.may_be_empty:
            raise refuse(
                where, f"a dim of {length} cannot be cut over {ranks} ranks", f"use tp={length} or less", length
            )
        starts, out = 0, []
        for size in split_sizes(length, ranks):
            out.append(((starts, starts + size),) if size else ())
            starts += size
        return tuple(out)


@dataclass(frozen=True)
class Heads:
    """Query heads in equal shares, and with them the key and value heads that they read.

    Query head i reads key and value head i // (heads / kv_heads). A rank holds every one that a query head of its reads, so
    where heads are fewer than ranks, or do not divide, neighbours hold the same one.

    Args:
        heads, kv_heads, head_dim: of the attention.
        role: whether the dim has query heads ("q") or key or value heads ("kv").
    """

    heads: int
    kv_heads: int
    head_dim: int
    role: Literal["q", "kv"] = "q"

    def _check(self, ranks: int, where: str) -> None:
        if self.heads % ranks:
            fits = [n for n in range(1, self.heads + 1) if not self.heads % n]
            nearest = min(fits, key=lambda n: abs(n - ranks))
            raise refuse(
                where,
                f"{self.heads} heads cannot be shared out evenly over {ranks} ranks",
                f"use a divisor of {self.heads}: tp={nearest} is the nearest",
                nearest,
            )

    def served(self, rank: int, ranks: int) -> list[int]:
        """Which key and value head every query head of a rank reads, numbered within the rank's own."""
        each, group = self.heads // ranks, self.heads // self.kv_heads
        read = [q // group for q in range(rank * each, (rank + 1) * each)]
        return [head - read[0] for head in read]

    def kv_of(self, rank: int, ranks: int) -> range:
        """The key and value heads that a rank holds."""
        each, group = self.heads // ranks, self.heads // self.kv_heads
        return range(rank * each // group, ((rank + 1) * each - 1) // group + 1)

    def holders(self, head: int, ranks: int) -> list[int]:
        """The ranks that hold a key and value head, in order."""
        return [r for r in range(ranks) if head in self.kv_of(r, ranks)]

    def ranges(self, length: int, ranks: int, where: str) -> tuple[Ranges, ...]:
        self._check(ranks, where)
        n = self.heads if self.role == "q" else self.kv_heads
        if length != n * self.head_dim:
            raise refuse(
                where,
                f"a dim of {length} is not {n} heads of {self.head_dim}",
                "say the heads as the module has them: Heads(heads, kv_heads, head_dim, role)",
            )
        each, d = self.heads // ranks, self.head_dim
        if self.role == "q":
            return tuple(((r * each * d, (r + 1) * each * d),) for r in range(ranks))
        return tuple(((kv.start * d, kv.stop * d),) for kv in (self.kv_of(r, ranks) for r in range(ranks)))


@dataclass(frozen=True)
class Parts:
    """Several weights fused into one, each cut by itself: a rank holds its piece of the first, then of the second, ...

    Args:
        cuts: of every part; lengths: of every part along the dim, e.g. of [Q | K | V], or of [gate | up].
    """

    cuts: tuple[Cut, ...]
    lengths: tuple[int, ...]

    def ranges(self, length: int, ranks: int, where: str) -> tuple[Ranges, ...]:
        if len(self.cuts) != len(self.lengths) or sum(self.lengths) != length:
            raise refuse(
                where,
                f"parts of {list(self.lengths)} with {len(self.cuts)} cuts do not make up a dim of {length}",
                "give one cut and one length for every fused part",
            )
        out: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        first = 0
        for cut, part in zip(self.cuts, self.lengths):
            for mine, some in zip(out, cut.ranges(part, ranks, where)):
                mine += [(first + a, first + b) for a, b in some]
            first += part
        return tuple(tuple(mine) for mine in out)


def fused_qkv(heads: int, kv_heads: int, head_dim: int) -> Parts:
    """The cut of one weight with rows [Q | K | V]."""
    q, kv = Heads(heads, kv_heads, head_dim, "q"), Heads(heads, kv_heads, head_dim, "kv")
    return Parts((q, kv, kv), (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))


def fused_gate_up(ffn: int) -> Parts:
    """The cut of one weight with rows [gate | up]."""
    return Parts((Even(), Even()), (ffn, ffn))


def taken(tensor, ranges: Sequence[tuple[int, int]], dim: int):
    """The ranges of a tensor along a dim, end to end, as a new tensor."""
    import torch

    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in ranges] or [tensor.narrow(dim, 0, 0)]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous().clone()


def shared_ranges(ranges: Sequence[Ranges], rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """What of a rank's own dim others hold, too: (start, stop, holders), counted within the rank's own piece.

    Ranges are cut where the set of holders changes; those that the rank holds alone are left out.
    """
    edges = sorted({edge for some in ranges for pair in some for edge in pair})
    out: list[tuple[int, int, tuple[int, ...]]] = []
    at = 0
    for start, stop in ranges[rank]:
        inside = [edge for edge in edges if start < edge < stop]
        for a, b in zip([start, *inside], [*inside, stop]):
            holders = tuple(r for r, some in enumerate(ranges) if any(x <= a and b <= y for x, y in some))
            if len(holders) > 1:
                out.append((at + a - start, at + b - start, holders))
        at += stop - start
    merged: list[tuple[int, int, tuple[int, ...]]] = []
    for start, stop, holders in out:
        if merged and merged[-1][2] == holders and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop, holders)
        else:
            merged.append((start, stop, holders))
    return merged
