"""V-Min: about a third of 1F1B's memory, two thirds of its bubble, two chunks a rank in the shape of a V.

Qi et al. 2024, Pipeline Parallelism with Controllable Memory (https://arxiv.org/abs/2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedules.building_block import Block, squeezed
from emu.parallel.pipeline.schedules.words import numbered, two_chunks, v_shaped


def v_min(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """One rank's row of V-Min.

    A rank holds at most 2 floor((p + 4) / 3) activations of one microbatch on one chunk; 1F1B holds 2p of such. Where F,
    I and W last equally long, every rank idles for 4p - 5 of these, if p > 1; in 1F1B 6(p - 1). Where they do not, ranks
    may wait in every round: there is no slack in so little memory.

    Args:
        rank: whose row.
        ranks: how many ranks; they hold twice as many stages, rank r stages r and 2 `ranks` - 1 - r.
        microbatches: how many.
        chunks: stages a rank: 2; 1 says the same.

    Raises:
        PlanError: another number of chunks.
    """
    two_chunks("v-min", chunks)
    return numbered(
        squeezed(block(ranks), microbatches, 2 * ((ranks + 4) // 3))[rank], v_shaped(rank, ranks, microbatches)
    )


def block(p: int) -> Block:
    """One tick from rank to rank, all the way: activations live 4p ticks, both chunks together.

    With a multiple of three ranks, microbatches turn two ticks later, or two passes would fall on one tick of the six.
    """
    turn = 0 if p % 3 else 2
    down, up = 2 * p - 1 + turn, 2 * p + turn
    return tuple((r, down - r, up + r, up + 2 * p - 1 + turn - r) for r in range(p))
