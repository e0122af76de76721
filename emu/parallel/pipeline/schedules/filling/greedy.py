"""A first schedule: time goes on, and a rank that is free takes the most urgent step that may run and fits into its memory."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from emu.parallel.pipeline.schedules.filling.problem import FORWARD, TOLERANCE, Problem, Row

NEVER = float("inf")


class Taste(NamedTuple):
    """What ranks prefer where they may choose.

    ahead: below how many microbatches between forward and backward a stage takes a forward first, by stage.
    most: how many of them it takes at most, by stage.
    debt: from how many backwards of weights put off a stage does one before its next forward, by stage.
    patience_weight: for what share of a backward of weights a rank rather waits for something more urgent on its way.
    patience_forward: for what share of a forward a rank rather waits for a backward on its way.
    """

    ahead: tuple[float, ...]
    most: tuple[float, ...]
    debt: tuple[float, ...]
    patience_weight: float
    patience_forward: float


def filled(problem: Problem, taste: Taste) -> list[Row]:
    """Rows by this taste, always complete and within the memory.

    A forward leaves room for one microbatch on each later stage of its rank, so the oldest microbatch can always go on.
    """
    m, places, stages_of = problem.microbatches, problem.places, problem.stages_of
    users, lags, durations, holds = problem.users, problem.lags, problem.durations, problem.holds
    ahead, most, debt, patience_weight, patience_forward = taste
    room = [problem.limit + TOLERANCE - 1.0] * problem.ranks
    counts = [0] * len(durations)
    comes: list[list[float]] = [[] for _ in durations]  # when each step may run, as far as that is known
    comes[0] = [0.0] * m
    rows: list[Row] = [[] for _ in range(problem.ranks)]
    left = [3 * m * len(stages) for stages in stages_of]
    free = [0.0] * problem.ranks
    asleep = [False] * problem.ranks
    queue = [(0.0, rank) for rank in range(problem.ranks)]
    now = 0.0
    while True:
        if queue:
            now, rank = heappop(queue)
            if now < free[rank] or not left[rank]:
                continue
            forced = False
        else:  # all wait for memory that only a backward of weights frees
            if not any(left):
                return rows
            rank = max(range(problem.ranks), key=lambda r: _owed(r, stages_of, counts))
            now = max(now, free[rank])
            forced = True
        stages = stages_of[rank]
        back = front = weight = -1
        back_at = front_at = NEVER
        owed = 0
        later = len(stages)
        ending = True
        for s in stages:
            later -= 1
            f = 3 * s
            done, backs = counts[f], counts[f + 1]
            if backs < m:
                ending = False
                if backs < done and backs < len(comes[f + 1]):
                    at = comes[f + 1][backs]
                    if at <= now:  # of several, that of the oldest microbatch
                        if back_at > now or backs <= counts[back]:
                            back_at, back = at, f + 1
                    elif at < back_at:
                        back_at, back = at, f + 1
            if done < m and done < len(comes[f]) and room[rank] >= later and done - backs < most[s]:
                at = comes[f][done]
                if at <= now or at < front_at:  # of several, the nearest to the end
                    front_at, front = at, f
            if backs - counts[f + 2] > owed:
                owed, weight = backs - counts[f + 2], f + 2
        step, wake = -1, min(back_at, front_at)
        if front_at <= now:
            few = counts[front] - counts[front + 1] < ahead[front // 3]
            if back_at <= now and not few:
                step = back
            elif back_at > now + patience_forward * durations[front] or few:
                step = weight if owed > debt[front // 3] else front
            else:
                wake = back_at
        elif back_at <= now:
            step = back
        if step < 0 and weight >= 0:
            waits = patience_weight == NEVER or wake < now + patience_weight * durations[weight]
            if forced or ending or not waits:
                step = weight
        if step < 0:
            asleep[rank] = True
            if wake < NEVER:
                heappush(queue, (wake, rank))
            continue
        asleep[rank] = False
        counts[step] += 1
        room[rank] -= holds[step]
        rows[rank].append(step)
        left[rank] -= 1
        end = free[rank] = now + durations[step]
        heappush(queue, (end, rank))
        user = users[step]
        if user >= 0:
            comes[user].append(end + lags[user])
            other = places[user // 3]
            if asleep[other]:
                heappush(queue, (max(now, free[other]), other))
        elif step % 3 == FORWARD:
            comes[step + 1].append(end)


def _owed(rank: int, stages_of: tuple[tuple[int, ...], ...], counts: list[int]) -> int:
    return sum(counts[3 * s + 1] - counts[3 * s + 2] for s in stages_of[rank])
