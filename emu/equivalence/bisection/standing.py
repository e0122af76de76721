"""How what a rank made stands to the reference: found there, a part of a sum that is, or in none of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from emu.equivalence.bisection.pool import Pool
from emu.equivalence.bisection.recorder import Made, Record
from emu.spmd import Mesh

NOISE = 1e-13  # of what it was made of: what is left of a sum that is truly zero
EMPTY = ("empty", "new_empty")  # ops that leave memory as it was
TURNS = "microbatches"  # in place of an axis: what is made at one place, time after time, is summed


class Standing(NamedTuple):
    """Of one tensor.

    Attributes:
        found: the reference's tensor whose numbers it has, or has once it is summed; None if there is none.
        over: the axes over which it must be summed first.
        says_nothing: it is all zero, empty, or has whole numbers only.
    """

    found: Made | None
    over: tuple[str, ...] = ()
    says_nothing: bool = False

    @property
    def right(self) -> bool:
        return self.found is not None or self.says_nothing


class Standings:
    """Looks up what a program made among what its reference made, each tensor once."""

    def __init__(self, record: Record, reference: Record, mesh: Mesh) -> None:
        self.record, self.mesh = record, mesh
        values = [(made.value, made) for made in reference.made if made.value is not None]
        self._pool = Pool([*values, *_products(reference)])
        self._known: dict[int, Standing] = {}  # by time
        self._sums: dict[tuple[tuple[str, ...], int, tuple[int, ...]], Made | None] = {}  # by kind, turn and ranks
        self._born: dict[int, bool] = {}
        self._recovers: dict[int, bool] = {}
        self._covered: dict[tuple[tuple[str, ...], int, int], float] = {}
        self._users: dict[int, list[Made]] = {}  # by time: what was made of it
        for made in record.made:
            for x in made.inputs:
                self._users.setdefault(x.time, []).append(made)
        wide = [axis for axis, n in mesh.axes.items() if n > 1]
        self._along = {(rank, axis): mesh.members(rank, axis) for rank in range(mesh.size) for axis in wide}
        self._groups = {  # by rank: over which axes, and the ranks that a sum over them has
            rank: [(axes, mesh.members(rank, *axes)) for n in range(len(wide) + 1) for axes in combinations(wide, n)]
            for rank in range(mesh.size)
        }

    def of(self, made: Made) -> Standing:
        known = self._known.get(made.time)
        if known is None:
            known = self._known[made.time] = self._look(made)
        return known

    def peers(self, made: Made) -> list[Made]:
        """What all ranks made at this place, this one too, the same time."""
        every = (self.record.by_kind.get((rank, made.kind), ()) for rank in range(self.mesh.size))
        return [same[made.turn] for same in every if len(same) > made.turn]

    def _look(self, made: Made) -> Standing:
        if made.value is not None and not bool(made.value.isfinite().all()):
            return Standing(None)
        if made.value is None or _size(made) <= NOISE * max(map(_size, made.inputs), default=0.0):
            return Standing(None, says_nothing=True)
        found = self._pool.find(made.value)
        if found is not None:
            return Standing(found)
        for turns, axes, members in self._sums_of(made):
            key = made.kind, -1 if turns else made.turn, members
            if key not in self._sums:  # once for all that are summed
                parts = self._parts(made, turns, axes, members)
                self._sums[key] = self._pool.find(total(parts)) if parts else None
            if self._sums[key] is not None:
                return Standing(self._sums[key], (TURNS,) * turns + axes)
        return Standing(None)

    def _sums_of(self, made: Made) -> Iterator[tuple[bool, tuple[str, ...], tuple[int, ...]]]:
        """What it may be a part of: whether of all turns, over which axes, and over which ranks."""
        for turns in (False, True) if len(self.record.by_kind[made.rank, made.kind]) > 1 else (False,):
            for axes, members in self._groups[made.rank]:
                if axes or turns:
                    yield turns, axes, members

    def _parts(self, made: Made, turns: bool, axes: tuple[str, ...], members: tuple[int, ...]) -> list[Made]:
        """What is summed; nothing if a rank has no part, or has the same as another."""
        parts: list[Made] = []
        for member in members:
            same = self.record.by_kind.get((member, made.kind), ())
            if len(same) <= made.turn:
                return []
            parts += same if turns else (same[made.turn],)
        return parts if _alike(parts) and not self._replicated(parts, axes) else []

    def _replicated(self, parts: list[Made], axes: tuple[str, ...]) -> bool:
        """Whether along one of the axes all ranks made the same: those are copies, and no parts of a sum."""
        by_rank = {part.rank: part.value for part in parts}
        for axis in axes:
            groups = {self._along[rank, axis] for rank in by_rank}
            if all(_same([by_rank[member] for member in group]) for group in groups):
                return True
        return False

    def stands_still(self, made: Made) -> bool:
        """Whether it is what one of its inputs was already, and another input is wrong: a bound that bounds nothing.

        So it says nothing of that other input.
        """
        found = self.of(made).found
        if found is None or made.members or len(made.inputs) < 2:
            return False
        there = [self.of(x) for x in made.inputs]
        same = any(standing.found is found for standing in there)
        return same and any(not s.right and not self.born(x) for x, s in zip(made.inputs, there))

    def covered(self, made: Made) -> float:
        """Which share of the reference's tensor all ranks have between them, of what is made at this place."""
        found, over, _ = self.of(made)
        if found is None:
            return 1.0
        key = made.kind, made.turn, found.time
        if key not in self._covered:
            every = [self.record.by_kind.get((rank, made.kind), []) for rank in range(self.mesh.size)]
            turns = [self._covered_by(found, over, turn) for turn in zip_longest(*every)]
            # Microbatches have a part each; where one time is enough for all, every time should be.
            whole = self._covered_by(found, over, chain(*every)) if max(turns) < 1 else turns[made.turn]
            self._covered[key] = whole
        return self._covered[key]

    def _covered_by(self, found: Made, over: tuple[str, ...], every: Iterable[Made | None]) -> float:
        there = [made for made in every if made is not None and made.value is not None]
        if over:  # of what is still to be summed, the sums
            axes = tuple(axis for axis in over if axis != TURNS)
            groups: dict[tuple[int, ...], list[Made]] = {}
            for made in there:
                groups.setdefault(self.mesh.members(made.rank, *axes), []).append(made)
            return self._pool.covered(found, [total(parts) for parts in groups.values() if _alike(parts)])
        return self._pool.covered(found, [made.value for made in there if made.value is not None])

    def in_order(self, made: Made, members: tuple[int, ...]) -> bool:
        """Whether what these ranks made, one below or beside the other, is in the reference, too."""
        same = [self.record.by_kind.get((member, made.kind), ()) for member in members]
        values = [its[made.turn].value for its in same if len(its) > made.turn]
        tables = [v.reshape(-1, v.shape[-1]) for v in values if v is not None and v.dim()]
        if len(tables) < len(members):
            return False
        along = [dim for dim in (0, 1) if len({table.shape[1 - dim] for table in tables}) == 1]
        return any(self._pool.find(torch.cat(tables, dim)) is not None for dim in along)

    def times(self, made: Made) -> tuple[float, tuple[str, ...]] | None:
        """How many times a tensor of the reference it is, if it is a simple multiple of one; or is once it is summed."""
        if made.value is None:
            return None
        n = max(self.mesh.size, 4)
        sums = (((TURNS,) * which[0] + which[1], self._parts(made, *which)) for which in self._sums_of(made))
        for over, value in [((), made.value), *((over, total(parts)) for over, parts in sums if parts)]:
            for factor in [-1.0, *(float(k) for k in range(2, n + 1)), *(1.0 / k for k in range(2, n + 1))]:
                if self._pool.find(value / factor) is not None:
                    return factor, over
        return None

    def recovers(self, made: Made) -> bool:
        """Whether something is found that the same layer made of it, in the same direction: then it is a step on the way.

        A block of attention is such a step: no tensor of one device has its numbers, and the merged blocks are right.
        Single numbers prove nothing: a loss function counts its labels, whatever it is given.
        """
        stack = [made]
        while stack:
            at = stack[-1]
            if at.time in self._recovers:
                stack.pop()
                continue
            users = [x for x in self._users.get(at.time, ()) if (x.layer, x.direction) == (at.layer, at.direction)]
            users = [x for x in users if not self.of(x).says_nothing]
            if any(self.of(x).found is not None and not x.is_number and not self.stands_still(x) for x in users):
                self._recovers[at.time] = True
                continue
            unknown = [x for x in users if x.time not in self._recovers and self.of(x).found is None]
            if unknown:
                stack += unknown
                continue
            self._recovers[at.time] = any(self._recovers.get(x.time, False) for x in users)
        return self._recovers[made.time]

    def born(self, made: Made) -> bool:
        """Whether nothing that went into it, near or far, is found: a rank's own numbers, such as weights to be replaced."""
        stack = [made]
        while stack:
            at = stack[-1]
            if at.time in self._born:
                stack.pop()
                continue
            standing = self.of(at)
            if standing.right:
                self._born[at.time] = standing.says_nothing
                continue
            if any(self.of(x).found is not None for x in at.inputs):
                self._born[at.time] = False
                continue
            unknown = [x for x in at.inputs if x.time not in self._born and x.time < at.time]
            if unknown:
                stack += unknown
                continue
            self._born[at.time] = all(self._born.get(x.time, True) for x in at.inputs)
        return self._born[made.time]


def _products(reference: Record) -> Iterator[tuple[Tensor, Made]]:
    """Products to which a bias was added at once: a program that cuts them adds it later."""
    for made in reference.made:
        if made.op == "addmm" and made.value is not None and (bias := made.inputs[0].value) is not None:
            yield made.value - bias, made


def total(parts: list[Made]) -> Tensor:
    """The sum of tensors, in float64."""
    values = [part.value for part in parts if part.value is not None]
    out = values[0].clone()
    for value in values[1:]:
        out += value
    return out


def _size(made: Made) -> float:
    """The largest finite number in it; 0 where it has none, or where nobody wrote any yet."""
    if made.value is None or made.op.startswith(EMPTY):
        return 0.0
    return float(made.value.abs().nan_to_num(0.0, posinf=0.0).max()) if made.value.numel() else 0.0


def _same(values: list[Tensor | None]) -> bool:
    first = values[0]
    return first is not None and all(v is not None and torch.equal(v, first) for v in values[1:])


def _alike(parts: list[Made]) -> bool:
    first = parts[0].value
    return all(part.value is not None and first is not None and part.value.shape == first.shape for part in parts)
