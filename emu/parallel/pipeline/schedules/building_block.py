"""A schedule from a building block: what one microbatch does on every rank and when, repeated, then squeezed.

Qi et al. 2024, Pipeline Parallelism with Controllable Memory (https://arxiv.org/abs/2405.15362). How long a microbatch's
activations live in the block decides how many are held at once, so a block is a choice of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import Final

from emu.parallel.pipeline.schedules.words import Word
from emu.spmd import PlanError

Block = tuple[tuple[int, int, int, int], ...]  # by rank, the first microbatch's ticks of F0, F1, I1, I0

PERIOD: Final = 6  # ticks between microbatches: F, I and W of two chunks, a tick each, leave no rank idle

_PASSES: Final[tuple[Word, ...]] = (("F0",), ("F1",), ("I1",), ("I0",))
_WEIGHTS: Final[tuple[Word, ...]] = ((), (), ("W1",), ("W0",))  # what each of them leaves to do
_WORK: Final = 4  # in an order: the next of these, if some are left


@lru_cache(maxsize=8)  # as every rank asks for its own row
def squeezed(block: Block, microbatches: int, held: int) -> tuple[tuple[Word, ...], ...]:
    """Every rank's row, in words: the block at every `PERIOD`, then without the waiting that this leaves at both ends.

    A rank does all in the order that the repeated block has it, weights in the block's free ticks, and each as early as it
    can; where it would wait, it works on weights if some are left. Once it has begun its last microbatch it works on them
    only there, or at the end, as from then on others wait for its gradients.

    Args:
        block: in the shape of a V: F0 and I1 go from rank 0 to the last, F1 and I0 come back.
        microbatches: how many.
        held: how many activations, of one microbatch on one chunk, a rank may hold from a forward to the end of weights.

    Raises:
        PlanError: that is too few for the block's order.
    """
    ranks, last = len(block), len(block) - 1
    needs = [  # by rank and pass: which pass of which rank comes before; a fifth pass is where the model's input comes from
        (
            (0, r - 1) if r else (4, 0),
            (1, r + 1) if r < last else (0, last),
            (2, r - 1) if r else (1, 0),
            (3, r + 1) if r < last else (2, last),
        )
        for r in range(ranks)
    ]
    done = [*([0] * ranks for _ in _PASSES), [microbatches]]  # by pass and rank: how many
    orders = [_order(ticks, microbatches) for ticks in block]
    ahead = [next(order, None) for order in orders]
    left = [list[Word]() for _ in block]  # weights to work on, in turn
    worked, memory = [0] * ranks, [0] * ranks
    rows = [list[Word]() for _ in block]
    todo = ranks * microbatches * PERIOD
    while todo:
        before, ran = todo, []
        for r, row in enumerate(rows):
            k = ahead[r]
            some = worked[r] < len(left[r])
            while k == _WORK and (done[0][r] == microbatches or not some):
                k = ahead[r] = next(orders[r], None)
            if k is not None and k != _WORK:
                source, rank = needs[r][k]
                if done[source][rank] > done[k][r] and (k > 1 or memory[r] < held):
                    ran.append((k, r))
                    ahead[r] = next(orders[r], None)
                    continue
            if some:
                row.append(left[r][worked[r]])
                worked[r] += 1
                memory[r] -= 1
                todo -= 1
                if k == _WORK:
                    ahead[r] = next(orders[r], None)
        for k, r in ran:  # apart from the choice: what ends in a tick is of use from the next one on
            rows[r].append(_PASSES[k])
            done[k][r] += 1
            if k > 1:
                left[r].append(_WEIGHTS[k])
            else:
                memory[r] += 1
        todo -= len(ran)
        if todo == before:  # nobody did anything, so nobody ever will
            raise PlanError(
                f"this building block needs more than {held} activations a rank",
                "hold more, or use a block in which they live less long",
                field="held",
                value=held,
                nearest=held + 1,
            )
    return tuple(map(tuple, rows))


def _order(ticks: tuple[int, int, int, int], microbatches: int) -> Iterator[int]:
    """A rank's passes as the repeated block has them, and a chance to work on weights in every free tick between."""
    free = 0
    for tick, k in sorted((tick + PERIOD * j, k) for k, tick in enumerate(ticks) for j in range(microbatches)):
        yield from repeat(_WORK, tick - free)
        yield k
        free = tick + 1
