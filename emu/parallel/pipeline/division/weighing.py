"""Cutting a model so that stages cost alike, or so that ranks need little memory: how many layers each stage gets.

What comes before the layers stays with the first stage, what comes after with the last, which both may be all that they
have: a head with a large vocabulary is worth several layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor, nn

from emu.parallel.pipeline.actions import COMPUTE, B, F, I, W
from emu.parallel.pipeline.division.balancing import balanced, least_worst, lightest, spans
from emu.parallel.pipeline.division.measuring import Measured, measure
from emu.parallel.pipeline.division.units import layers_of, units_of
from emu.parallel.pipeline.schedule import Schedule
from emu.spmd import PlanError

WEIGHED = ("cost", "memory")


class Pieces(NamedTuple):
    """What a model may be cut into at most.

    Fields:
        of: what each needs, as its units together.
        before, after: 1 if there are units before the layers, or after them, and 0 if not.
    """

    of: list[Measured]
    before: int
    after: int

    def layers(self, counts: Sequence[int]) -> list[int]:
        """Pieces per stage -> layers per stage."""
        counts = list(counts)
        counts[0] -= self.before
        counts[-1] -= self.after
        return counts


def layers_by_cost(model: nn.Module, stages: int, example: tuple[Tensor, Tensor]) -> list[int]:
    """How many layers each stage gets so that the one with the most to compute has as little as possible.

    What counts are the products' flops, and one addition per parameter, of its gradient to the step's: of two cuts with
    the same products, the better one has an embedding alone with fewer layers. A backward's flops are twice a forward's,
    on every stage, and so change nothing.

    Args:
        example: (x, y), one microbatch, of which only shapes count.

    Raises:
        PlanError: more stages than pieces.
        EmuError: a model that cannot be measured.
    """
    pieces = _pieces(model, stages, example)
    return pieces.layers(balanced([piece.flops + sum(piece.parameters.values()) for piece in pieces.of], stages))


def layers_by_memory(
    model: nn.Module,
    schedule: Schedule,
    example: tuple[Tensor, Tensor],
    bytes_per_parameter: float = 16,
    weight_share: float = 0.5,
    recompute: bool = False,
) -> list[int]:
    """How many layers each stage gets so that the rank which needs the most memory needs as little as possible.

    A rank needs memory for its parameters, and for the activations of all microbatches that it has under way at once.
    With one stage a rank the cut is the best there is; with several, whose needs add up, see `lightest`.

    Args:
        schedule: who holds which stage, and how many microbatches of it at once.
        example: (x, y), one microbatch, of which only shapes and dtypes count.
        bytes_per_parameter: with its gradient and optimizer states. 16 is Adam's, in float32 or in mixed precision
            (https://arxiv.org/abs/1910.02054, section 3.1); less where those are sharded.
        weight_share: of a microbatch's activations, what the backward of inputs leaves for that of weights.
        recompute: whether stages keep their inputs alone, and compute the rest again, one microbatch at a time.

    Raises:
        PlanError: more stages than pieces.
        EmuError: a model that cannot be measured.
    """
    stages = schedule.stages
    pieces = _pieces(model, stages, example)
    needs = Needs(pieces.of, schedule, bytes_per_parameter, weight_share, recompute)
    owners = schedule.ranks_of
    if all(len(mine) == 1 for mine in schedule.stages_of):
        counts = least_worst(lambda s, a, b: needs.bytes({s: (a, b)}, owners[s][0]), len(pieces.of), stages)
    else:
        counts = lightest(len(pieces.of), owners, needs.by_rank)
    return pieces.layers(counts)


def weighed(
    how: str, model: nn.Module, schedule: Schedule, example: tuple[Tensor, Tensor] | None, recompute: bool
) -> list[int]:
    """How many layers each stage gets by "cost" or by "memory".

    Raises:
        PlanError: without an example, or of a model that is cut inside its layers.
        EmuError: a model that cannot be measured.
    """
    if hasattr(model, "cut_inside"):
        raise PlanError(
            f"stages={how!r} asks to measure a plain model, and {type(model).__name__} is cut inside its layers",
            f"call layers_by_{how} of emu.parallel.pipeline before shard_model, and pass its result as stages",
            field="stages",
        )
    if not isinstance(example, (tuple, list)) or len(example) != 2 or not all(isinstance(t, Tensor) for t in example):
        raise PlanError(
            f"stages={how!r} measures the model with a microbatch, and "
            f"{'there is none' if example is None else f'example is no (x, y), but {type(example).__name__}'}",
            "pass one, of any numbers: example=(x[:2], y[:2])",
            field="stages",
        )
    x, y = example
    if how == "memory":
        return layers_by_memory(model, schedule, (x, y), recompute=recompute)
    return layers_by_cost(model, schedule.stages, (x, y))


class Needs:
    """The memory of ranks, for any cut into contiguous parts.

    Args:
        units: what is cut.
        schedule, bytes_per_parameter, weight_share, recompute: as for `layers_by_memory`.
    """

    def __init__(
        self,
        units: Sequence[Measured],
        schedule: Schedule,
        bytes_per_parameter: float = 16,
        weight_share: float = 0.5,
        recompute: bool = False,
    ) -> None:
        self.schedule, self.bytes_per_parameter, self.recompute = schedule, bytes_per_parameter, recompute
        self.flights = [in_flight(schedule, rank, weight_share) for rank in range(schedule.ranks)]
        self.inputs = [unit.input_bytes for unit in units]
        self._saved = _Sums([unit.saved for unit in units])
        self._parameters = _Sums([unit.parameters for unit in units])

    def by_rank(self, counts: Sequence[int]) -> list[int]:
        """Bytes of every rank, with so many units on each stage."""
        of = spans(counts)
        return [self.bytes({s: of[s] for s in mine}, rank) for rank, mine in enumerate(self.schedule.stages_of)]

    def bytes(self, stages: dict[int, tuple[int, int]], rank: int) -> int:
        """Of one rank with these units, (start, stop) of each of its stages."""
        saved = {s: self._saved.of(((a, b),)) for s, (a, b) in stages.items()}
        kept = {s: self.inputs[a] for s, (a, _) in stages.items()} if self.recompute else saved
        again = max(saved.values()) if self.recompute else 0
        most = max((sum(n * kept[s] for s, n in flight if s in kept) for flight in self.flights[rank]), default=0)
        return math.ceil(self._parameters.of(stages.values()) * self.bytes_per_parameter + most + again)


def in_flight(schedule: Schedule, rank: int, weight_share: float = 0.5) -> list[tuple[tuple[int, float], ...]]:
    """How many microbatches' activations a rank holds at once, of each of its stages: [((stage, held), ...), ...].

    The moments at which it holds most; a moment at which it holds no more of any stage than at another is left out.
    """
    stages = schedule.stages_of[rank]
    place = {stage: i for i, stage in enumerate(stages)}
    whole, left = [0] * len(stages), [0] * len(stages)
    moments: set[tuple[float, ...]] = set()
    for action in schedule.rows[rank]:
        parts = [a for a in action.each() if a.kind in COMPUTE]
        for a in parts:
            whole[place[a.stage]] += a.kind == F
        moments.add(tuple(w + n * weight_share for w, n in zip(whole, left)))
        for a in parts:
            i = place[a.stage]
            whole[i] -= a.kind in (B, I)
            left[i] += (a.kind == I) - (a.kind == W)
    most = [m for m in moments if not any(m != n and all(a <= b for a, b in zip(m, n)) for n in moments)]
    return [tuple(zip(stages, moment)) for moment in sorted(most)]


class _Sums:
    """Sums over ranges of units, of things that several units may share, and that count once."""

    def __init__(self, units: Sequence[dict[int, int]]) -> None:
        seen: dict[int, int] = {}
        for unit in units:
            for key in unit:
                seen[key] = seen.get(key, 0) + 1
        self._before = [0, *accumulate(sum(n for key, n in unit.items() if seen[key] == 1) for unit in units)]
        self._shared = [{key: n for key, n in unit.items() if seen[key] > 1} for unit in units]
        self._in = cache(self._found)

    def _found(self, start: int, stop: int) -> dict[int, int]:
        return {key: n for unit in self._shared[start:stop] for key, n in unit.items()}

    def of(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Of all units in these ranges together."""
        total, shared = 0, {}
        for start, stop in ranges:
            total += self._before[stop] - self._before[start]
            shared.update(self._in(start, stop))
        return total + sum(shared.values())


def _pieces(model: nn.Module, stages: int, example: tuple[Tensor, Tensor]) -> Pieces:
    units = units_of(model)
    layers = layers_of(units)
    first, last = (layers[0], layers[-1] + 1) if layers else (0, 0)
    pieces = len(layers) + (first > 0) + (last < len(units)) if layers else 0
    if pieces < stages:
        raise PlanError(
            f"{stages} stages, but {type(model).__name__} has {len(layers)} layers to share out",
            f"use at most {pieces} stages (pp * chunks)"
            if layers
            else "say where stages begin by the names of modules",
            field="stages",
            nearest=max(pieces, 1),
        )
    of = measure(model, *example)
    groups = [of[:first], *([of[i]] for i in layers), of[last:]]
    return Pieces([_together(group) for group in groups if group], int(first > 0), int(last < len(units)))


def _together(units: Sequence[Measured]) -> Measured:
    saved: dict[int, int] = {}
    parameters: dict[int, int] = {}
    for unit in units:
        saved.update(unit.saved)
        parameters.update(unit.parameters)
    return Measured(sum(unit.flops for unit in units), saved, parameters, units[0].input_bytes)
