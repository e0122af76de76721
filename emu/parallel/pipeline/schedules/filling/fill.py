"""The automatic scheduler: greedy schedules, and squeezed building blocks; justified, and the best bettered step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from emu.parallel.pipeline.schedules.filling.blocks import blocks, repeated
from emu.parallel.pipeline.schedules.filling.bound import lower_bound
from emu.parallel.pipeline.schedules.filling.clock import clocked
from emu.parallel.pipeline.schedules.filling.greedy import Taste, filled
from emu.parallel.pipeline.schedules.filling.justify import pushed
from emu.parallel.pipeline.schedules.filling.problem import Problem, Row
from emu.parallel.pipeline.schedules.filling.search import bettered
from emu.parallel.pipeline.schedules.filling.squeeze import Way, squeezed
from emu.parallel.pipeline.schedules.filling.tastes import changed, tastes

STEPS = 6144  # of 16 ranks and 128 microbatches: what is bigger gets less effort, what is smaller more, so that all take a second
BLOCKS = 4  # that are tried in all ways at most, and one more
WAYS = (Way(), Way(again=False), Way(late=3, again=False), Way(ahead=False))  # of squeezing
NEAR = 1.02  # times the best: placements that begin worse are given up, for more effort on the others
MOST = 12.0  # times the effort at most
PATIENCE = (
    (1.0, 1.0),
    (0.5, 0.25),
    (0.25, 0.5),
    (0.0, 1.0),
)  # of justifying, there and back; chosen as the tastes were


class Filled(NamedTuple):
    """A schedule that was found: the longest span of a rank and the makespan in seconds, and the rows."""

    cost: float
    makespan: float
    rows: list[Row]


class _Reached(Exception):
    """Nothing can be better."""


class _Pool:
    """What was found for one problem, best first."""

    def __init__(self, problem: Problem, goal: float) -> None:
        self.problem = problem
        self.goal = goal * (1 + 1e-12)
        self.found: dict[tuple[float, float], Filled] = {}
        self.tastes: dict[tuple[float, float], Taste] = {}
        self.justified: set[tuple[float, float]] = set()

    def add(self, rows: list[Row] | None, taste: Taste | None = None) -> list[Row] | None:
        timed = clocked(self.problem, rows) if rows else None
        if not rows or not timed:
            return None
        key = round(timed.cost, 9), round(timed.makespan, 9)
        self.found.setdefault(key, Filled(timed.cost, timed.makespan, rows))
        if taste:
            self.tastes.setdefault(key, taste)
        if timed.cost <= self.goal:
            raise _Reached
        return rows

    def best(self, n: int) -> list[Filled]:
        return [self.found[key] for key in sorted(self.found)[:n]]

    def greedy(self, taste: Taste) -> None:
        self.add(filled(self.problem, taste), taste)

    def blocks(self, n: int) -> None:
        """Orders of building blocks, squeezed: the best n, as fewer microbatches tell, in all ways."""
        problem = self.problem
        if problem.places[problem.ranks - 1 : problem.ranks] != problem.places[problem.ranks : problem.ranks + 1]:
            return  # not in a V: the greedy ones do better
        few = replace(problem, microbatches=min(problem.microbatches, 2 * problem.ranks))
        costs = []
        for block in blocks(problem.places, problem.ranks):
            order = repeated(few, block)
            rows = squeezed(few, order, WAYS[0]) if order else None
            if rows and (timed := clocked(few, rows)):
                costs.append((timed.cost, block))
        for _, block in sorted(costs)[:n]:
            if order := repeated(problem, block):
                for way in WAYS:
                    self.add(squeezed(problem, order, way))
                    self.add(squeezed(problem.even, order, way))  # this order has slack for other times as well

    def change(self, n: int, random: Random) -> None:
        for _ in range(n):
            liked = [self.tastes[key] for key in sorted(self.tastes)[:8]]
            self.greedy(changed(random.choice(liked[:4]), random.choice(liked), self.problem, random))

    def justify(self, n: int) -> None:
        for one in self.best(n):
            key = round(one.cost, 9), round(one.makespan, 9)
            if key not in self.justified:
                self.justified.add(key)
                for there, back in PATIENCE:
                    if late := self.add(pushed(self.problem, one.rows, True, there)):
                        self.add(pushed(self.problem, late, False, back))

    def better(self, n: int, turns: int) -> None:
        for seed, one in enumerate(self.best(n)):
            self.add(bettered(self.problem, one.rows, turns, self.goal, seed))


def fill(problems: Sequence[Problem], effort: float = 1.0) -> tuple[Problem, Filled]:
    """The best schedule found for one of these problems: of the shortest longest span, then of the shortest makespan.

    Args:
        problems: the same pipeline with its stages placed in different ways.
        effort: how long to try; 1 takes about a second at most. The result is the same on every machine.
    """
    bounds = [lower_bound(problem) for problem in problems]
    pools = [_Pool(problem, min(bounds)) for problem in problems]
    random = Random(0)
    steps = 3 * problems[0].stages * problems[0].microbatches
    scale = effort * min(MOST, (STEPS / steps) ** 1.35) / len(pools)
    try:
        for pool in pools:
            for n, taste in enumerate(tastes(pool.problem)):
                if n < 4 or n < 22 * scale:
                    pool.greedy(taste)
            pool.blocks(1 + int(BLOCKS * min(1.0, scale)))
            pool.justify(int(0.5 + 2 * scale))
        pools.sort(key=lambda pool: pool.best(1)[0][:2])
        near = [pool for pool in pools if pool.best(1)[0].cost <= NEAR * pools[0].best(1)[0].cost]
        scale *= len(pools) / len(near)
        turns = min(600, int(1 + 15 * scale * max(1.0, scale / 2)))
        for pool in near:
            if pool.goal >= pools[0].best(1)[0].cost:
                continue
            for _ in range(4):
                pool.change(int(0.5 + 4 * scale), random)
                pool.justify(int(0.5 + scale))
            pool.better(3 if scale >= 0.5 else 1, turns)
            pool.justify(int(0.5 + 2 * scale))
            pool.better(1, turns)
    except _Reached:
        pass
    best = min((pool for pool in pools if pool.found), key=lambda pool: pool.best(1)[0][:2])
    return best.problem, best.best(1)[0]
