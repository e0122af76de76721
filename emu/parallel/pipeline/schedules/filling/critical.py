"""Why the longest span is so long: the chain of steps, each waiting for the one before, that makes it."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from emu.parallel.pipeline.schedules.filling.clock import Clocked
from emu.parallel.pipeline.schedules.filling.problem import Problem, Row

NONE = float("-inf")
EXACT = 1e-9  # times that are sums of the same numbers in another order


class Remainders(NamedTuple):
    """How long the longest chain after each step's end lasts; of it, what begins with the step's user on another stage."""

    rest: list[list[float]]
    by_user: list[list[float]]


def remainders(problem: Problem, rows: list[Row], timed: Clocked) -> Remainders:
    """Chains after each step, all ranks' ends counted from their own starts: the mirror image of `clocked`."""
    users, lags, durations = problem.users, problem.lags, problem.durations
    before: list[list[float]] = [[] for _ in durations]  # duration and remainder of each step, last microbatch first
    rest = [[0.0] * len(row) for row in rows]
    by_user = [[NONE] * len(row) for row in rows]
    waits = [-1] * len(durations)
    at = [len(row) - 1 for row in rows]
    after = [-begun[0] for begun in timed.starts]
    todo = list(range(len(rows)))
    while todo:
        rank = todo.pop()
        row, mine, theirs, now = rows[rank], rest[rank], by_user[rank], after[rank]
        i = at[rank]
        while i >= 0:
            step = row[i]
            user = users[step]
            own = before[step]
            if user >= 0:
                k = len(own)
                if len(before[user]) <= k:
                    waits[user] = rank
                    break
                far = before[user][k] + lags[user]
                theirs[i] = far
                if far > now:
                    now = far
            mine[i] = now
            now += durations[step]
            own.append(now)
            if waits[step] >= 0:
                todo.append(waits[step])
                waits[step] = -1
            i -= 1
        at[rank] = i
        after[rank] = now
    return Remainders(rest, by_user)


def blocks(problem: Problem, rows: list[Row], timed: Clocked, random: Random) -> list[tuple[int, int, int]]:
    """(rank, first, last) of two or more steps without a pause in between, along one of the chains that make the cost."""
    durations, sources, places = problem.durations, problem.sources, problem.places
    longest = [rank for rank, span in enumerate(timed.spans) if span >= timed.cost - EXACT]
    rank = random.choice(longest)
    i = last = len(rows[rank]) - 1
    found = []
    while True:
        row, begun = rows[rank], timed.starts[rank]
        start, source = begun[i], sources[row[i]]
        follows = i > 0 and begun[i - 1] + durations[row[i - 1]] >= start - EXACT
        comes = source >= 0 and timed.comes[rank][i] >= start - EXACT
        if follows and comes:
            comes = random.random() < 0.5
        if follows and not comes:
            i -= 1
            continue
        if last > i:
            found.append((rank, i, last))
        if not comes:
            return found
        nth = row[:i].count(row[i])
        rank = places[source // 3]
        i = -1
        for _ in range(nth + 1):
            i = rows[rank].index(source, i + 1)
        last = i
