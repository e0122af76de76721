"""What no schedule can beat: how long the longest span of a rank must be, from its work, the chain and the memory."""

from __future__ import annotations

from math import floor

from emu.parallel.pipeline.schedules.filling.problem import TOLERANCE, Problem

NOTHING = 1e-3  # a share so small that memory for weights binds nobody


def lower_bound(problem: Problem) -> float:
    """Seconds that the longest span of a rank takes at least, in any schedule within the memory."""
    m, lags, durations = problem.microbatches, problem.lags, problem.durations
    stages = problem.stages
    forward, backward, weight = durations[0::3], durations[1::3], durations[2::3]
    fits = floor(problem.limit + TOLERANCE)  # microbatches between their forward and their backward
    away = problem.away
    down = [0.0] * stages  # from the first start until a stage's first start
    up = [0.0] * stages  # from the end of a stage's backward until that of the first stage
    for s in range(1, stages):
        down[s] = down[s - 1] + forward[s - 1] + lags[3 * s]
        up[s] = up[s - 1] + backward[s - 1] + lags[3 * s - 2]
    best = 0.0
    spans = []  # of each rank, from its first start to its last backward of inputs
    for rank, mine in enumerate(problem.stages_of):
        first, last = mine[0], mine[-1]
        work = problem.work[rank]
        count = m * len(mine)
        b_most, w_most = max(backward[s] for s in mine), max(weight[s] for s in mine)
        # Until the first backward there are only forwards to do, as many as fit.
        begins = down[last] - down[first] + forward[last] + away[last]
        fills, room = 0.0, fits
        for longest in sorted((forward[s] for s in mine), reverse=True):
            fills += min(m, room) * longest
            room -= min(m, room)
        idle_first = max(0.0, begins - fills)
        # After the last forward there are only backwards to do, of what was held then; the last of them comes `ends` later.
        ends = away[last] + up[last] - up[first] + (backward[last] - backward[first])
        idle_last, span = float("inf"), float("inf")
        for x in range(1, min(fits, count) + 1):
            y = (
                count - x
                if problem.share <= NOTHING
                else min(count - x, floor((problem.limit + TOLERANCE - x) / problem.share))
            )
            empty = max(0.0, ends - (x - 1) * b_most)
            span = min(span, work - (x + y) * w_most + empty)
            idle_last = min(idle_last, max(0.0, empty - (x + y - 1) * w_most))
        if count > fits:  # then the two pauses are apart
            best = max(best, work + idle_first + idle_last)
            span += idle_first
        else:
            best = max(best, work + idle_first, work + idle_last)
            span = max(span, idle_first + m * sum(forward[s] + backward[s] for s in mine))
        spans.append(span)
        # What is held, over time: each microbatch from its forward's start to its backward's end, and what weights need.
        held = m * sum(forward[s] + away[s] + backward[s] for s in mine)
        weights = m * sum(weight[s] for s in mine)
        best = max(best, (held + problem.share * weights) / (problem.limit + TOLERANCE))
        best = max(best, (held + _whole_share(problem, fits) * weights) / fits)
    for i, here in enumerate(problem.stages_of):
        for j in range(i, problem.ranks):
            there = problem.stages_of[j][0]
            chain = down[there] - down[here[0]] + up[there] - up[here[0]]
            best = max(best, chain + spans[j] + weight[here[0]])
    return best


def _whole_share(problem: Problem, fits: int) -> float:
    """The largest share such that counts of microbatches held, plus it times counts of weights put off, never exceed `fits`."""
    limit, share = problem.limit + TOLERANCE, problem.share
    if share <= NOTHING:
        return 0.0
    most = 1 + floor((limit - 1) / share)  # the last one put off was a microbatch held before
    return min((fits - floor(limit - share * y)) / y for y in range(1, most + 1))
