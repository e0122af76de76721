"""An order squeezed: ranks keep to it, but where they would wait they do weights, or a forward that the memory has room for.

As in `schedules/building_block.py`, but with times; and forwards run ahead, as nothing else fills a pipeline's start.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from emu.parallel.pipeline.schedules.filling.greedy import NEVER
from emu.parallel.pipeline.schedules.filling.problem import FORWARD, INPUT, TOLERANCE, WEIGHT, Problem, Row


class Way(NamedTuple):
    """How an order is squeezed.

    patience: for what share of a step a rank rather waits for the one whose turn it is.
    ahead: whether forwards may run ahead of their turn.
    late: up to how many steps after the last forward weights have a turn. From then on they only fill waiting, as others
        wait for the gradients of inputs.
    again: whether they have one again when the rank's last stage, from where gradients come first, has no more of these.
    """

    patience: float = 0.5
    ahead: bool = True
    late: int = 0
    again: bool = True


def squeezed(problem: Problem, rows: list[Row], way: Way) -> list[Row] | None:
    """Rows of these steps, each as early as it can be by this order.

    Args:
        rows: the order; within the memory if weights are done at once.
        way: how.

    Returns:
        None where ranks then wait for memory forever.
    """
    m, durations, holds, users, lags = (
        problem.microbatches, problem.durations, problem.holds, problem.users, problem.lags,
    )  # fmt: skip
    comes: list[list[float]] = [[] for _ in durations]  # when each step may run, as far as that is known
    comes[0] = [0.0] * m
    counts = [0] * len(durations)
    squeezing = [_Rank(problem, row, way) for row in rows]
    asleep = [False] * problem.ranks
    queue = [(0.0, rank) for rank in range(problem.ranks)]
    while queue:
        now, rank = heappop(queue)
        mine = squeezing[rank]
        if now < mine.free:
            continue
        turn, wake, step = mine.turn(), NEVER, -1
        if turn >= 0 and turn % 3 != WEIGHT and len(comes[turn]) > counts[turn] and mine.room >= holds[turn]:
            wake = comes[turn][counts[turn]]
        if turn >= 0 and (turn % 3 == WEIGHT or wake <= now):
            step = mine.weight() if turn % 3 == WEIGHT else turn
            mine.at += 1
        elif mine.owes() and wake >= now + way.patience * durations[mine.owed[mine.paid]]:
            step = mine.weight()
        elif way.ahead and mine.room >= 1.0:
            forward = mine.forward(comes, counts, now)
            if forward >= 0 and wake >= now + way.patience * durations[forward]:
                step = forward
                mine.ahead[step] = mine.ahead.get(step, 0) + 1
        if step < 0:
            asleep[rank] = True
            if wake < NEVER:
                heappush(queue, (wake, rank))
            continue
        asleep[rank] = False
        counts[step] += 1
        mine.room -= holds[step]
        mine.out.append(step)
        end = mine.free = now + durations[step]
        heappush(queue, (end, rank))
        user = users[step]
        if user >= 0:
            comes[user].append(end + lags[user])
            other = problem.places[user // 3]
            if asleep[other]:
                heappush(queue, (max(now, squeezing[other].free), other))
        elif step % 3 == FORWARD:
            comes[step + 1].append(end)
        if step % 3 == INPUT:
            mine.owed.append(step + 1)
    return [mine.out for mine in squeezing] if min(counts) == m else None


class _Rank:
    """How far a rank is in its order.

    at: everything before is done, or left out; ahead: forwards that are done beyond it, by step.
    owed, paid: backwards of weights that have become possible, and how many of them are done.
    """

    def __init__(self, problem: Problem, row: Row, way: Way) -> None:
        self.row, self.holds = row, problem.holds
        self.limit = self.room = problem.limit + TOLERANCE
        self.free = 0.0
        self.at = self.paid = 0
        self.owed: list[int] = []
        self.ahead: dict[int, int] = {}
        self.out: Row = []
        self.reach = 6 * problem.stages
        self.held = [0.0]  # before each step of the order
        for step in row:
            self.held.append(self.held[-1] + self.holds[step])
        kinds = [step % 3 for step in row]
        self.stop = len(row) - 1 - kinds[::-1].index(FORWARD) + way.late
        last = 3 * max(step // 3 for step in row) + INPUT
        self.again = len(row) - 1 - row[::-1].index(last) if way.again else len(row)

    def owes(self) -> bool:
        return self.paid < len(self.owed)

    def weight(self) -> int:
        self.paid += 1
        return self.owed[self.paid - 1]

    def turn(self) -> int:
        """The step whose turn it is; -1 at the end."""
        row, ahead = self.row, self.ahead
        while self.at < len(row):
            step = row[self.at]
            if step % 3 == WEIGHT:
                if self.owes() and not self.stop < self.at <= self.again:
                    return step
            elif ahead.get(step):
                ahead[step] -= 1
            else:
                return step
            self.at += 1
        return -1

    def forward(self, comes: list[list[float]], counts: list[int], now: float) -> int:
        """The next forward of the order, if it may run now and leaves the memory that the order needs until then; or -1."""
        passed = dict(self.ahead)
        more = 1 + sum(passed.values())
        for i in range(self.at, min(len(self.row), self.at + self.reach)):
            if self.held[i] + more > self.limit:
                return -1
            step = self.row[i]
            if step % 3 == FORWARD:
                if passed.get(step):
                    passed[step] -= 1
                    more -= 1
                elif len(comes[step]) > counts[step] and comes[step][counts[step]] <= now:
                    return step
        return -1
