"""What the greedy scheduler tries: a table of tastes, then changes of those that did well."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from emu.parallel.pipeline.schedules.filling.greedy import NEVER, Taste
from emu.parallel.pipeline.schedules.filling.problem import Problem

# Chosen on random pipelines: each is the one that helps most where those above it do badly. The first three numbers count
# lifespans (how many paces a microbatch is away from a stage, at least), or microbatches more for each rank further down.
TABLE = (  # ahead, most, debt by rank, patience for a weight, patience for a forward
    (1, NEVER, NEVER, 0.25, 0.25),
    (2, 1.4, NEVER, 0.5, 0.1),
    (2, NEVER, NEVER, 0, 0.5),
    (1, 1, NEVER, 0.75, 0.5),
    (2, NEVER, NEVER, 0.5, 1),
    (1, NEVER, NEVER, 0, 0),
    (0, 1.4, NEVER, 1, 0.25),
    (0, 1, NEVER, 0.5, 0.1),
    (2, 1.4, NEVER, 0.25, 0.25),
    (1, NEVER, NEVER, 0, 0.5),
    (0, NEVER, NEVER, 0.5, 0.1),
    (2, 1, NEVER, 0.75, 0.5),
    (1, NEVER, NEVER, 0.5, 0.1),
    (2, 1.4, 2, 0.75, 0.5),
    (1, 1, NEVER, 0.5, 1),
    (2, 1.4, 2, 0.5, 0.1),
    (2, NEVER, NEVER, 0.25, 0.25),
    (2, 1.4, NEVER, 0.5, 1),
    (2, NEVER, 1, 1, 0.25),
    (1, 1, 2, 1, 0.25),
    (0, 0.7, 2, 1, 0.25),
    (0, 0.5, 2, 0, 0),
)


def tastes(problem: Problem) -> Iterator[Taste]:
    """Those of the table, for this problem."""
    lives = lifespans(problem)
    for ahead, most, debt, patience_weight, patience_forward in TABLE:
        yield Taste(
            tuple(ahead * life for life in lives),
            tuple(most * life + 1.0 for life in lives),
            tuple(debt * rank + debt - 1.0 if debt < NEVER else NEVER for rank in problem.places),
            patience_weight,
            patience_forward,
        )


def lifespans(problem: Problem) -> list[float]:
    """How many microbatches go by on the busiest rank while one is between a stage's forward and backward, at least."""
    pace = max(problem.work) / problem.microbatches
    return [
        max(1e-3, (problem.durations[3 * s] + problem.durations[3 * s + 1] + away) / pace) if pace else 1.0
        for s, away in enumerate(problem.away)
    ]


def changed(taste: Taste, other: Taste, problem: Problem, random: Random) -> Taste:
    """A taste with one or two things changed; something may be had from the other."""
    ahead, most, debt, patience_weight, patience_forward = taste
    for _ in range(1 + int(random.random() * 2)):
        kind = int(random.random() * 8)
        if kind == 0:
            patience_weight = random.choice((0, 0.1, 0.25, 0.4, 0.6, 0.8, 1, 1.2, NEVER))
        elif kind == 1:
            patience_forward = random.choice((0, 0.1, 0.2, 0.35, 0.5, 0.7, 1))
        elif kind == 2:
            ahead = other.ahead
        elif kind == 3:
            most, debt = other.most, other.debt
        elif kind == 4:
            factor = random.choice((0, 0.5, 1, 1.5, 2))
            ahead = tuple(factor * life for life in lifespans(problem))
        elif kind == 5:
            ahead = _nudged(ahead, problem, random)
        elif kind == 6:
            debt = _nudged(debt, problem, random)
        else:
            most = _nudged(most, problem, random)
    return Taste(ahead, most, debt, patience_weight, patience_forward)


def _nudged(values: tuple[float, ...], problem: Problem, random: Random) -> tuple[float, ...]:
    """A little more or less for some neighbouring stages."""
    first, last = sorted((int(random.random() * len(values)), int(random.random() * len(values))))
    by = random.choice((-2, -1, 1, 2))
    limited = [min(value, problem.microbatches) for value in values]
    return tuple(max(1.0, value + by) if first <= s <= last else value for s, value in enumerate(limited))
