"""ZB-V: two chunks a rank in the shape of a V, no bubble where F, I and W last equally long, at 1F1B's memory.

Qi et al. 2024, Zero Bubble Pipeline Parallelism (https://arxiv.org/abs/2401.10241, section 6).
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedules.words import Word, numbered, two_chunks, v_shaped


def zb_v(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """One rank's row of ZB-V.

    The first microbatch comes down the ranks and back up, so that every rank ends both its forward and its backward half
    where it began it, and no rank waits for another for longer than any other rank does. Fewer than 2 `ranks` - 1
    microbatches run as the first of so many.

    Args:
        rank: whose row.
        ranks: how many ranks; they hold twice as many stages, rank r stages r and 2 `ranks` - 1 - r.
        microbatches: how many.
        chunks: stages a rank: 2; 1 says the same.

    Raises:
        PlanError: another number of chunks.
    """
    two_chunks("zb-v", chunks)
    return numbered(_words(rank, ranks, max(microbatches, 2 * ranks - 1)), v_shaped(rank, ranks, microbatches))


def _words(r: int, p: int, m: int) -> Iterator[Word]:
    for times, words in (
        (2 * (p - r) - 1, "F0"),  # until the first microbatch is back
        (r, "F1 F0"),
        (p - r, "F1 I1 W1"),  # until its gradient is back
        (m - 2 * p + r + 1, "F0 I0 W0 F1 I1 W1"),  # steady: all six, no waiting
        (p - r - 1, "I0 W0 F1 I1 W1"),
        (r, "I0 I1"),  # gradients are what other ranks wait for, so weights do
        (p - r, "I0 W0"),
        (r, "W1"),
        (r, "W0"),
    ):
        yield from [(word,) for word in words.split()] * times
