"""Walking back from what came out wrong to where it first was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from emu.equivalence.bisection.divergence import (
    Divergence,
    axes_in_words,
    described,
    divergence,
    returned_at,
    what_went_in,
)
from emu.equivalence.bisection.recorder import Made, Overheard, Record, TooLarge, naming
from emu.equivalence.bisection.results import Result, elsewhere, emptied, results_of, unfinished
from emu.equivalence.bisection.standing import Standings
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
        standings = Standings(ours, right, mesh)
        goals = {name: goal for name in wrong for goal in results_of(name, answers[:1], right)}
        found = [result for name in goals for result in results_of(name, results, ours)]
        for find in (_crossing, emptied, unfinished):
            if divergence := find(found, standings):
                return divergence
        return elsewhere(found, goals, standings, returned_at(program))
    except (TooLarge, EmuError, RuntimeError, TypeError, ValueError):
        return None
    finally:
        ours.forget()
        right.forget()


def _crossing(results: Sequence[Result], standings: Standings) -> Divergence | None:
    """The op into which something right went and out of which something wrong came; of several, the first."""
    names = list(dict.fromkeys(result.name for result in results))
    leads = _leads([(made, 1 << names.index(name)) for name, _, parts in results for made in parts], standings)
    crossings = {made.time: (made, to) for made, to in leads if _crosses(made, standings)}
    crossings = {t: c for t, c in crossings.items() if not _is_a_step(c[0], standings)} or crossings
    wrong = {made.time for made, _ in leads}
    crossings = {t: c for t, c in crossings.items() if not _follows(c[0], wrong, crossings, standings)} or crossings
    if not crossings:
        return None
    made, to = crossings[min(crossings)]
    name = next(name for i, name in enumerate(names) if to >> i & 1)
    says = what_went_in(made, [(x, s) for x in made.inputs if (s := standings.of(x)).right])
    times = standings.times(made)
    if times is not None:
        factor, over = times
        says += f"; {f'summed {axes_in_words(over)}, ' if over else ''}it is {factor:.4g} times what is there"
    elif (lost := _loses(made, standings)) is not None:
        says += f"; of that, all ranks together have only a part since {described(lost)}"
    elif (moved := _misplaces(made, standings)) is not None:
        says += f"; the ranks have the parts of that in another order since {described(moved)}"
    return divergence(name, made, says, standings)


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


def _is_a_step(made: Made, standings: Standings) -> bool:
    """Whether on this rank, or on another at this place, something right is made of what nobody has."""
    return any(standings.recovers(x) for x in standings.peers(made) if standings.of(x).found is None)


def _follows(made: Made, wrong: set[int], crossings: Mapping[int, Any], standings: Standings) -> bool:
    """Whether what other ranks make at this place is wrong because of what they read: a sum of all is then wrong here, too."""
    return any(peer.time in wrong and peer.time not in crossings for peer in standings.peers(made))


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
