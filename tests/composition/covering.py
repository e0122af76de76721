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


def covering(
    choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], Case | None], seed: int = 0, pool: int = 4000
) -> list[Case]:
    """Cases in which every pair of choices occurs that occurs in any of `pool` random ones.

    Args:
        choices: option -> its values.
        possible: the case made possible, or None where it cannot be.
    """
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < pool:
        case = possible({option: draw.choice(values) for option, values in choices.items()})
        if case is not None:
            found.append(case)
    each = [pairs(case) for case in found]
    left, out = set().union(*each), []
    while left:
        some = draw.sample(range(pool), min(pool, 300))
        best = max(some, key=lambda i: len(each[i] & left))
        if not each[best] & left:
            best = next(i for i in range(pool) if each[i] & left)
        out.append(found[best])
        left -= each[best]
    return out
