"""Walking back from what came out wrong to where it first was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from torch import Tensor

from emu.equivalence.bisection.divergence import (
    Divergence,
    axes_in_words,
    described,
    made_by,
    returned_at,
    some_ranks,
    what_went_in,
)
from emu.equivalence.bisection.recorder import Made, Overheard, Record, TooLarge, is_zero, naming
from emu.equivalence.bisection.standing import TURNS, Standings
from emu.equivalence.compare import named
from emu.spmd import EmuError, Mesh

Runner = Callable[[Any, Mesh, Record, Any], Sequence[Any]]  # program, mesh, record, meeting place -> results by rank


def bisect(
    program: Any, reference: Any, mesh: Mesh, alone: Mesh, wrong: Iterable[str], runs: Runner
) -> Divergence | None:
    """The first tensor of a program that is in none of its reference's, on the way to results that differ.

    Args:
        wrong: the results that differ, by name.
        runs: runs a program in float64, keeping what it makes in a record, and returns its results by rank.

    Returns:
        None where nothing can be said: a program that fails in float64, or one too large to keep all that it makes.
    """
    ours, right = Record(), Record()
    try:
        with naming():
            answers = runs(reference, alone, right, lambda scheduler: Overheard(scheduler, right))
            results = runs(program, mesh, ours, lambda scheduler: Overheard(scheduler, ours))
    except (TooLarge, EmuError, RuntimeError, TypeError, ValueError):
        return None
    standings = Standings(ours, right, mesh)
    makers = [(name, made) for name in wrong for made in _makers(name, results, ours)]
    for find in (_crossing, _emptied, _unfinished):
        if found := find(makers, standings):
            return found
    return _elsewhere(makers, standings, answers[0], right, returned_at(program))


def _makers(name: str, results: Sequence[Any], record: Record) -> list[Made]:
    """What made a result, on every rank that has it."""
    found: list[Made] = []
    for rank, result in enumerate(results):
        if name in (values := named(result)):
            found += _made(rank, values[name][0], record)
    return found


def _made(rank: int, value: Tensor, record: Record) -> list[Made]:
    made = record.makers(rank, value)
    if not made and value.numel() == 1:  # a number that was read off a tensor
        number = float(value)
        alike = (m for m in reversed(record.made) if m.rank == rank and m.value is not None and m.value.numel() == 1)
        made = [m for m in alike if float(m.value or 0.0) == number][:1]
    return made


def _crossing(makers: Sequence[tuple[str, Made]], standings: Standings) -> Divergence | None:
    """The op into which something right went and out of which something wrong came.

    Of several it is the first of those that lead to at least half as many of the wrong results as any.
    """
    names = list(dict.fromkeys(name for name, _ in makers))
    leads = _leads([(made, 1 << names.index(name)) for name, made in makers], standings)
    crossings = [(made, to) for made, to in leads if _crosses(made, standings)]
    crossings = [(made, to) for made, to in crossings if not standings.recovers(made)] or crossings
    if not crossings:
        return None
    most = max(to.bit_count() for _, to in crossings)
    made, to = min((c for c in crossings if 2 * c[1].bit_count() >= most), key=lambda c: c[0].time)
    name = next(name for i, name in enumerate(names) if to >> i & 1)
    says = what_went_in(made, [(x, s) for x in made.inputs if (s := standings.of(x)).right])
    times = standings.times(made)
    if times is not None:
        says += f"; it is {times:.4g} times what is there"
    elif (lost := _loses(made, standings)) is not None:
        says += f"; of that, all ranks together have only a part since {described(lost)}"
    elif (moved := _misplaces(made, standings)) is not None:
        says += f"; the ranks have the parts of that in another order since {described(moved)}"
    return _divergence(name, made, says, standings)


def _leads(starts: Sequence[tuple[Made, int]], standings: Standings) -> list[tuple[Made, int]]:
    """What the starts are made of, as far back as nothing is found, with the set (of bits) of starts that it leads to."""
    to: dict[int, int] = {}  # by time
    queue: list[tuple[int, Made]] = []  # the latest first: what something leads to is known when its turn comes

    def reach(made: Made, bits: int) -> None:
        if made.time in to:
            to[made.time] |= bits
        elif not standings.of(made).right or standings.stands_still(made):
            to[made.time] = bits
            heappush(queue, (-made.time, made))

    for made, bit in starts:
        reach(made, bit)
    out = []
    while queue:
        _, made = heappop(queue)
        out.append((made, to[made.time]))
        for x in made.inputs:
            reach(x, to[made.time])
    return out


def _crosses(made: Made, standings: Standings) -> bool:
    """Whether something that it is made of is right, and all else too, or never was anything."""
    there = [standings.of(x) for x in made.inputs]
    if not any(standing.found is not None for standing in there):
        return False
    return all(standing.right or standings.born(x) for x, standing in zip(made.inputs, there))


def _loses(made: Made, standings: Standings) -> Made | None:
    """What first left all ranks with a part only of a tensor that is read here; None where they have it all."""
    part, at = None, made
    while lacking := [x for x in at.inputs if standings.covered(x) < 1]:
        part = at = min(lacking, key=standings.covered)
    return part


def _misplaces(made: Made, standings: Standings) -> Made | None:
    """What first left the parts that are gathered here with other ranks than in the order of the whole."""
    if "gather" not in made.op:
        return None
    moved, at = None, made
    while own := [
        x for x in at.inputs if x.rank == made.rank and not x.is_number and standings.of(x).found is not None
    ]:
        if standings.in_order(own[0], made.members):
            return moved
        moved = at = own[0]
    return None


def _emptied(makers: Sequence[tuple[str, Made]], standings: Standings) -> Divergence | None:
    """A result that is zero because zeros were read where numbers should have been by then."""
    for name, made in makers:
        before = made
        while is_zero(made) and (zeros := [x for x in made.inputs if is_zero(x)]):
            before, made = made, zeros[0]
        if is_zero(made) and before is not made:
            says = f"{name!r} is zero, because this reads zeros, made by {described(made)}"
            return _divergence(name, before, says, standings)
    return None


def _unfinished(makers: Sequence[tuple[str, Made]], standings: Standings) -> Divergence | None:
    """A result that is still a part of a sum."""
    for name, made in makers:
        if over := standings.of(made).over:
            how = "add all of them up" if over == (TURNS,) else "its reduction is missing, or comes too early"
            first = made
            while before := [x for x in first.inputs if x.rank == made.rank and standings.of(x).over == over]:
                first = before[0]
            says = f"{name!r} is returned as a part of a sum {axes_in_words(over)}, {made_by(first)}: {how}"
            return _divergence(name, made, says, standings)
    return None


def _elsewhere(
    makers: Sequence[tuple[str, Made]], standings: Standings, answer: Any, right: Record, returned: str
) -> Divergence | None:
    """A result whose numbers are right ones, but others than asked for; or which was never anything."""
    for name, made in makers:
        found = standings.of(made).found
        goal = next(iter(_makers(name, [answer], right)), None)
        if found is None or goal is None:
            continue
        step = next((m for m in _back_from(goal) if found in m.inputs), None)
        if step is not None:
            says = f"{name!r} is returned{returned} as it was before the reference's {described(step)}"
        elif found is goal:
            says = f"{name!r} has the right numbers, but is returned{returned} as a part, or in another shape"
        else:
            says = f"{name!r} has the numbers of another tensor of the reference, that of {described(found)}"
        return _divergence(name, made, says, standings)
    for name, made in makers:
        if made.value is None:  # whole numbers: they are not looked for
            continue
        says = "zeros" if standings.of(made).says_nothing else "numbers that are in no tensor of the reference"
        return _divergence(name, made, f"{name!r} has {says}", standings)
    return None


def _back_from(made: Made) -> Iterable[Made]:
    """A tensor, what it was made of, what that was made of, and so on."""
    seen, queue = {made.time}, [made]
    for at in queue:
        yield at
        for x in at.inputs:
            if x.time not in seen:
                seen.add(x.time)
                queue.append(x)


def _divergence(name: str, made: Made, says: str, standings: Standings) -> Divergence:
    ranks = []
    for rank in range(standings.mesh.size):
        same = standings.record.by_kind.get((rank, made.kind), [])
        if len(same) > made.turn and standings.of(same[made.turn])[:2] == standings.of(made)[:2]:
            ranks.append(rank)
    whose = some_ranks(ranks or [made.rank], standings.mesh.size)
    where = f"in {made.layer}, " if made.layer else ""
    direction = f"{made.direction}, " if made.direction else ""
    text = f"{whose}, {direction}{where}{made.op or 'a tensor from outside'} at {made.line or 'no line'}: {says}"
    return Divergence(name, made.op, made.layer, made.direction, tuple(ranks), made.line, text)
