"""Rows written without numbers: every word says what and on which of a rank's two chunks; microbatches follow by counting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from emu.parallel.pipeline.actions import Action, overlap
from emu.spmd import PlanError

Word = tuple[str, ...]  # a kind and which chunk, as ("F0",), or two at the same time, as ("F0", "B1")

_COUNTED: Final = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}  # forwards, gradients of inputs, of weights


class Chunk(NamedTuple):
    """One of a rank's two parts of the model, and the microbatches that pass it there.

    stage: which part.
    first: the first microbatch.
    count: how many; a row may have words for more, which are left out.
    """

    stage: int
    first: int
    count: int


def numbered(words: Iterable[Word], chunks: tuple[Chunk, Chunk], split: bool = False) -> Iterator[Action]:
    """Actions from words: the third "F0" is chunk 0's forward of its third microbatch.

    A microbatch needs nothing of another, so the words of those beyond a chunk's count fall out without any harm to the
    rest: this is how a pattern for many microbatches runs few. A pair that loses a part is the other part alone.

    Args:
        words: of one rank, in order.
        chunks: that rank's.
        split: a whole backward that is no part of a pair becomes its two parts, so that others wait less for the first.
    """
    done = ([0, 0, 0], [0, 0, 0])
    for word in words:
        parts = []
        for part in word:
            kind, which = part[0], part[1] == "1"
            counts, chunk, counted = done[which], chunks[which], _COUNTED[kind]
            index = counts[counted[0]]
            for counter in counted:
                counts[counter] += 1
            if index < chunk.count:
                parts.append(Action(chunk.stage, kind, chunk.first + index))
        if len(parts) > 1:
            yield overlap(*parts)
        elif parts and split and parts[0].kind == "B":
            yield parts[0]._replace(kind="I")
            yield parts[0]._replace(kind="W")
        else:
            yield from parts


def v_shaped(rank: int, ranks: int, microbatches: int) -> tuple[Chunk, Chunk]:
    """A rank's two chunks where stages go down the ranks and come back: 0..p-1, then p-1..0."""
    return Chunk(rank, 0, microbatches), Chunk(2 * ranks - 1 - rank, 0, microbatches)


def two_chunks(name: str, chunks: int) -> None:
    """Refuses a number of chunks that a schedule with two by nature cannot have.

    Raises:
        PlanError: neither 2 nor 1, which says "as the schedule has it".
    """
    if chunks not in (1, 2):
        raise PlanError(
            f"{name} runs two chunks a rank, but chunks={chunks}",
            "leave chunks out, or use interleaved, which runs any number",
            field="chunks",
            value=chunks,
            nearest=2,
        )
