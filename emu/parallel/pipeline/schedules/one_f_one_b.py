"""1F1B: as soon as a backward can run it does, so that a rank holds few activations. And what all its relatives share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emu.parallel.pipeline.actions import Action, B, F
from emu.spmd import PlanError


def one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """PipeDream-Flush: a forward for every rank that follows, then a forward and a backward in turn, then backwards.

    Idle (p-1)(t_f+t_b) of every rank's time, as in GPipe; rank r holds min(m, p-r) microbatches instead of m.

    Raises:
        PlanError: more than one chunk.

    Source: Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.1.
    """
    one_chunk("1f1b", chunks, "interleaved")
    forwards = [Action(rank, F, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(rank, B, microbatch) for microbatch in range(microbatches)]
    return in_turn(forwards, backwards, ahead=ranks - 1 - rank)


def in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int, weights: Sequence[Action] = (), late: int = 0
) -> Iterator[Action]:
    """Forwards and backwards of one rank in turn; what 1F1B and its relatives differ in is how far apart these are.

    Args:
        forwards, backwards: each in its own order, as many of the one as of the other.
        ahead: how many forwards run before the first that is followed by a backward.
        weights: backwards of weights, in the order of `backwards`; () where these are whole.
        late: how many backwards later the weights' follow; the last ones close the row.
    """
    yield from forwards[:ahead]
    for index, backward in enumerate(backwards):
        if ahead + index < len(forwards):
            yield forwards[ahead + index]
        yield backward
        if weights and index >= late:
            yield weights[index - late]
    if weights:
        yield from weights[max(0, len(weights) - late) :]


def one_chunk(name: str, chunks: int, instead: str = "") -> None:
    """Raises a PlanError where a schedule that has one stage a rank is asked for more."""
    if chunks != 1:
        raise PlanError(
            f"{name} runs one chunk a rank, but chunks={chunks}",
            f"say chunks=1{f', or use {instead}' if instead else ''}",
            field="chunks",
            value=chunks,
            nearest=1,
        )
