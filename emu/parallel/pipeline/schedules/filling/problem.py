"""What the automatic scheduler is asked: who holds which stage, how long each step takes, and how much a rank may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

# A step is a number, 3 * stage + kind; a row is the list of a rank's steps. Microbatches go in order, so a row needs no more:
# the first 3 * stage + FORWARD of a row is that of microbatch 0, the next of microbatch 1.
FORWARD, INPUT, WEIGHT = 0, 1, 2
Row = list[int]

TOLERANCE = 1e-9  # of a memory limit: sums of shares such as 0.1 are not exact


@dataclass(frozen=True)
class Problem:
    """A pipeline whose bubbles are to be filled.

    Args:
        places: the rank that holds each stage.
        microbatches: into how many parts the batch is cut.
        durations: seconds of each step, by its number: forward, backward of inputs, backward of weights, stage by stage.
        communication: seconds from a step's end until a neighbour on another rank may use its result.
        limit: how much a rank may hold, in activations of one microbatch on one stage.
        share: how much of that a backward of weights needs, so what is left after the backward of inputs.
    """

    places: tuple[int, ...]
    microbatches: int
    durations: tuple[float, ...]
    communication: float
    limit: float
    share: float

    @cached_property
    def ranks(self) -> int:
        return 1 + max(self.places)

    @cached_property
    def stages(self) -> int:
        return len(self.places)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Every rank's stages, lowest first."""
        return tuple(tuple(s for s, r in enumerate(self.places) if r == rank) for rank in range(self.ranks))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Of every step, the step on a stage beside it whose result it needs; -1 where there is none."""
        last = self.stages - 1
        return tuple(
            source
            for s in range(self.stages)
            for source in (3 * (s - 1) if s else -1, 3 * (s + 1) + INPUT if s < last else -1, -1)
        )

    @cached_property
    def users(self) -> tuple[int, ...]:
        """Of every step, the step on a stage beside it that needs its result; -1 where there is none."""
        users = [-1] * (3 * self.stages)
        for step, source in enumerate(self.sources):
            if source >= 0:
                users[source] = step
        return tuple(users)

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Of every step, those on its own rank that come before it."""
        return tuple(
            ((step - 1,) if step % 3 else ())
            + ((source,) if source >= 0 and self.places[source // 3] == self.places[step // 3] else ())
            for step, source in enumerate(self.sources)
        )

    @cached_property
    def lags(self) -> tuple[float, ...]:
        """Of every step, how long its source's result is on the way: nothing within a rank."""
        return tuple(
            0.0 if source < 0 or self.places[source // 3] == self.places[step // 3] else self.communication
            for step, source in enumerate(self.sources)
        )

    @cached_property
    def holds(self) -> tuple[float, ...]:
        """By how much each step changes what its rank holds."""
        return (1.0, self.share - 1.0, -self.share) * self.stages

    @cached_property
    def away(self) -> tuple[float, ...]:
        """Seconds from the end of each stage's forward until its backward may begin: to the last stage and back."""
        durations, lags = self.durations, self.lags
        away = [0.0] * self.stages
        for s in range(self.stages - 2, -1, -1):
            away[s] = away[s + 1] + durations[3 * s + 3] + durations[3 * s + 4] + lags[3 * s + 3] + lags[3 * s + 1]
        return tuple(away)

    @cached_property
    def even(self) -> Problem:
        """The same, with all steps equally long and nothing on the way."""
        return replace(self, durations=(1.0,) * len(self.durations), communication=0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Every rank's work: its span without a bubble."""
        return tuple(
            self.microbatches * sum(sum(self.durations[3 * s : 3 * s + 3]) for s in stages) for stages in self.stages_of
        )
