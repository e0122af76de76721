"""Programs that are wrong in one thing, beside what they would be without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from emu.spmd import EmuError, Mesh
from emu.testing.changes import CHANGES, Change, applied, changed_lines, edits
from emu.testing.grammar import WrittenProgram, write_program
from emu.testing.meshes import at_most

DRAWN, TRIES = 6, 60  # programs that are looked at for one that allows a kind of change: drawn ones, then given ones


@dataclass(frozen=True)
class WrongProgram:
    """A right program with one thing changed. It may still compute the same: not every change does harm.

    Attributes:
        right: the program without the change.
        changed: the program with it, every line where it was.
        change: its kind, one of emu.testing.CHANGES.
        lines: numbers of the lines that a report may name: those that were changed; where one was left out, its
            neighbours, too, and those that made or next use what it would have changed; where it said a root or a cut that
            others say as well, those others.
        says: the change in words.
    """

    right: WrittenProgram
    changed: WrittenProgram
    change: Change
    lines: frozenset[int]
    says: str

    @property
    def program(self) -> Callable[[Any], Any]:
        """`program(rank)`, with the change."""
        return self.changed.program

    @property
    def reference(self) -> Callable[[], Any]:
        """`reference()`, which computes what is right."""
        return self.right.reference

    @property
    def mesh(self) -> Mesh:
        return self.right.mesh

    @property
    def file(self) -> str:
        """The name under which reports know the program."""
        return self.changed.file

    def __str__(self) -> str:
        return f"# {self.change}, line {sorted(self.lines)}: {self.says}\n{self.changed}"

    __repr__ = __str__  # what hypothesis shows of an example that fails


def write_wrong_program(random: Random, max_ranks: int = 8, changes: Sequence[Change] = CHANGES) -> WrongProgram:
    """A random program with one thing changed; the same for the same state of `random`.

    Args:
        random: what chooses.
        max_ranks: the most ranks, at least 2.
        changes: kinds to choose from.

    Raises:
        EmuError: no such kind of change.
    """
    if not changes or (unknown := [change for change in changes if change not in CHANGES]):
        raise (
            EmuError(f"changes={list(changes)} name no change", f"name some of {', '.join(CHANGES)}")
            if (not changes)
            else EmuError(f"there is no change {unknown[0]!r}", f"name some of {', '.join(CHANGES)}")
        )
    change = changes[random.randint(0, len(changes) - 1)]
    for attempt in range(TRIES):
        # What shrinks chooses the simplest each time, which would be the same program over and over.
        right = write_program(random if attempt < DRAWN else Random(attempt), max_ranks)
        if found := edits(right, change):
            edit = found[random.randint(0, len(found) - 1)]
            changed = applied(right, edit)
            return WrongProgram(right, changed, change, changed_lines(right, edit), edit.says)
    raise EmuError(
        f"no program of {max_ranks} ranks allows the change {change!r}", "allow more ranks, or other changes"
    )


@st.composite
def programs(draw: st.DrawFn, max_ranks: int = 8, trained: bool | None = None) -> WrittenProgram:
    """Right programs for 2 to `max_ranks` ranks, as Python text, each with a reference for one device.

    `emu.check(p.program, p.mesh, p.reference)` finds them equal in tier exact. They use every collective, groups over axes
    and of listed members, uneven pieces, asynchronous calls, streams and events, and differentiable collectives. They
    shrink to one step on two ranks.

    Args:
        max_ranks: the most ranks, at least 2.
        trained: whether they compute gradients; either where not said.
    """
    return write_program(draw(_randoms(max_ranks)), max_ranks, trained)


@st.composite
def wrong_programs(draw: st.DrawFn, max_ranks: int = 8, changes: Sequence[Change] = CHANGES) -> WrongProgram:
    """Programs of `programs()` with exactly one thing changed.

    Args:
        max_ranks: the most ranks, at least 2.
        changes: kinds to draw from.
    """
    return write_wrong_program(draw(_randoms(max_ranks)), max_ranks, changes)


def _randoms(max_ranks: int) -> st.SearchStrategy[Random]:
    at_most(max_ranks)
    if max_ranks < 2:
        raise EmuError("a program of one rank is its own reference", "say max_ranks=2 or more")
    return st.randoms(use_true_random=False)
