"""Who holds which tokens of a sequence: contiguous, zigzag, striped, or balanced over documents. Plain host data.

What a rank computes, sends and is sent follows from it: `Cut.tokens`, `Cut.block`, `Cut.work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import cast

import torch
from torch import Tensor

from emu.parallel.attention.pieces import pieces
from emu.parallel.attention.tokens import Run, Tokens, tokens
from emu.parallel.context.dealing import within
from emu.parallel.context.holding import KINDS, held, neighbours, parts_of
from emu.parallel.context.rectangle import Block, around
from emu.spmd import EmuError, PlanError
from emu.spmd.layout import split_sizes

__all__ = ["KINDS", "Block", "Cut", "make_cut"]


@dataclass(frozen=True, eq=False)
class Cut:
    """Sequences of one length, cut over the ranks of a context-parallel group. Made by make_cut.

    Args:
        kind: how attention crosses ranks, one of KINDS.
        ranks: of the group.
        length: of a whole sequence, in tokens.
        documents: [rows, length] int64, on the host: tokens with the same number may see each other. None: one document.
        ulysses: how many neighbouring ranks exchange heads; the ring goes over groups of that many.
        ring: the cut over these groups, which attention sees: this one itself where no heads are exchanged.
    """

    kind: str
    ranks: int
    length: int
    documents: Tensor | None = None
    ulysses: int = 1
    ring: Cut = field(default=cast("Cut", None), repr=False)
    _tokens: tuple[Tokens, ...] = field(default=(), repr=False)
    _blocks: dict[tuple[str, int, int], Block] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ring is None:
            object.__setattr__(self, "ring", self)

    def tokens(self, i: int) -> Tokens:
        """What rank i of the group holds."""
        return self._tokens[i]

    @property
    def sizes(self) -> list[int]:
        """How many tokens of a sequence every rank holds; they differ by one at most."""
        return [len(t) for t in self._tokens]

    def block(self, i: int, j: int) -> Block:
        """Where queries of rank i see keys of rank j, worked out once."""
        return self._block("rank", i, j)

    def block_of_all(self, i: int) -> Block:
        """Where queries of rank i see keys of the whole sequence, in order of position."""
        return self._block("all", i, 0)

    def half_block(self, i: int, half: int) -> Block:
        """Where queries of rank i see the first (0) or the last (1) half of its own keys."""
        return self._block("half", i, half)

    def _block(self, of: str, i: int, j: int) -> Block:
        found = self._blocks.get((of, i, j))
        if found is None:
            with torch._C._DisableTorchDispatch():  # the host looks, and the device does not notice
                mine = self.tokens(i)
                if of == "half":
                    sizes = split_sizes(len(mine), 2)
                    found = around(pieces(mine, parts_of(mine, sizes)[j]), len(mine), j * sizes[0])
                else:
                    keys = self.tokens(j) if of == "rank" else tokens([Run(0, self.length)], self.documents)
                    found = around(pieces(mine, keys), len(keys), 0)
            self._blocks[of, i, j] = found
        return found

    def work(self, i: int) -> float:
        """How many pairs of a query and a key rank i attends: in one row, or with documents in all rows together.

        Ranks that exchange heads attend all pairs of their group, for their share of the heads, which is counted here.
        """
        if self.ring is not self:
            pairs = self.ring.work(i // self.ulysses)
            return pairs // self.ulysses if pairs % self.ulysses == 0 else pairs / self.ulysses
        return self._works[i]

    @cached_property
    def _works(self) -> list[int]:
        with torch._C._DisableTorchDispatch():
            if self.documents is None:
                return [int((t.positions + 1).sum()) for t in self._tokens]
            costs = torch.stack([torch.from_numpy(within(row.numpy())[0] + 1) for row in self.documents])
            return [int(costs.gather(1, self._by_row(t)).sum()) for t in self._tokens]

    def own(self, x: Tensor, i: int, dim: int = 1) -> Tensor:
        """What rank i holds of something whole, in its order.

        Args:
            x: [..., length, ...]; where documents make positions differ by row, its dim 0 are the rows.
            dim: the one of the tokens.

        Raises:
            EmuError: x has another length or other rows.
        """
        dim = self._fits(x, dim, self.length)
        mine = self.tokens(i)
        if mine.runs is None:
            return x.gather(dim, _index(mine.positions, x, dim))
        parts = [_slice(x, dim, run) for run in mine.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def joined(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole, in order, of what all ranks hold.

        Args:
            parts: of every rank, [..., its size, ...].
            dim: the one of the tokens.

        Raises:
            EmuError: parts of other lengths or rows.
        """
        if len(parts) != self.ranks:
            raise EmuError(f"{len(parts)} parts are not those of {self.ranks} ranks", "give one part for every rank")
        for part, size in zip(parts, self.sizes):
            dim = self._fits(part, dim, size)
        if self._back is not None:
            return self.in_order(torch.cat(list(parts), dim), dim)
        found = [parts[i].narrow(dim, at, count) for i, at, count in self._order]
        return found[0] if len(found) == 1 else torch.cat(found, dim) if found else parts[0]

    def in_order(self, x: Tensor, dim: int = 1) -> Tensor:
        """Tokens by position that lie by rank, as an all-gather gives them. Arguments as for own()."""
        dim = self._fits(x, dim, self.length)
        if self._back is None:
            return self.joined(x.split(self.sizes, dim), dim)
        return x.gather(dim, _index(self._back, x, dim))

    def by_rank(self, x: Tensor, dim: int = 1) -> Tensor:
        """Tokens by rank that lie by position, as a reduce-scatter takes them. Arguments as for own()."""
        dim = self._fits(x, dim, self.length)
        if self._back is None:
            found = [_slice(x, dim, run) for t in self._tokens for run in t.runs or ()]
            return found[0] if len(found) == 1 else torch.cat(found, dim) if found else x
        return x.gather(dim, _index(self._there, x, dim))

    @cached_property
    def _order(self) -> list[tuple[int, int, int]]:
        """Where the sequence lies, from its start to its end: rank, from which of its tokens on, how many."""
        found: list[tuple[int, int, int, int]] = []
        for i, t in enumerate(self._tokens):
            at = 0
            for run in t.runs or ():
                if run.step == 1:
                    found.append((run.start, i, at, len(run)))
                else:
                    found += [(place, i, at + n, 1) for n, place in enumerate(range(run.start, run.stop, run.step))]
                at += len(run)
        return [entry[1:] for entry in sorted(found)]

    @cached_property
    def _back(self) -> Tensor | None:
        """Where each token lies among those of all ranks, [length] or [rows, length]; None where few runs tell."""
        if all(t.runs is not None and all(run.step == 1 for run in t.runs) for t in self._tokens):
            return None
        with torch._C._DisableTorchDispatch():
            return self._there.argsort(-1)

    @cached_property
    def _there(self) -> Tensor:
        """Positions of all tokens, rank by rank, [length] or [rows, length]."""
        with torch._C._DisableTorchDispatch():
            return torch.cat([t.positions for t in self._tokens], -1)

    def _by_row(self, t: Tokens) -> Tensor:
        rows = 1 if self.documents is None else len(self.documents)
        return t.positions if t.positions.dim() == 2 else t.positions.expand(rows, -1)

    def _fits(self, x: Tensor, dim: int, length: int) -> int:
        at = dim % x.dim() if -x.dim() <= dim < x.dim() else -1
        if at < 0 or x.shape[at] != length:
            raise EmuError(
                f"dim {dim} of a tensor of shape {tuple(x.shape)} is not {length} tokens long",
                f"this is a cut of sequences of {self.length} tokens over {self.ranks} ranks, {self.sizes}",
            )
        rows = next((len(t.positions) for t in self._tokens if t.runs is None), None)
        if rows is not None and (at == 0 or x.shape[0] != rows):
            raise EmuError(
                f"a tensor of shape {tuple(x.shape)} has not the {rows} rows that the cut's documents have",
                f"let dim 0 be the rows: ranks hold other positions of each ({self.kind} balances documents)",
            )
        return at


def make_cut(kind: str, length: int, ranks: int, documents: Tensor | None = None, ulysses: int | None = None) -> Cut:
    """How sequences are cut over ranks.

    "ring" and "ulysses" cut into contiguous parts, "striped" deals tokens out one by one
    (https://arxiv.org/abs/2311.09431), "zigzag", "all-gather" and "usp" give every rank as much attended work as any
    other (dealing.py), of documents too, and equally many tokens. "usp" (https://arxiv.org/abs/2405.07719) does so over
    groups of `ulysses` neighbours, in which tokens lie contiguous.

    Args:
        kind: one of KINDS.
        length: of a sequence, in tokens: any.
        ranks: of the group.
        documents: [rows, length], whole numbers with values: tokens of a row with the same one may see each other.
        ulysses: of "usp", how many neighbours exchange heads, a divisor of ranks; None: the largest one that is no larger
            than the ring.

    Raises:
        PlanError: a kind that there is not, or `ulysses` that does not fit.
        EmuError: documents of another length or without values.
    """
    if kind not in KINDS:
        raise PlanError(
            f"context={kind!r} is no kind of context parallelism", f"use one of {', '.join(KINDS)}", field="context"
        )
    if ranks < 1 or length < 0:
        raise EmuError(f"{length} tokens cannot be cut over {ranks} ranks", "give a length and at least one rank")
    group = neighbours(kind, ranks, ulysses)
    if documents is None:
        return _plain(kind, length, ranks, group)
    if documents.is_meta or documents.dim() != 2 or documents.shape[1] != length or documents.is_floating_point():
        where = " without values" if documents.is_meta else ""
        raise EmuError(
            f"documents{where} {tuple(documents.shape)} of {documents.dtype} are not those of sequences of {length} tokens",
            "give host data: the number of each token's document, [rows, length], whole numbers",
        )
    with torch._C._DisableTorchDispatch():
        return _cut(kind, length, ranks, group, documents.detach().to("cpu", torch.int64))


@lru_cache(maxsize=256)
def _plain(kind: str, length: int, ranks: int, ulysses: int) -> Cut:
    with torch._C._DisableTorchDispatch():
        return _cut(kind, length, ranks, ulysses, None)


def _cut(kind: str, length: int, ranks: int, ulysses: int, documents: Tensor | None) -> Cut:
    if kind in ("ulysses", "usp"):
        ring = _cut("zigzag" if kind == "usp" else "ring", length, ranks // ulysses, 1, documents)
        parts = [part for t in ring._tokens for part in parts_of(t, split_sizes(len(t), ulysses))]
        return Cut(kind, ranks, length, documents, ulysses, ring, tuple(parts))
    return Cut(kind, ranks, length, documents, _tokens=tuple(held(kind, length, ranks, documents)))


def _index(positions: Tensor, x: Tensor, dim: int) -> Tensor:
    """Positions as gather wants them, on the device of x."""
    shape = [1] * x.dim()
    shape[dim] = positions.shape[-1]
    wanted = list(x.shape)
    wanted[dim] = positions.shape[-1]
    if positions.dim() == 2:
        shape[0] = len(positions)
    return positions.to(x.device).view(shape).expand(wanted)


def _slice(x: Tensor, dim: int, run: Run) -> Tensor:
    return x[(*(slice(None),) * dim, slice(run.start, run.stop, run.step))]
