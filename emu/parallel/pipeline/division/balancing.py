"""Cutting a row of units into contiguous parts so that the worst part is as good as can be. Pure arithmetic.

The chains-on-chains partitioning problem: Bokhari 1988, https://doi.org/10.1109/12.2113.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

from emu.spmd import PlanError, split_sizes

Load = Callable[[int, int, int], int]  # (part, start, stop) -> what that part weighs with the units from start to stop


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """How many units each stage gets, so that the dearest stage costs as little as possible.

    Args:
        costs: of every unit, at least 0.
        stages: every one gets a unit or more.

    Returns:
        The best cut there is. Of several, the one with the least sum of squares; then the one whose first stages have
        more units.

    Raises:
        PlanError: fewer units than stages, or a cost that is no finite number of at least 0.
    """
    if wrong := [cost for cost in costs if not 0 <= cost < math.inf]:
        raise PlanError(f"a unit costs {wrong[0]!r}", "give finite numbers of at least 0", field="stages")
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))  # whole numbers, so that no sum is rounded
    before = [0, *accumulate(int(cost * scale) for cost in exact)]
    return least_worst(lambda part, start, stop: before[stop] - before[start], len(costs), stages)


def least_worst(load: Load, units: int, parts: int) -> list[int]:
    """How many units each part gets, so that the heaviest part weighs as little as possible.

    A part filled up to a limit leaves the least to those after it, so a limit can be tested by filling part after part;
    bisection finds the least limit.

    Args:
        load: never less for more units.
        units: how many there are.
        parts: every one gets a unit or more.

    Returns:
        As `balanced`.

    Raises:
        PlanError: fewer units than parts.
    """
    if parts < 1 or units < parts:
        raise PlanError(f"{units} units cannot be cut into {parts} stages", f"use at most {units}", field="stages")
    known: dict[tuple[int, int, int], int] = {}

    def weighs(part: int, start: int, stop: int) -> int:
        key = part, start, stop
        if key not in known:
            known[key] = load(part, start, stop)
        return known[key]

    def fits(limit: int) -> bool:
        start = 0
        for part in range(parts):
            most = units - (parts - 1 - part)  # the others need one each
            if weighs(part, start, start + 1) > limit:
                return False
            low, high = start + 1, most
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if weighs(part, start, middle) <= limit else (low, middle - 1)
            start = low
        return start == units

    low, high = -1, 1
    while not fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return _most_even(weighs, units, parts, high)


def _most_even(load: Load, units: int, parts: int, limit: int) -> list[int]:
    """Of all cuts without a part above the limit, that of the least sum of squares."""
    after: list[list[float]] = [
        [math.inf] * (units + 1) for _ in range(parts + 1)
    ]  # part, start -> the least from there
    stops = [[0] * (units + 1) for _ in range(parts)]
    after[parts][units] = 0
    for part in reversed(range(parts)):
        for start in range(part, units - (parts - 1 - part)):
            for stop in range(start + 1, units - (parts - 1 - part) + 1):
                weight = load(part, start, stop)
                if weight > limit:
                    break
                rest = after[part + 1][stop]
                if rest < math.inf and weight * weight + rest <= after[part][start]:
                    after[part][start], stops[part][start] = weight * weight + rest, stop
    counts, start = [], 0
    for part in range(parts):
        counts.append(stops[part][start] - start)
        start = stops[part][start]
    return counts


def lightest(
    units: int, owners: Sequence[Sequence[int]], loads: Callable[[Sequence[int]], Sequence[int]], tried: int = 10_000
) -> list[int]:
    """How many units each part gets, so that the heaviest owner of parts weighs as little as possible.

    For parts that share an owner, whose loads add up; then filling part after part is not best. Few cuts are all tried. Of
    many, one is found that no move of units from a heaviest owner's part to another part betters: the best one, or close.

    Args:
        units: how many there are.
        owners: of every part.
        loads: of every owner, given the units of every part.
        tried: how many cuts are few.
    """
    parts = len(owners)

    def merit(counts: Sequence[int]) -> tuple[list[int], list[int]]:
        return sorted(loads(counts), reverse=True), [-n for n in counts]

    if math.comb(units - 1, parts - 1) <= tried:
        ends = combinations(range(1, units), parts - 1)
        return min(([b - a for a, b in pairwise((0, *inner, units))] for inner in ends), key=merit)
    starts = split_sizes(units, parts), [1] * (parts - 1) + [units - parts + 1]
    return min((_descended(start, owners, loads) for start in starts), key=merit)


def _descended(
    counts: list[int], owners: Sequence[Sequence[int]], loads: Callable[[Sequence[int]], Sequence[int]]
) -> list[int]:
    while True:
        now = loads(counts)
        best, found = sorted(now, reverse=True), None
        givers = [part for part, who in enumerate(owners) if max(now[o] for o in who) == best[0]]
        for giver in givers:
            for taker in range(len(counts)):
                for many in (1, 2, 4, 8):
                    if many < counts[giver] and taker != giver:
                        moved = list(counts)
                        moved[giver] -= many
                        moved[taker] += many  # those between pass units on
                        then = sorted(loads(moved), reverse=True)
                        if then < best:
                            best, found = then, moved
        if found is None:
            return counts
        counts = found


def spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of every part."""
    return list(pairwise([0, *accumulate(counts)]))
