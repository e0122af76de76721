"""What to say when ranks do not meet: deadlocks, communications left open, and calls that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from emu.spmd.calls import Call
from emu.spmd.errors import Deadlock, EmuError, RankLeft

if TYPE_CHECKING:
    from emu.virtual.scheduler import Thread


def deadlock(threads: dict[int, Thread]) -> EmuError:
    """Nobody can go on: who waits for whom, and in what."""
    stuck = {t.rank: t.waiting.missing() for t in threads.values() if t.waiting is not None}
    left = sorted({r for missing in stuck.values() for r in missing if threads[r].done})
    lines = []
    for t in threads.values():
        if t.waiting is None:
            continue
        here = [r for r in stuck[t.rank] if not threads[r].done]
        gone = [r for r in stuck[t.rank] if threads[r].done]
        whom = [_ranks(here)] * bool(here) + [f"{_ranks(gone)} (finished)"] * bool(gone)
        lines.append(f"  rank {t.rank} waits in {t.waiting.what} ({t.waiting.where}) for {' and '.join(whom)}")
    shown = lines[:16] + ([f"  ... and {len(lines) - 16} more"] if len(lines) > 16 else [])
    cycle = _cycle(stuck)
    loop = f"\n  a circle: {' -> '.join(map(str, [*cycle, cycle[0]]))}" if cycle else ""
    text = "\n".join(shown) + loop
    if left:
        return RankLeft(
            f"deadlock: {_ranks(left)} finished while others still wait for it\n{text}",
            "every rank must call every collective of its groups: give the short rank an empty batch instead of none",
            waiting=stuck,
            finished=left,
        )
    return Deadlock(
        f"deadlock: no rank can go on\n{text}",
        "let both sides call the same collective in the same order; post sends and receives of a pair together "
        "with exchange([...]), or swap the order on one rank",
        waiting=stuck,
        cycle=cycle,
    )


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 1, 2, 5 and 12 more"."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def left_open(communications: Sequence[tuple[str, str, list[int], list[int]]]) -> RankLeft:
    """The program has ended, but some communications never took place.

    Args:
        communications: of each, what and where it was called, the ranks that called it, and those that did not.
    """
    lines = [
        f"  {_ranks(here)} called {what} ({line}); {_ranks(gone)} never did its part"
        for what, line, here, gone in communications
    ]
    more = [f"  ... and {len(lines) - 16} more"] * (len(lines) > 16)
    return RankLeft(
        "the program has ended, but communications that it started never took place\n" + "\n".join(lines[:16] + more),
        "every member must call the collective, and every send needs its recv; call wait() on what is asynchronous",
        waiting={rank: gone for _, _, here, gone in communications for rank in here},
        finished=sorted({rank for *_, gone in communications for rank in gone}),
    )


def _cycle(waits_for: dict[int, list[int]]) -> list[int]:
    """Some circle of ranks that wait for each other, or []."""
    for start in waits_for:
        path, at = [start], start
        while (following := next((r for r in waits_for.get(at, []) if r in waits_for), None)) is not None:
            if following in path:
                return path[path.index(following) :]
            path.append(following)
            at = following
    return []


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
