"""Results that are wrong though no op is: what is returned is not what should be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emu.equivalence.bisection.divergence import FILLING, Divergence, axes_in_words, described, divergence, made_by
from emu.equivalence.bisection.recorder import Made, Record, is_zero
from emu.equivalence.bisection.standing import TURNS, Standings
from emu.equivalence.compare import named


class Result(NamedTuple):
    """What one rank returns under a name, and what it was last written by, part by part."""

    name: str
    rank: int
    parts: list[Made]


def results_of(name: str, results: Sequence[Any], record: Record) -> list[Result]:
    """A result of every rank that has it and computed it."""
    found = []
    for rank, result in enumerate(results):
        if name in (values := named(result)) and (parts := _parts(rank, values[name][0], record)):
            found.append(Result(name, rank, parts))
    return found


def _parts(rank: int, value: Tensor, record: Record) -> list[Made]:
    made = record.makers(rank, value)
    if not made and value.numel() == 1:  # a number that was read off a tensor
        number = float(value)
        alike = (m for m in reversed(record.made) if m.rank == rank and m.value is not None and m.value.numel() == 1)
        made = [m for m in alike if float(m.value or 0.0) == number][:1]
    return made


def emptied(results: Sequence[Result], standings: Standings) -> Divergence | None:
    """A result that is zero because zeros were read where numbers should have been by then; or in which they were written."""
    for name, _, parts in results:
        filled = [made for made in parts if is_zero(made)]
        if filled and len(filled) < len(parts):
            made = max(filled, key=lambda made: made.time)
            if made.op.startswith(FILLING):
                return divergence(name, made, f"it writes zeros into a part of {name!r}", standings)
        elif filled:
            before = made = filled[0]
            while is_zero(made) and (zeros := [x for x in made.inputs if is_zero(x)]):
                before, made = made, zeros[0]
            if is_zero(made) and before is not made:
                says = f"{name!r} is zero, because this reads zeros, made by {described(made)}"
                return divergence(name, before, says, standings)
    return None


def unfinished(results: Sequence[Result], standings: Standings) -> Divergence | None:
    """A result that is still a part of a sum."""
    for name, rank, (made, *_) in results:
        if over := standings.of(made).over:
            how = "add all of them up" if over == (TURNS,) else "its reduction is missing, or comes too early"
            first = made
            while before := [x for x in first.inputs if x.rank == rank and standings.of(x).over == over]:
                first = before[0]
            says = f"{name!r} is returned as a part of a sum {axes_in_words(over)}, {made_by(first)}: {how}"
            return divergence(name, made, says, standings)
    return None


def elsewhere(
    results: Sequence[Result], goals: Mapping[str, Result], standings: Standings, returned: str
) -> Divergence | None:
    """A result whose numbers are right ones, but others than asked for; or which was never anything.

    Args:
        goals: by name, what the reference returns.
        returned: where the program returns its results, in words; or "".
    """
    for name, _, (made, *_) in results:
        found, goal = standings.of(made).found, goals[name].parts[0]
        if found is None:
            continue
        step = next((m for m in _back_from(goal) if found in m.inputs), None)
        if step is not None:
            says = f"{name!r} is returned{returned} as it was before the reference's {described(step)}"
        elif found is not goal:
            says = f"{name!r} has the numbers of another tensor of the reference, that of {described(found)}"
        elif _shape(made) != _shape(goal):
            says = f"{name!r} has the right numbers, but is returned{returned} as a part, or in another shape"
        elif not _alike(made, goal):
            says = f"{name!r} has the right numbers in another order"
        else:  # it is right in float64
            continue
        return divergence(name, made, says, standings)
    for name, _, (made, *_) in results:
        standing = standings.of(made)
        if made.value is not None and standing.found is None:
            says = "zeros" if standing.says_nothing else "numbers that are in no tensor of the reference"
            return divergence(name, made, f"{name!r} has {says}", standings)
    return None


def _alike(made: Made, goal: Made) -> bool:
    u, v = made.value, goal.value
    return (
        u is None or v is None or torch.allclose(u, v, rtol=1e-9, atol=1e-9 * float(v.abs().max()) if v.numel() else 0)
    )


def _shape(made: Made) -> tuple[int, ...]:
    return () if made.value is None else tuple(made.value.shape)


def _back_from(made: Made) -> Iterable[Made]:
    """A tensor, what it was made of, what that was made of, and so on."""
    seen, queue = {made.time}, [made]
    for at in queue:
        yield at
        for x in at.inputs:
            if x.time not in seen:
                seen.add(x.time)
                queue.append(x)
