"""The plans that are tried: every pair of options, every mesh, every order of axes."""

from __future__ import annotations

import random
from functools import lru_cache

from .covering import Case, covering
from .plans import AXES, CHOICES, MESHES, ORDERS, cost_of, possible

POOL = 6000  # rare pairs, as of ep=8 and an order of axes, need more


def cheap(case: Case) -> float:
    """More plans that cost less: half as many that are large would cost more than twice as much."""
    return cost_of(case) ** 0.5


@lru_cache(maxsize=1)
def ordinary() -> tuple[Case, ...]:
    """Plans in which every pair of options occurs, and every order of axes."""
    choices = {**CHOICES, "order": ORDERS[:1]}
    cases = covering(choices, possible, pool=POOL, cost=cheap)
    return tuple(case | {"order": ORDERS[i % len(ORDERS)]} for i, case in enumerate(cases))


@lru_cache(maxsize=1)
def whole(seed: int = 0) -> tuple[Case, ...]:
    """Plans on every mesh of up to 16 ranks, in which every pair of options occurs, orders of axes among them."""
    return tuple(covering(CHOICES, possible, seed, 3 * POOL, cheap, on_every_mesh(seed)))


def on_every_mesh(seed: int = 0) -> list[Case]:
    """A random plan on each mesh of up to 16 ranks over dp, pp, cp and tp."""
    draw = random.Random(seed)
    out = []
    for sizes in MESHES:
        case = None
        while case is None:
            case = possible(
                {option: draw.choice(values) for option, values in CHOICES.items()} | dict(zip(AXES, sizes))
            )
        out.append(case)
    return out
