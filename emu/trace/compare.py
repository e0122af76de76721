"""Where two traces first differ."""

from __future__ import annotations

from dataclasses import dataclass

from emu.trace.events import Event
from emu.trace.trace import Trace


@dataclass(frozen=True)
class Difference:
    """The first place where two traces differ.

    Args:
        rank: the rank; None where the meshes or the sets of ranks differ.
        index: position in the rank's events; None likewise.
        left: the event of the first trace; None where its record has ended.
        right: the event of the second.
        text: all of it in words.
    """

    rank: int | None
    index: int | None
    left: Event | None
    right: Event | None
    text: str

    def __str__(self) -> str:
        return self.text


def first_difference(a: Trace, b: Trace) -> Difference | None:
    """The first difference of two traces, rank by rank in program order; None if they are equal."""
    if list(a.axes.items()) != list(b.axes.items()):
        return Difference(None, None, None, None, f"the meshes differ: {dict(a.axes)} and {dict(b.axes)}")
    if a.ranks != b.ranks:
        return Difference(None, None, None, None, f"the ranks differ: {_some(a.ranks)} and {_some(b.ranks)}")
    for rank in a.ranks:
        left, right = a[rank], b[rank]
        for index, (x, y) in enumerate(zip(left, right)):
            if type(x) is not type(y) or x != y:  # named tuples of different types may be equal
                return Difference(rank, index, x, y, f"rank {rank}, event {index}: {_apart(x, y)}")
        if len(left) != len(right):
            index = min(len(left), len(right))
            x, y = (left[index], None) if len(left) > index else (None, right[index])
            ended = f"the {'second' if y is None else 'first'} record ends, the other goes on with {x or y}"
            return Difference(rank, index, x, y, f"rank {rank}, event {index}: {ended}")
    return None


def equal(a: Trace, b: Trace) -> bool:
    """True if two traces are the same: mesh, ranks, and every event."""
    return first_difference(a, b) is None


def _apart(x: Event, y: Event) -> str:
    if type(x) is not type(y):
        return f"{x} and {y}"
    fields = [f"{name} is {u!r} and {v!r}" for name, u, v in zip(x._fields, x, y) if u != v]
    return f"{type(x).__name__} {getattr(x, 'name', '') or getattr(x, 'kind', '')}: ".replace(" :", ":") + ", ".join(
        fields
    )


def _some(ranks: list[int]) -> str:
    return f"[{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}] ({len(ranks)})"
