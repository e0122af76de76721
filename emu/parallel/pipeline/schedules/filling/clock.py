"""When each step of given rows runs: as soon as its rank is free and what it needs has come."""

from __future__ import annotations

from typing import NamedTuple

from emu.parallel.pipeline.schedules.filling.problem import Problem, Row


class Clocked(NamedTuple):
    """When given rows run.

    starts: when each step of each row starts.
    comes: when what it needs from another stage has come.
    spans: how long each rank takes from its first start to its last end.
    cost: the longest of these.
    makespan: when the last rank ends.
    """

    starts: list[list[float]]
    comes: list[list[float]]
    spans: list[float]
    cost: float
    makespan: float


def clocked(problem: Problem, rows: list[Row]) -> Clocked | None:
    """The times of these rows; None where they wait for each other forever."""
    sources, lags, durations, users = problem.sources, problem.lags, problem.durations, problem.users
    ends: list[list[float]] = [[] for _ in durations]
    starts: list[list[float]] = [[] for _ in rows]
    comes: list[list[float]] = [[] for _ in rows]
    waits = [-1] * len(durations)  # the rank that waits for the next of this step
    free = [0.0] * len(rows)
    todo = list(range(len(rows) - 1, -1, -1))
    done = 0
    while todo:
        rank = todo.pop()
        row, begun, arrived, now = rows[rank], starts[rank], comes[rank], free[rank]
        for i in range(len(begun), len(row)):
            step = row[i]
            source = sources[step]
            mine = ends[step]
            come = 0.0
            if source >= 0:
                theirs = ends[source]
                k = len(mine)
                if len(theirs) <= k:
                    waits[source] = rank
                    break
                come = theirs[k] + lags[step]
                if come > now:
                    now = come
            arrived.append(come)
            begun.append(now)
            now += durations[step]
            mine.append(now)
            if users[step] >= 0 and waits[step] >= 0:
                todo.append(waits[step])
                waits[step] = -1
        else:
            done += 1
        free[rank] = now
    if done < len(rows):
        return None
    spans = [end - begun[0] for end, begun in zip(free, starts, strict=True)]
    return Clocked(starts, comes, spans, max(spans), max(free))
