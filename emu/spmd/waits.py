"""Who waits for whom when no rank can go on, as plain data and as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALONE = 8  # so many waiting ranks get a line each; of more, those that wait alike share one
SHOWN = 16  # lines of a message
_PEER = re.compile(r" (?:to|from) rank \d+")


class Wait(NamedTuple):
    """What one rank stands still in."""

    rank: int
    what: str  # e.g. "dp.all_reduce number 3", "world.send number 0 to rank 1 of float32[2]"
    where: str  # the line of the program, "file.py:12"
    waits_for: tuple[int, ...]  # the ranks that have not come

    @property
    def operation(self) -> str:
        """What it called, without number and peer: "dp.all_reduce"."""
        return self.what.partition(" number ")[0]


@dataclass(frozen=True, repr=False)
class WaitGraph:
    """The wait-for graph of ranks that cannot go on.

    Args:
        waits: what each waiting rank waits in, and for whom.
        finished: ranks that others wait for, though they have ended their program.
        circle: ranks of which each waits for the next, and the last for the first; empty if there is no such circle.
    """

    waits: tuple[Wait, ...]
    finished: tuple[int, ...] = ()
    circle: tuple[int, ...] = ()

    def edges(self) -> list[tuple[int, int]]:
        """Every (rank that waits, rank that it waits for)."""
        return [(wait.rank, other) for wait in self.waits for other in wait.waits_for]

    def __str__(self) -> str:
        """A line for each rank that waits, or for all that wait alike where they are many; then the circle."""
        lines = grouped_lines(self) if len(self.waits) > ALONE else [_line(self, [wait]) for wait in self.waits]
        more = [f"  ... and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)
        lines = lines[:SHOWN] + more
        if self.circle:
            path = [*self.circle, self.circle[0]]
            names = [str(rank) for rank in path]
            if len(path) > 10:
                names[4:-2] = ["..."]
            counted = f" ({len(self.circle)} ranks)" if len(path) > 10 else ""
            lines.append(f"  a circle: {' -> '.join(names)}{counted}")
        return "\n".join(lines)

    __repr__ = __str__


def circle_of(waits: Sequence[Wait]) -> tuple[int, ...]:
    """Some circle of ranks of which each waits for the next, or ()."""
    following = {wait.rank: wait for wait in waits}
    for start in following:
        path, at = [start], start
        seen = {start: 0}
        while (ahead := next((r for r in following[at].waits_for if r in following), None)) is not None:
            if ahead in seen:
                return tuple(path[seen[ahead] :])
            seen[ahead] = len(path)
            path.append(ahead)
            at = ahead
    return ()


def ranks_words(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks in words: "rank 3", "ranks 1, 2", "ranks 0-62, 64 and 12 more"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[tuple[str, int]] = []
    for first, last in runs:
        if last - first > 1:
            parts.append((f"{first}-{last}", last - first + 1))
        else:
            parts += [(str(rank), 1) for rank in range(first, last + 1)]
    rest = sum(count for _, count in parts[most:])
    shown = ", ".join(text for text, _ in parts[:most]) + (f" and {rest} more" if rest else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def grouped_lines(graph: WaitGraph) -> list[str]:
    """A line for all that wait in the same call for the same ranks; or, each in its own, for the same number of ranks on."""
    alike: dict[tuple, list[Wait]] = {}
    for wait in graph.waits:
        alike.setdefault((wait.what, wait.where, wait.waits_for), []).append(wait)
    shifted: dict[tuple, list[Wait]] = {}
    for key, waits in alike.items():
        lone = waits[0]
        if len(waits) == 1 and len(lone.waits_for) == 1:
            ended = lone.waits_for[0] in graph.finished
            key = (_PEER.sub("", lone.what), lone.where, lone.waits_for[0] - lone.rank, ended)
        shifted.setdefault(key, []).extend(waits)
    return [_line(graph, waits) for waits in shifted.values()]


def _line(graph: WaitGraph, waits: Sequence[Wait]) -> str:
    first = waits[0]
    who = f"{ranks_words([wait.rank for wait in waits])} wait{'s' * (len(waits) == 1)}"
    if any(wait.waits_for != first.waits_for for wait in waits):
        by = first.waits_for[0] - first.rank
        whom = f"each for the rank {abs(by)} {'above' if by > 0 else 'below'} it"
        whom += " (finished)" * (first.waits_for[0] in graph.finished)
        return f"  {who} in {_PEER.sub('', first.what)} ({first.where}), {whom}"
    here = [r for r in first.waits_for if r not in graph.finished]
    gone = [r for r in first.waits_for if r in graph.finished]
    names = [ranks_words(here)] * bool(here) + [f"{ranks_words(gone)} (finished)"] * bool(gone)
    return f"  {who} in {first.what} ({first.where}) for {' and '.join(names)}"
