"""The automatic schedule: whatever fills the bubbles best, for these times and within this memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from numbers import Real

from emu.parallel.pipeline.actions import Action, F, I, W
from emu.parallel.pipeline.schedules.filling import Problem, fill, lower_bound
from emu.parallel.pipeline.timing import AS_TIMES, Times
from emu.spmd import EmuError, PlanError

KINDS = (F, I, W)  # of the steps of `filling`, in its order
EQUAL = Times()


def auto(
    rank: int,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    times: Times = EQUAL,
    memory: float | None = None,
    weight_share: float = 0.5,
    effort: float = 1.0,
) -> Iterator[Action]:
    """The shortest schedule found: of the smallest cost, that is the longest span of a rank, then of the smallest makespan.

    Greedy schedules by many tastes and, for two or three chunks in a V, building blocks repeated and squeezed; pushed
    to their ends and back, the best of them bettered step by step; the same on every machine. With one chunk, stage s
    is on rank s. With more, a rank's stages may be in a V (0..p-1, p-1..0), loop (stage s on rank s % p) or follow each
    other (stage s on rank s // chunks, as with one chunk but in smaller steps), whichever comes out best; more chunks
    have more transfers, so neither is always better.

    Args:
        times: of one stage, or of each of the ranks * chunks stages: what `timed` takes as well. All equal by default.
        memory: how much a rank may hold, in activations of one microbatch on all of a rank's stages; by default
            `ranks`, as much as 1F1B takes.
        weight_share: how much of a stage's activations is kept from its backward of inputs to that of weights.
        effort: how long to search, 1 for about a second at most, 0.1 for a quick look, 0 for the first that is found.

    Raises:
        PlanError: memory for less than one microbatch; times for another number of stages; what is no number, or no effort.

    Source: the cost and the idea of Qi et al., https://arxiv.org/abs/2401.10241, section 3; of a search among building
    blocks, Qi et al., https://arxiv.org/abs/2405.15362, section 3; the algorithm is our own.
    """
    _asked(times, memory=ranks if memory is None else memory, weight_share=weight_share, effort=effort)
    if not 0 <= effort < math.inf:
        raise PlanError(
            f"effort={effort!r} is no effort",
            "say effort=1 for about a second of searching, 0.1 for a quick look",
            field="effort",
            value=effort,
            nearest=0 if effort < 0 else None,
        )
    yield from _rows(ranks, microbatches, chunks, times, memory, weight_share, effort)[rank]


def least_cost(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    times: Times = EQUAL,
    memory: float | None = None,
    weight_share: float = 0.5,
) -> float:
    """What the cost of no schedule can be below, with the stages placed as `auto` may place them; in the unit of the times.

    From a rank's work; the pauses at its start and end that its memory cannot fill; the chain to a rank further on and
    back; and how long microbatches are held altogether. Arguments as of `auto`.
    """
    return min(lower_bound(problem) for problem in _problems(ranks, microbatches, chunks, times, memory, weight_share))


@lru_cache(maxsize=64)
def _rows(
    ranks: int,
    microbatches: int,
    chunks: int,
    times: Times,
    memory: float | None,
    weight_share: float,
    effort: float,
) -> tuple[tuple[Action, ...], ...]:
    _, found = fill(_problems(ranks, microbatches, chunks, times, memory, weight_share), effort)
    rows = []
    for row in found.rows:
        nth: dict[int, int] = {}
        actions = []
        for step in row:
            nth[step] = microbatch = nth.get(step, -1) + 1
            actions.append(Action(step // 3, KINDS[step % 3], microbatch))
        rows.append(tuple(actions))
    return tuple(rows)


def _problems(
    ranks: int, microbatches: int, chunks: int, times: Times, memory: float | None, weight_share: float
) -> list[Problem]:
    limit = ranks if memory is None else memory
    _asked(times, memory=limit, weight_share=weight_share)
    stages = ranks * chunks
    durations = [_each(times, name, stages, ranks, chunks) for name in ("forward", "backward_input", "weight")]
    if not 0 <= weight_share <= 1:
        raise PlanError(
            f"weight_share={weight_share!r} is no share of a stage's activations",
            "say how much of them a backward of weights needs, from 0 to 1: half of them is 0.5",
            field="weight_share",
            value=weight_share,
        )
    if limit < 1:
        raise PlanError(
            f"memory={limit!r} is less than the activations of 1 microbatch, and every rank has to hold one",
            "memory=1 is the least that any schedule can do with; smaller microbatches take less",
            field="memory",
            value=limit,
            nearest=1,
        )
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    placements = {
        sum(((there, back)[chunk % 2] for chunk in range(chunks)), ()): "V",
        there * chunks: "loop",
        tuple(stage // chunks for stage in range(stages)): "follow",
    }
    return [
        Problem(
            places,
            microbatches,
            tuple(float(kind[stage]) for stage in range(stages) for kind in durations),
            float(times.communication),
            # More than all there is helps nobody, and infinity is no number to count with.
            min(float(limit), microbatches) * chunks,
            float(weight_share),
        )
        for places in placements
    ]


def _each(times: Times, name: str, stages: int, ranks: int, chunks: int) -> tuple[float, ...]:
    value = getattr(times, name)
    each = value if isinstance(value, tuple) else (value,) * stages
    if len(each) != stages:
        raise PlanError(
            f"Times({name}=...) has {len(each)} times, but {ranks} ranks with {chunks} chunks each have {stages} stages",
            f"give one number for all stages, or {stages}, in the stages' order",
            field="times",
            value=times,
        )
    return each


def _asked(times: object, **numbers: object) -> None:
    """Raises unless these are times and numbers: before they are looked up among earlier ones, where True equals 1."""
    if not isinstance(times, Times):
        raise EmuError(f"times={times!r:.60} are no Times", f"say {AS_TIMES}", value=times)
    for name, value in numbers.items():
        _number(name, value)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise PlanError(f"{name}={value!r} is no number", f"say {name}=1.0", field=name, value=value)
