"""ZB-H1: backwards of weights wait until a rank would idle. No more memory than 1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action, F, I, W
from emu.parallel.pipeline.schedules.interleaved import first_round, turns
from emu.parallel.pipeline.schedules.one_f_one_b import in_turn


def zb_h1(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """1F1B with backwards in two: the part that the rank before waits for at once, that of weights `rank` backwards later.

    Rank r holds p-r microbatches, and r more of which only the weights' part is left. Idle (p-1)(T_F+T_B-T_W), where
    there are at least p microbatches and T_W is at most T_F (beyond, (p-1)T_B). With more chunks it is interleaved in the
    same way, as torch's ScheduleInterleavedZeroBubble, with rounds as in interleaved 1F1B.

    Source: Qi et al., https://arxiv.org/abs/2401.10241, section 2.1.
    """
    order = turns(ranks, microbatches, chunks)
    back = [((chunks - 1 - chunk) * ranks + rank, microbatch) for chunk, microbatch in order]
    return in_turn(
        [Action(chunk * ranks + rank, F, microbatch) for chunk, microbatch in order],
        [Action(stage, I, microbatch) for stage, microbatch in back],
        ahead=first_round(order) * (chunks - 1) + ranks - 1 - rank,
        weights=[Action(stage, W, microbatch) for stage, microbatch in back],
        late=rank,
    )
