"""DualPipe: microbatches enter at both ends, so that every rank has a forward to run over each backward.

DeepSeek-AI 2024, DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.2.1); https://github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedules.dualpipe_v import words
from emu.parallel.pipeline.schedules.words import Chunk, numbered, two_chunks
from emu.spmd import PlanError


def dualpipe(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """One rank's row of DualPipe.

    The first half of the microbatches (rounded up) goes from rank 0 to the last, the second half from the last to 0. So a
    rank holds two stages of the model, r and `ranks` - 1 - r, and a stage is held by two ranks. Each half of the ranks is
    a V as in DualPipeV, one the mirror of the other, and each microbatch turns from one to the other in the middle.

    A rank holds at most p + 1 activations of one microbatch on one stage; 1F1B holds p. Where F, I and W last equally
    long, the ranks in the middle idle (p/2 - 1) (F&B + B - 3W), with B = I + W and F&B for a pair. Fewer than 2p
    microbatches run as in DualPipeV.

    Args:
        rank: whose row.
        ranks: how many ranks, and stages; even.
        microbatches: how many; where odd, the last has no partner in the other direction.
        chunks: stages a rank: 2; 1 says the same.

    Raises:
        PlanError: another number of chunks; an odd number of ranks, the middle one of which would hold one stage twice.
    """
    two_chunks("dualpipe", chunks)
    if ranks % 2:
        raise PlanError(
            f"dualpipe needs an even number of ranks, but pp={ranks}: rank {ranks // 2} would be its own mirror",
            f"use pp={ranks + 1}, or dualpipe-v, which runs on any number",
            field="pp",
            value=ranks,
            nearest=ranks + 1,
        )
    half = microbatches - microbatches // 2
    down, up = Chunk(rank, 0, half), Chunk(ranks - 1 - rank, half, microbatches // 2)
    inner = min(rank, ranks - 1 - rank)  # which rank of its V: microbatches enter at 0, and turn at the last
    pattern = words(inner, ranks // 2, max(half, ranks))
    return numbered(pattern, (down, up) if inner == rank else (up, down), split=microbatches < 2 * ranks)
