"""Interleaved 1F1B: a rank holds several chunks of the model, far apart, and is never far from the loss."""

from __future__ import annotations

from collections.abc import Iterator

from emu.parallel.pipeline.actions import Action, B, F
from emu.parallel.pipeline.schedules.one_f_one_b import in_turn, one_f_one_b
from emu.spmd import PlanError


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int, count: int | None = None) -> Iterator[Action]:
    """1F1B over chunks: chunk c of rank r is stage c * ranks + r. Idle (p-1)(t_f+t_b)/v instead of (p-1)(t_f+t_b).

    With one chunk there is nothing to interleave: this is 1F1B.

    Args:
        count: how many microbatches in a row go through a chunk before the next chunk's turn: Llama 3's N, Megatron's
            microbatch group. None: depth-first, as few as leave no rank idle (see `turns`). As many as there are
            microbatches: breadth-first forwards. Between: more activations, and more time to hide each transfer.

    Raises:
        PlanError: a count that is no whole number from 1 to the number of microbatches, or has no effect.

    Source: Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.2; Llama 3, https://arxiv.org/abs/2407.21783,
    section 3.3.2.
    """
    order = turns(ranks, microbatches, chunks, count)
    if chunks == 1:
        yield from one_f_one_b(rank, ranks, microbatches)
        return
    forwards = [Action(chunk * ranks + rank, F, microbatch) for chunk, microbatch in order]
    backwards = [Action((chunks - 1 - chunk) * ranks + rank, B, microbatch) for chunk, microbatch in order]
    # 1F1B has one forward ahead for each rank that follows; the second one here hides what transfers take
    for action in in_turn(forwards, backwards, first_round(order) * (chunks - 1) + 2 * (ranks - 1 - rank)):
        if action.microbatch is not None:
            yield action


def turns(ranks: int, microbatches: int, chunks: int, count: int | None = None) -> list[tuple[int, int | None]]:
    """(chunk, microbatch) in the order of forwards, the same on all ranks; backwards take the chunks in reverse.

    Microbatches go in rounds: a round's microbatches pass through a chunk one after the other, then through the next.

    * count=None: as many rounds as there are whole pipelines in the batch, as equal as can be, longer ones first. Where
      `ranks` divides `microbatches` every round has `ranks`, as in Megatron; where the rounds come out equal they are
      torch's; 11 microbatches on 4 ranks, which both refuse, go as 6 and 5.
    * count=N: rounds of N, and what is left is a shorter last round.
    * A round of fewer than `ranks` among others (Megatron refuses it) is planned as one of `ranks` of which the rest are
      holes, microbatch None, where nothing runs: forwards run no further ahead than backwards let them, and no rank waits
      for one that waits for it. A batch of fewer than `ranks` is one round without holes, as in torch.

    Raises:
        PlanError: a count that is no whole number from 1 to the number of microbatches, or has no effect.
    """
    if count is None:
        rounds = max(1, microbatches // ranks)
        sizes = [microbatches // rounds + (index < microbatches % rounds) for index in range(rounds)]
    else:
        _check_count(count, microbatches, chunks)
        sizes = [min(count, microbatches - first) for first in range(0, microbatches, count)]
    order: list[tuple[int, int | None]] = []
    first = 0
    for size in sizes:
        numbers: list[int | None] = [*range(first, first + size)]
        if len(sizes) > 1:
            numbers += [None] * (ranks - size)
        order += [(chunk, microbatch) for chunk in range(chunks) for microbatch in numbers]
        first += size
    return order


def first_round(order: list[tuple[int, int | None]]) -> int:
    """How many microbatches, or holes, come to the first chunk before the second one's turn; no later round is longer."""
    return next((index for index, (chunk, _) in enumerate(order) if chunk), len(order))


def _check_count(count: int, microbatches: int, chunks: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= microbatches:
        nearest = max(1, min(count, microbatches)) if isinstance(count, int) else microbatches
        raise PlanError(
            f"count={count!r} microbatches are to go through a chunk in a row, but there are microbatches={microbatches}",
            f"say a whole number from 1 to {microbatches}; count={nearest} is the nearest",
            field="count",
            value=count,
            nearest=nearest,
        )
    if chunks == 1:
        raise PlanError(
            f"count={count} says how chunks of a rank take turns, but chunks={chunks}",
            "leave count out, or say chunks=2",
            field="count",
            value=count,
            nearest=None,
        )
