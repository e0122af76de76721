"""A schedule: which rank does what in which order. Plain data, to be read, drawn, checked and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from emu.parallel.pipeline.actions import COMPUTE, Action, F, parse
from emu.spmd import EmuError, PlanError

Generator = Callable[
    [int, int, int, int], Iterator[Action]
]  # (rank, ranks, microbatches, chunks) -> that rank's actions
IDLE = "-"  # as text, a rank that does nothing: a blank line could be anything


@dataclass(frozen=True, repr=False)
class Schedule:
    """What every rank of a pipeline does, in order.

    Args:
        rows: each rank's actions.
        name: what it is called.
    """

    rows: tuple[tuple[Action, ...], ...]
    name: str = field(default="a schedule", compare=False)

    @cached_property
    def places(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that runs it."""
        return {
            (a.stage, a.microbatch): rank
            for rank, row in enumerate(self.rows)
            for action in row
            for a in action.each()
            if a.kind == F and a.microbatch is not None
        }

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """Into how many parts the model is cut."""
        return 1 + max((stage for stage, _ in self.places), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((microbatch for _, microbatch in self.places), default=-1)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Every rank's stages, lowest first."""
        return tuple(
            tuple(sorted({stage for (stage, _), r in self.places.items() if r == rank})) for rank in range(self.ranks)
        )

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold every stage: one, or two where microbatches flow both ways."""
        return tuple(
            tuple(sorted({r for (s, _), r in self.places.items() if s == stage})) for stage in range(self.stages)
        )

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backwards are in two parts, for inputs and for weights."""
        return any(a.kind == "I" for row in self.rows for action in row for a in action.each())

    def compute(self) -> Schedule:
        """Without sends, receives, gathers and frees: these follow from the rest."""
        rows = (tuple(a for a in row if a.kind in COMPUTE or a.parts) for row in self.rows)
        return Schedule(tuple(rows), self.name)

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches; "
            "str() writes it out, check() and timed() look at it)"
        )

    def __str__(self) -> str:
        """A line a rank, actions apart by spaces, - for a rank that does nothing; `Schedule.parse` reads it."""
        return "\n".join(" ".join(map(str, row)) or IDLE for row in self.rows)

    @classmethod
    def parse(cls, text: str, name: str = "a schedule") -> Schedule:
        """The schedule that a text says: a line a rank, actions apart by spaces, - for a rank that does nothing.

        Blank lines before the first rank and after the last, as around a text in triple quotes, are no ranks.

        Raises:
            EmuError: a word that is no action, or a blank line between ranks; says which line. No text at all.
        """
        lines = _lines(text, "parse")
        first = next((n for n, line in enumerate(lines) if line.strip()), len(lines))
        _no_blanks(lines[first:], first, IDLE)
        rows = (("" if line.strip() == IDLE else line).split() for line in lines[first:])
        return cls(tuple(_row(row, rank, first + rank) for rank, row in enumerate(rows)), name)

    def to_csv(self) -> str:
        """As torch.distributed.pipelining writes it: a line a rank, actions apart by commas; two idle steps for none."""
        return "".join((",".join(map(str, row)) or ",") + "\n" for row in self.rows)

    @classmethod
    def from_csv(cls, text: str, name: str = "a schedule") -> Schedule:
        """As torch.distributed.pipelining writes it; an empty cell is a step of idling, and is left out.

        A rank that does nothing has empty cells alone. Blank lines after the last rank are no ranks.

        Raises:
            EmuError: a cell that is no action, or a blank line before or between ranks; says which line. No text at all.
        """
        lines = _lines(text, "from_csv")
        _no_blanks(lines, 0, "a comma")
        cells = ([cell.strip().strip('"') for cell in line.split(",")] for line in lines)
        return cls(tuple(_row(row, rank, rank) for rank, row in enumerate(cells)), name)

    @classmethod
    def of(cls, generator: Generator, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
        """What a generator says for every rank: `generator(rank, ranks, microbatches, chunks)` yields that rank's actions.

        Raises:
            PlanError: sizes that are no whole numbers of at least 1, or that this schedule cannot do.
            EmuError: something else than actions.
        """
        for what, value in (("pp", ranks), ("microbatches", microbatches), ("chunks", chunks)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{what}={value!r} is not a whole number of at least 1", f"say {what}=4", field=what)
        name = getattr(generator, "__name__", "a schedule").replace("_", "-")
        try:
            inspect.signature(generator).bind(0, ranks, microbatches, chunks)
        except TypeError as error:
            raise EmuError(
                f"{name} cannot be asked for a rank's actions: {error}",
                "write def mine(rank, ranks, microbatches, chunks), which yields them",
            ) from None
        said = [generator(rank, ranks, microbatches, chunks) for rank in range(ranks)]
        for rank, row in enumerate(said):
            if not isinstance(row, Iterable) or isinstance(row, str):
                raise EmuError(
                    f"{name} returned {row!r} for rank {rank}, not its actions",
                    "yield them one by one, or return a list; a schedule as text is Schedule.parse(text)",
                )
        rows = tuple(map(tuple, said))
        for row in rows:
            for action in row:
                if not isinstance(action, Action):
                    raise EmuError(
                        f"{name} yielded {action!r}, which is no action",
                        f'yield Action(2, "F", 0), or parse({action!r})'
                        if isinstance(action, str)
                        else 'yield Action(2, "F", 0)',
                    )
        return cls(rows, name)


def _lines(text: Any, reader: str) -> list[str]:
    """The lines of a text, without a byte order mark, which some editors begin files with, and blank lines at its end."""
    if not isinstance(text, str):
        raise EmuError(
            f"Schedule.{reader} reads text, not {text!r:.60}",
            'decode it first: text.decode("utf-8")'
            if isinstance(text, (bytes, bytearray))
            else "of a file, that is Path(...).read_text()",
        )
    lines = text.removeprefix("\ufeff").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _no_blanks(lines: Sequence[str], first: int, idle: str) -> None:
    """Which rank is idle, or whether any is, is not for us to guess: the ranks below would be others."""
    for n, line in enumerate(lines, first + 1):
        if not line.strip():
            raise EmuError(
                f"line {n} is blank: does a rank do nothing, or do ranks go on below?",
                f"leave the line out, or write {idle} in it for a rank that does nothing",
            )


def _row(words: Iterable[str], rank: int, line: int) -> tuple[Action, ...]:
    try:
        return tuple(parse(word) for word in words if word.strip())
    except EmuError as error:
        raise EmuError(f"line {line + 1} (rank {rank}): {error.message}", error.hint) from None
