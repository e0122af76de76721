"""Cases in which every pair of choices occurs: most faults of many options need only two of them at once.

Kuhn, Wallace, Gallo 2004, "Software fault interactions and implications for software testing", https://doi.org/10.1109/TSE.2004.24.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]


def pairs(case: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    """Every two choices of a case."""
    return {(a, case[a], b, case[b]) for a, b in combinations(sorted(case), 2)}


def pool_of(
    choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], Case | None], seed: int = 0, size: int = 4000
) -> list[Case]:
    """Random cases that can be.

    Args:
        choices: option -> its values.
        possible: the case made possible, or None where it cannot be.
    """
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < size:
        case = possible({option: draw.choice(values) for option, values in choices.items()})
        if case is not None:
            found.append(case)
    return found


def covering(
    choices: Mapping[str, Sequence[Any]],
    possible: Callable[[Case], Case | None],
    seed: int = 0,
    pool: int = 4000,
    cost: Callable[[Case], float] = lambda case: 1.0,
    first: Sequence[Case] = (),
) -> list[Case]:
    """Cases in which every pair of choices occurs that occurs in any of `pool` random ones; cheap ones where it can choose.

    Args:
        cost: of trying a case.
        first: cases that are to be among them.
    """
    found = pool_of(choices, possible, seed, pool)
    draw = random.Random(seed)
    bits: dict[Any, int] = {}  # of a pair; a set of pairs is a number, which is quicker to cut and count
    each = [_mask(case, bits) for case in found]
    costs = [cost(case) for case in found]
    out = list(first)
    left = (1 << len(bits)) - 1
    for case in out:
        left &= ~_mask(case, bits)
    while left:
        some = draw.sample(range(pool), min(pool, 300))
        best = max(some, key=lambda i: (each[i] & left).bit_count() / costs[i])
        if not each[best] & left:
            best = max(range(pool), key=lambda i: (each[i] & left).bit_count() / costs[i])
        out.append(found[best])
        left &= ~each[best]
    return out


def _mask(case: Case, bits: dict[Any, int]) -> int:
    mask = 0
    for pair in pairs(case):
        mask |= 1 << bits.setdefault(pair, len(bits))
    return mask
