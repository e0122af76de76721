"""V-Half: about half of 1F1B's memory and half of its bubble, two chunks a rank in the shape of a V.

Qi et al. 2024, Pipeline Parallelism with Controllable Memory (https://arxiv.org/abs/2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedules.building_block import Block, squeezed
from emu.parallel.pipeline.schedules.words import numbered, two_chunks, v_shaped


def v_half(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """One rank's row of V-Half.

    A rank holds at most h activations of one microbatch on one chunk, the next even number above p (or twice the
    microbatches, if that is less); 1F1B holds 2p of such. Where F, I and W last equally long, every rank idles for
    4p - 3 - h of these, if p > 2; in 1F1B 6(p - 1).

    Args:
        rank: whose row.
        ranks: how many ranks; they hold twice as many stages, rank r stages r and 2 `ranks` - 1 - r.
        microbatches: how many.
        chunks: stages a rank: 2; 1 says the same.

    Raises:
        PlanError: another number of chunks.
    """
    two_chunks("v-half", chunks)
    return numbered(
        squeezed(block(ranks), microbatches, 2 * (ranks // 2 + 1))[rank], v_shaped(rank, ranks, microbatches)
    )


def block(p: int) -> Block:
    """Two ticks from rank to rank away from rank 0, one on the way back: activations live 6p ticks, both chunks together.

    With an even number of ranks microbatches turn three ticks later, or two passes would fall on one tick of the six.
    """
    turn = 0 if p % 2 else 3
    down, up = 3 * p - 2 + turn, 3 * p - 1 + turn
    return tuple((2 * r, down - r, up + 2 * r, up + 3 * p - 1 + turn - r) for r in range(p))
