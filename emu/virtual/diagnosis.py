"""What to say when ranks do not meet: deadlocks, communications left open, and calls that differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from emu.spmd.calls import Call
from emu.spmd.errors import Deadlock, EmuError, RankLeft
from emu.spmd.waits import Wait, WaitGraph, circle_of, ranks_words
from emu.virtual.causes.likely import Cause, Counts, before, of_circle, of_left, of_two
from emu.virtual.causes.stands import Stand, line_only, standing, stands

if TYPE_CHECKING:
    from emu.virtual.rendezvous import Meeting
    from emu.virtual.thread import Thread

MOST_STANDS = 32  # ranks of a circle whose programs are looked at


def deadlock(threads: dict[int, Thread], calls: Mapping[int, Counts]) -> EmuError:
    """Nobody can go on: who waits for whom, and in what. `calls` is what the ranks have called."""
    waits = tuple(
        Wait(t.rank, t.waiting.what, t.waiting.where, tuple(t.waiting.missing()))
        for t in threads.values()
        if t.waiting is not None
    )
    stuck = {wait.rank: list(wait.waits_for) for wait in waits}
    left = sorted({r for wait in waits for r in wait.waits_for if threads[r].done})

    def stand(wait: Wait) -> list[Stand]:
        worker = threads[wait.rank].worker
        return standing(worker.ident if worker is not None else None, wait.where)

    if left:
        graph = WaitGraph(waits, tuple(left))
        first = next(wait for wait in waits if any(r in left for r in wait.waits_for))
        gone = [r for r in first.waits_for if r in left]
        cause = _told(lambda: of_left(stand(first), first, gone, calls))
        return RankLeft(
            f"deadlock: {ranks_words(left)} finished while others still wait for it\n{graph}{cause or ''}",
            "every rank must call every collective of its groups: give the short rank an empty batch instead of none",
            waiting=stuck,
            finished=left,
            cycle=[],
            graph=graph,
            cause=cause,
        )
    graph = WaitGraph(waits, (), circle_of(waits))
    by_rank = {wait.rank: wait for wait in waits}
    circle = [by_rank[rank] for rank in graph.circle]
    cause = _told(lambda: of_circle(circle, {w.rank: stand(w) for w in circle[:MOST_STANDS]}, calls))
    return Deadlock(
        f"deadlock: no rank can go on\n{graph}{cause or ''}",
        "let both sides call the same collective in the same order; post sends and receives of a pair together "
        "with exchange([...]), or swap the order on one rank",
        waiting=stuck,
        cycle=list(graph.circle),
        finished=[],
        graph=graph,
        cause=cause,
    )


def parted(
    me: int, line: str, them: int, their_line: str, thread: Thread, item: Meeting, calls: Mapping[int, Counts]
) -> Cause | None:
    """Why this rank came to another call than another, which came first.

    Args:
        line, their_line: where the two called.
        thread: the other's; it may have gone on since, if it called asynchronously.
        item: the meeting in which they differ.
        calls: what the ranks have called, by rank.
    """
    worker = thread.worker
    waits = thread.waiting is not None and thread.waiting.item is item

    def find() -> Cause | None:
        theirs = standing(worker.ident if worker is not None and waits else None, their_line)
        mine = stands(sys._getframe())
        if theirs and theirs[-1].at.column < 0:  # only its line is known
            mine = mine[-1:]
        at = {me: line, them: their_line}
        counts = {rank: before(calls.get(rank, {}), item.group.label, where) for rank, where in at.items()}
        return of_two(mine, theirs, me, them, counts if waits else None)

    return _told(find)


def _told(find: Callable[[], Cause | None]) -> Cause | None:
    """What a search finds. That the search fails must not stand in the way of the error that it is for."""
    with suppress(Exception):
        return find()
    return None


def left_open(communications: Sequence[tuple[str, str, list[int], list[int]]]) -> RankLeft:
    """The program has ended, but some communications never took place.

    Args:
        communications: of each, what and where it was called, the ranks that called it, and those that did not.
    """
    lines = [
        f"  {ranks_words(here)} called {what} ({line}); {ranks_words(gone)} never did its part"
        for what, line, here, gone in communications
    ]
    more = [f"  ... and {len(lines) - 16} more"] * (len(lines) > 16)
    finished = sorted({rank for *_, gone in communications for rank in gone})
    waits = tuple(Wait(rank, what, line, tuple(gone)) for what, line, here, gone in communications for rank in here)
    cause = _told(lambda: of_left(line_only(communications[0][1]), waits[0], communications[0][3]))
    return RankLeft(
        "the program has ended, but communications that it started never took place\n"
        + "\n".join(lines[:16] + more)
        + str(cause or ""),
        "every member must call the collective, and every send needs its recv; call wait() on what is asynchronous",
        waiting={rank: gone for _, _, here, gone in communications for rank in here},
        finished=finished,
        cycle=[],
        graph=WaitGraph(waits, tuple(finished)),
        cause=cause,
    )


def called(call: Call) -> str:
    parts = [] if call.source is None else [described(call.source)]
    parts += [f"op={call.op}"] * bool(call.op) + [f"root={call.root}"] * (call.root >= 0)
    parts += [f"dim={call.dim}"] * bool(call.dim) + [f"sizes={list(call.sizes or ())}"] * (call.sizes is not None)
    parts += [f"by={call.by}"] * bool(call.by) + [f"algorithm={call.algorithm}"] * bool(call.algorithm)
    parts += [f"name={call.name!r}"] * bool(call.name)
    return f"{call.kind}({', '.join(parts)})"


def described(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def named(name: str) -> str:
    return f" named {name!r}" if name else ""


def cure(field: str) -> str:
    return {
        "kind": "let every rank of the group call the same collectives in the same order; look for one inside a branch "
        "that only some ranks take",
        "shape": "give every rank the same shape, or state uneven lengths with sizes=[...]",
        "dtype": "convert to one dtype before the call",
        "name": "reduce tensors in the same order on every rank",
    }.get(field, f"pass the same {field} on every rank")
