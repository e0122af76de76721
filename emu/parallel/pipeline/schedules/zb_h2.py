"""ZB-H2: as ZB-H1, with so many forwards ahead that no rank waits for its first backward. About twice the memory."""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action, F, I, W
from emu.parallel.pipeline.schedules.one_f_one_b import in_turn, one_chunk


def zb_h2(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """1F1B with twice the forwards ahead, and the backwards of weights 2 * rank backwards late: rows without a hole.

    Rank r holds 2(p-r)-1 microbatches, and 2r more of which only the weights' part is left. Idle (p-1)(T_F+T_B-2T_W),
    where there are at least 2p-1 microbatches and that is neither below 0 nor below (p-1)(T_B-T_F): nothing where the
    three times are equal. Ranks start one after the other and stop one after the other, so that the optimizer's step must
    not wait for all of them (see emu.parallel.optimistic).

    Raises:
        PlanError: more than one chunk.

    Source: Qi et al., https://arxiv.org/abs/2401.10241, section 2.2.
    """
    one_chunk("zb-h2", chunks, "zb-h1")
    return in_turn(
        [Action(rank, F, microbatch) for microbatch in range(microbatches)],
        [Action(rank, I, microbatch) for microbatch in range(microbatches)],
        ahead=2 * (ranks - 1 - rank),
        weights=[Action(rank, W, microbatch) for microbatch in range(microbatches)],
        late=2 * rank,
    )
