"""Better rows by moving one step at a time: of the chain that makes the longest span, one step goes elsewhere in its row.

A tabu search as for job shops (Nowicki and Smutnicki 1996; moves are judged as by Balas and Vazacopoulos 1998).
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from emu.parallel.pipeline.schedules.filling.clock import Clocked, clocked
from emu.parallel.pipeline.schedules.filling.critical import NONE, Remainders, blocks, remainders
from emu.parallel.pipeline.schedules.filling.problem import TOLERANCE, Problem, Row

MOVES = 60  # that are judged in each turn
REACH = 12  # steps that one step passes at most
TRIES = 4  # moves that are tried out in each turn, the most promising first


class _Move(NamedTuple):
    promise: float
    rank: int
    low: int
    high: int
    row: Row


def bettered(problem: Problem, rows: list[Row], turns: int, goal: float, seed: int) -> list[Row]:
    """The best rows found in so many turns, perhaps the given ones; stops at a cost of `goal`."""
    random = Random(seed)
    timed = clocked(problem, rows)
    assert timed is not None
    best, best_rows = timed, rows
    seen: set[int] = set()
    stuck = 0
    for _ in range(turns):
        chain = blocks(problem, rows, timed, random)
        moves = sorted(_moves(problem, rows, timed, chain, random)) if chain else []
        for move in moves[:TRIES]:
            trial = [move.row if rank == move.rank else row for rank, row in enumerate(rows)]
            key = hash(tuple(map(tuple, trial)))
            then = None if key in seen else clocked(problem, trial)
            seen.add(key)
            if then is not None:
                rows, timed = trial, then
                break
        else:  # nowhere new to go from here
            stuck += 1
            if stuck > 20:
                break
            rows, timed = best_rows, best
            continue
        if (timed.cost, timed.makespan) < (best.cost - 1e-9, best.makespan):
            best, best_rows, stuck = timed, rows, 0
            if best.cost <= goal:
                break
    return best_rows


def _moves(
    problem: Problem, rows: list[Row], timed: Clocked, chain: list[tuple[int, int, int]], random: Random
) -> list[_Move]:
    """Some moves of one step that a row allows, with what they promise the cost to be."""
    after = remainders(problem, rows, timed)
    wanted = {_wanted(chain[int(random.random() * len(chain))], rows, random) for _ in range(MOVES)}
    found = []
    for rank, i, j in sorted(wanted):
        row = rows[rank]
        low, high = min(i, j), max(i, j)
        if i == j or row[i] in (row[j:i] or row[i + 1 : j + 1]):  # microbatches go in order
            continue
        inner = row[low : high + 1]
        moved = [inner.pop(), *inner] if i > j else [*inner[1:], inner[0]]
        new = row[:low] + moved + row[high + 1 :]
        if allowed(problem, rank, new, low, high):
            order = [i, *range(low, high)] if i > j else [*range(low + 1, high + 1), i]
            promise = _promise(problem, rows, timed, after, rank, order)
            found.append(_Move(promise, rank, low, high, new))
    return found


def _wanted(block: tuple[int, int, int], rows: list[Row], random: Random) -> tuple[int, int, int]:
    """(rank, from, to): the last step of a block earlier, one to its front, one behind its last, or one anywhere."""
    rank, first, last = block
    kind = random.random()
    far = 1 + int(random.random() * min(REACH, last - first))
    if kind < 0.35:
        return rank, last, last - far
    if kind < 0.6:
        return rank, first + far, first
    if kind < 0.85:
        return rank, last - far, last
    i = first + int(random.random() * (last - first + 1))
    return rank, i, min(len(rows[rank]) - 1, max(0, i + int(random.random() * 2 * REACH) - REACH))


def allowed(problem: Problem, rank: int, row: Row, low: int, high: int) -> bool:
    """Whether a row, changed from `low` up to `high`, has each step after what it needs on its rank, and within the memory."""
    needs, holds = problem.needs, problem.holds
    head = row[:low]
    counts = {3 * s + kind: 0 for s in problem.stages_of[rank] for kind in range(3)}
    room = problem.limit + TOLERANCE
    for step in counts:
        counts[step] = head.count(step)
        room -= counts[step] * holds[step]
    for step in row[low : high + 1]:
        for need in needs[step]:
            if counts[need] <= counts[step]:
                return False
        counts[step] += 1
        room -= holds[step]
        if room < 0:
            return False
    return True


def _promise(
    problem: Problem, rows: list[Row], timed: Clocked, after: Remainders, rank: int, order: list[int]
) -> float:
    """The longest chain through a row's steps in this new order, if nothing outside it changes."""
    row, comes, durations = rows[rank], timed.comes[rank], problem.durations
    low, high = min(order), max(order)
    now = timed.starts[rank][low - 1] + durations[row[low - 1]] if low else 0.0
    ends = []
    for i in order:
        now = max(now, comes[i]) + durations[row[i]]
        ends.append(now)
    rest, by_user = after.rest[rank], after.by_user[rank]
    left = rest[high + 1] + durations[row[high + 1]] if high + 1 < len(row) else -timed.starts[rank][0]
    longest = NONE
    for i, end in zip(reversed(order), reversed(ends), strict=True):
        left = max(left, by_user[i])
        longest = max(longest, end + left)
        left += durations[row[i]]
    return longest
