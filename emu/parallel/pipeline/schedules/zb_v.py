"""ZB-V: two chunks a rank in the shape of a V, no bubble where F, I and W last equally long, at 1F1B's memory.

Qi et al. 2024, Zero Bubble Pipeline Parallelism (https://arxiv.org/abs/2401.10241, section 6).
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedules._words import Word, numbered, two_chunks, v_shaped


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
    f, F, i, I, w, W = ("F0",), ("F1",), ("I0",), ("I1",), ("W0",), ("W1",)  # noqa: E741, N806  # as the paper's colours
    for times, words in (
        (2 * (p - r) - 1, (f,)),  # until the first microbatch is back
        (r, (F, f)),
        (p - r, (F, I, W)),  # until its gradient is back
        (m - 2 * p + r + 1, (f, i, w, F, I, W)),  # steady: all six, no waiting
        (p - r - 1, (i, w, F, I, W)),
        (r, (i, I)),  # weights wait: gradients are what other ranks wait for
        (p - r, (i, w)),
        (r, (W,)),
        (r, (w,)),
    ):
        for _ in range(times):
            yield from words
