"""One step of a tiled algorithm, as a student sees it, and the walk through all of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from emu.parallel.attention.tiles import Shape, Tiles
from emu.parallel.attention.tokens import host


@dataclass(frozen=True, eq=False)
class Step:
    """Something is loaded, computed or stored, for one tile of every head.

    Attributes:
        index: its number, from 0.
        kind: "load Q", "scores", "softmax", ...
        row: of the batch.
        queries, keys: the tile; None where the step is about all of them.
        read_bytes, written_bytes: of HBM, all heads together.
        held_bytes: of one core's memory, for its tile.
        values: what the core's memory holds now, by name: [kv_heads, heads of a group, queries, ...].
    """

    index: int
    kind: str
    row: int
    queries: slice | None
    keys: slice | None
    read_bytes: int
    written_bytes: int
    held_bytes: int
    values: Mapping[str, Tensor] = field(repr=False)

    def __str__(self) -> str:
        q, k = (f"{s.start}-{s.stop - 1}" if s is not None else "" for s in (self.queries, self.keys))
        moved = "".join(
            f" {verb} {size:,} B" for verb, size in (("reads", self.read_bytes), ("writes", self.written_bytes)) if size
        )
        return f"{self.index:>4}  row {self.row}  queries {q:<9} keys {k:<9} {self.kind:<12} {_told(self):<58}{moved}".rstrip()


def _told(step: Step) -> str:
    """What the step did, in figures of the first query of the first head."""
    values = step.values
    if any(x.is_meta for x in values.values()):
        return "shapes only"
    first = {name: x.flatten(0, 1)[0][0] if x.numel() else x.flatten() for name, x in values.items()}
    if not all(x.numel() for x in values.values()):
        return "nothing"
    if step.kind == "scores":
        shown = values["S"][values["S"] > -math.inf]
        hidden = values["S"].numel() - shown.numel()
        largest = f"largest {float(shown.max()):.3g}" if shown.numel() else "none seen"
        return f"S = scale Q K': {largest}" + (f", {hidden} of {values['S'].numel()} hidden" if hidden else "")
    if step.kind == "softmax":
        old, new, shrink, total = (float(first[name]) for name in ("old_m", "m", "shrink", "l"))
        return f"first query: m {old:.3g} -> {new:.3g}, old sums x {shrink:.3g}, l = {total:.4g}"
    if step.kind == "store O":
        return f"O / l: {_numbers(first['O'])}, m + log l = {float(first['lse']):.4g}"
    if step.kind.startswith("load"):
        return f"a core holds {step.held_bytes:,} B"
    return ", ".join(f"{name}: {_numbers(first[name])}" for name in values)


def _numbers(x: Tensor) -> str:
    """The first few numbers of a row."""
    row = x.reshape(-1)
    return " ".join(f"{float(value):.3g}" for value in row[:3]) + (" ..." if len(row) > 3 else "")


class Walk(ABC):
    """Goes through the steps of one pass, once, and counts what they move. Iterate, or run().

    Attributes:
        shape, tiles, scale: what is computed, and how.
        read_bytes, written_bytes: of HBM, so far.
        most_held_bytes: the most that one core has held of its tile.
    """

    def __init__(self, shape: Shape, tiles: Tiles, scale: float | None) -> None:
        self.shape, self.tiles = shape, tiles
        self.scale = 1 / math.sqrt(shape.head_dim or 1) if scale is None else scale
        self.wide = torch.float64 if shape.sum_bytes == 8 else torch.float32
        self.read_bytes = self.written_bytes = self.held_bytes = self.most_held_bytes = 0
        self._indices = count()
        self._steps: Iterator[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        if self._steps is None:
            self._steps = self.steps()
        return self._steps  # a walk that was left goes on where it was

    def run(self) -> None:
        """Goes all the way."""
        for _ in self:
            pass

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """One after the other, each carried out when it is given."""

    def step(
        self,
        kind: str,
        row: int,
        queries: slice | None,
        keys: slice | None = None,
        read: int = 0,
        written: int = 0,
        **values: Tensor,
    ) -> Step:
        self.read_bytes += read
        self.written_bytes += written
        return Step(next(self._indices), kind, row, queries, keys, read, written, self.held_bytes, values)

    def held(self, size: int) -> None:
        """Says what a core holds from now on."""
        self.held_bytes, self.most_held_bytes = size, max(self.most_held_bytes, size)

    def by_group(self, x: Tensor, at: slice) -> Tensor:
        """A tile of [heads, tokens, ...] as [kv_heads, heads of a group, tokens of the tile, ...], in which sums are taken."""
        return x[:, at].unflatten(0, (self.shape.kv_heads, -1)).to(self.wide)

    def shared(self, x: Tensor, at: slice) -> Tensor:
        """A tile of [kv_heads, tokens, head_dim], which a group's heads share."""
        return x[:, at].unsqueeze(1).to(self.wide)

    def scores(self, q: Tensor, k: Tensor, row: int, at: slice, seen: slice) -> Tensor:
        """scale Q K', -inf where a key is not seen."""
        scores = (q @ k.mT) * self.scale
        hidden = self.shape.hidden(row, at, seen)
        return scores if hidden is None else scores.masked_fill(host(hidden).to(q.device), -math.inf)
