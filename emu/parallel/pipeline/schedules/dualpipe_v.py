"""DualPipeV: DualPipe cut in half: one direction, two chunks a rank in the shape of a V, forwards over backwards.

DeepSeek-AI 2024, DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.2.1); Qi et al. 2025, DualPipe could be better
without the Dual (https://hackmd.io/@ufotalent/r1lVXsa9Jg); https://github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedules.words import Word, numbered, two_chunks, v_shaped


def dualpipe_v(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """One rank's row of DualPipeV: pairs of a forward and a whole backward at the same time.

    A rank holds at most 2p + 1 activations of one microbatch on one chunk; 1F1B holds 2p of such. Where F, I and W last
    equally long, the ranks at the turn idle (p - 1) (F&B + B - 3W), with B = I + W and F&B for a pair.

    Fewer than 2p microbatches, for which DeepSeek has no order, run as the first of 2p, and backwards without a forward
    beside them in two parts: the whole is then never later, and no more is held.

    Args:
        rank: whose row.
        ranks: how many ranks; they hold twice as many stages, rank r stages r and 2 `ranks` - 1 - r.
        microbatches: how many.
        chunks: stages a rank: 2; 1 says the same.

    Raises:
        PlanError: another number of chunks.
    """
    two_chunks("dualpipe-v", chunks)
    pattern = words(rank, ranks, max(microbatches, 2 * ranks))
    return numbered(pattern, v_shaped(rank, ranks, microbatches), split=microbatches < 2 * ranks)


def words(r: int, p: int, m: int) -> Iterator[Word]:
    """Rank `r` of `p` with `m` >= 2 `p` microbatches a chunk: the eight steps that DeepSeek names.

    Chunk 0 is what microbatches enter first. Half of DualPipe's ranks are such a V, the other half its mirror.
    """
    after = p - 1 - r  # ranks between this one and the turn of the V
    # 1 and 2: until the first microbatch is back from the turn
    for _ in range(2 * after):
        yield ("F0",)
    for _ in range(r + 1):
        yield ("F0",)
        yield ("F1",)
    # 3: until its gradient is back
    for _ in range(after):
        yield from (("I1",), ("W1",), ("F1",))
    # 4: steady. The first pair at the turn is one after the other: its gradient is awaited, its forward is not
    for i in range(m - 2 * p + r + 1):
        yield from ((("F0",), ("B1",)) if not i and not after else (("F0", "B1"),))
        yield ("F1", "B0")
    # 5: no forwards are left for chunk 0
    for _ in range(after):
        yield ("B1",)
        yield ("F1", "B0")
    # 6: nor for chunk 1. The second half leaves weights for later, as other ranks wait for gradients only
    weights: deque[Word] = deque()
    for i in range(2 * r + 2):
        chunk = "01"[i % 2 == 0]
        yield ("B" + chunk if i <= r else "I" + chunk,)
        if i > r:
            weights.append(("W" + chunk,))
    # 7 and 8: weights, the oldest first, between the last gradients and after
    for _ in range(after):
        yield weights.popleft()
        yield ("I0",)
        weights.append(("W0",))
    yield from weights
