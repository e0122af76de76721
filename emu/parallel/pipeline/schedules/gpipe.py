"""GPipe: all forwards, then all backwards. With several chunks a rank: breadth-first, a chunk after the other."""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action, B, F


def gpipe(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """All forwards, then all backwards: simple, and every microbatch's activations are held at once.

    Chunk c of rank r is stage c * ranks + r. With one chunk, backwards run in the order of the forwards; with more, in
    reverse, so that the last activation made is the first one freed. (Both as torch has it: ScheduleGPipe,
    ScheduleLoopedBFS.) Idle (p-1)(t_f+t_b)/v of every rank's time if there are at least p microbatches.

    Source: Huang et al., https://arxiv.org/abs/1811.06965; Lamy-Poirier, https://arxiv.org/abs/2211.05953.
    """
    stages = range(rank, ranks * chunks, ranks)
    for stage in stages:
        for microbatch in range(microbatches):
            yield Action(stage, F, microbatch)
    back = range(microbatches) if chunks == 1 else range(microbatches - 1, -1, -1)
    for stage in reversed(stages):
        for microbatch in back:
            yield Action(stage, B, microbatch)
