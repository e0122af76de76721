"""A moment of a program: everything as it stands before one step."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emu.cost import PricingError, Timeline, price
from emu.hardware import Cluster
from emu.spmd import EmuError, Mesh
from emu.stepping.chunks import Walk, walked
from emu.stepping.history import History
from emu.stepping.meetings import Carried
from emu.stepping.ops import Op
from emu.stepping.situation import Situation, so_far
from emu.stepping.tensors import Held, copied, frames_of, held
from emu.trace.trace import Trace

if TYPE_CHECKING:
    from emu.stepping.execution import Execution


class Moment:
    """Before step number `index`: how every rank stands. What needs the tensors themselves runs the program up to here again,
    unless it stands here already.

    Args:
        standing: gives the execution that stands before a step.
        situation: gives the situation before a step.
    """

    def __init__(
        self,
        index: int,
        history: History,
        mesh: Mesh,
        cluster: Cluster,
        situation: Callable[[int], Situation],
        standing: Callable[[int], Execution],
    ) -> None:
        self.index, self.mesh, self.cluster = index, mesh, cluster
        self.history, self._cuts = history, len(history.cuts)
        self._situation, self._standing = situation, standing

    def _known(self) -> History:
        if any(cut <= self.index for cut in self.history.cuts[self._cuts :]):
            raise EmuError(
                f"step {self.index} is another one now: another rank was let go first", "ask the stepper for it again"
            )
        return self.history

    @property
    def op(self) -> Op | None:
        """The step that is about to be taken; None at the end."""
        ops = self._known().ops
        return ops[self.index] if self.index < len(ops) else None

    @property
    def error(self) -> BaseException | None:
        """What ended the program, if this is its end."""
        history = self._known()
        return history.error if history.ended and self.index >= len(history) else None

    def situation(self) -> Situation:
        """Memory, streams and communications, from the record."""
        self._known()
        return self._situation(self.index)

    def rank(self, rank: int) -> RankMoment:
        """One rank.

        Raises:
            EmuError: there is no such rank.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in self.history.ranks:
            ranks = self.history.ranks
            raise EmuError(f"there is no rank {rank!r}", f"this program runs on ranks {ranks[0]} to {ranks[-1]}")
        return RankMoment(self, rank)

    def tensor(self, name: str) -> dict[int, Tensor]:
        """The values of a tensor on every rank that has one of this name, and has its values.

        Raises:
            EmuError: none has; names those that are near.
        """
        found = {}
        for rank in self.history.ranks:
            tensors = held(self._standing(self.index), rank)
            value = copied(tensors[name][1]) if name in tensors else None
            if value is not None:
                found[rank] = value
        return found or {rank: self.rank(rank).tensor(name) for rank in self.history.ranks[:1]}

    def alike(self, name: str) -> dict[str, bool]:
        """Along which mesh axes a tensor is the same, bit for bit: what is replicated, as far as its values tell.

        A rank that has none of this name is not like one that has.
        """
        values = self.tensor(name)

        def same(a: int, b: int) -> bool:
            if a not in values or b not in values:
                return (a in values) == (b in values)
            return values[a].shape == values[b].shape and torch.equal(values[a], values[b])

        mesh = self.mesh
        return {axis: all(same(r, m) for r in self.history.ranks for m in mesh.members(r, axis)) for axis in mesh.axes}

    def collective(self, algorithm: str | None = None) -> Walk:
        """The last collective that moved data before this step, chunk by chunk, with its real values.

        Args:
            algorithm: "ring", "tree" or "group order"; None: as it was called.

        Raises:
            EmuError: none did so yet, or its kind and algorithm have no such walk.
        """
        carried = self.carried()
        if carried is None:
            raise EmuError(
                f"no collective has moved data before step {self.index}",
                "go on to one: until('all_reduce'), then next()",
            )
        return walked(carried, algorithm, self.cluster)

    def carried(self) -> Carried | None:
        """The last collective that moved data before this step, as it was called; None if none did so yet."""
        return self._standing(self.index).meetings.last

    def timeline(self) -> Timeline:
        """The record so far, priced on the cluster: provisional, since what comes may contend for the same links.

        Communications that still wait for somebody are left out.
        """
        return price(Trace(dict(self.mesh.axes), so_far(self.situation())), self.cluster)

    def priced(self) -> Timeline | None:
        """The same; None for what the cost model does not know: stepping goes on without times."""
        try:
            return self.timeline()
        except PricingError:
            return None

    def state(self, times: bool = True) -> dict[str, Any]:
        """Everything but tensors, as plain data that JSON can carry: see emu.stepping.plain.

        Args:
            times: whether the record so far is priced, which takes longer the longer it is.
        """
        from emu.stepping.plain import state_of

        return state_of(self, self.priced() if times else None)

    def __repr__(self) -> str:
        from emu.stepping.text import moment_text

        return moment_text(self)

    def _repr_png_(self) -> bytes:
        from emu.stepping.plain import state_of
        from emu.view.stepping import stepping_figure
        from emu.view.style import NOTEBOOK_DPI, png_bytes

        timeline = self.priced()
        return png_bytes(stepping_figure(state_of(self, timeline), timeline), NOTEBOOK_DPI)


class RankMoment:
    """One rank at a moment.

    Attributes:
        rank: which.
        moment: when.
    """

    def __init__(self, moment: Moment, rank: int) -> None:
        self.moment, self.rank = moment, rank

    def state(self, times: bool = True) -> dict[str, Any]:
        """Where it stands, its memory, streams and works, as plain data: its part of `Moment.state`."""
        return next(each for each in self.moment.state(times)["ranks"] if each["rank"] == self.rank)

    @property
    def line(self) -> str:
        """Where its program stands, "file.py:12"."""
        return self.state(times=False)["line"]

    @property
    def hbm(self) -> dict[str, int]:
        """Bytes of device memory that live, by category."""
        return dict(self.moment.situation().ranks[self.rank].held)

    def works(self) -> list[dict[str, Any]]:
        """Communications that it has started and not waited for, and whom they wait for."""
        return self.state(times=False)["works"]

    def stack(self) -> list[str]:
        """The functions of the program that it is in, the innermost first: "step, file.py:12"."""
        from pathlib import Path

        frames = frames_of(self.moment._standing(self.moment.index), self.rank)
        return [f"{f.f_code.co_name}, {Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames]

    def tensors(self, pattern: str = "*") -> dict[str, Held]:
        """What it holds, by name: parameters and buffers of its modules, their gradients, and variables of its functions.

        Args:
            pattern: which names, with * for any characters.
        """
        found = held(self.moment._standing(self.moment.index), self.rank)
        return {name: about for name, (about, _) in found.items() if fnmatchcase(name, pattern)}

    def tensor(self, name: str) -> Tensor:
        """The values of a tensor, as a copy.

        Raises:
            EmuError: it holds none of this name, and which are near; or its memory is freed.
        """
        found = held(self.moment._standing(self.moment.index), self.rank)
        if name not in found:
            from difflib import get_close_matches

            near = get_close_matches(name, found, 5, 0.4) or list(found)[:8]
            hint = f"near it are {', '.join(near)}" if near else "it holds none that its program has a name for"
            if self.moment.error is None and self.moment.op is None:
                hint = "its program has ended, and what it held is gone: step back first"
            raise EmuError(f"rank {self.rank} holds no tensor {name!r} before step {self.moment.index}", hint)
        value = copied(found[name][1])
        if value is None:
            raise EmuError(
                f"rank {self.rank} holds no values of {name!r} before step {self.moment.index}: their memory is freed",
                "a parameter in shards is whole only while its unit computes: go on to there, e.g. until('blocks.0')",
            )
        return value

    def __repr__(self) -> str:
        from emu.stepping.text import rank_text

        return rank_text(self)
