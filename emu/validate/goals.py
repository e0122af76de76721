"""What emu promises of its predictions on published runs that no constant was fitted to, and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .score import Pair, errors, order

MEDIAN_ERROR, MEAN_ERROR, RANK_ACCURACY = 0.08, 0.12, 0.90  # of step times
MEMORY_ERROR = 0.08
COLLECTIVE_MEDIAN_ERROR, COLLECTIVE_WORST_ERROR = 0.10, 0.25


@dataclass(frozen=True)
class Goal:
    """A promise about a figure.

    Args:
        name: what it is about.
        limit: what it must reach; at most that if `most`, else at least that.
        reached: None where no case says.
        n: cases, or pairs of cases, that it is about.
    """

    name: str
    limit: float
    reached: float | None
    n: int
    most: bool = True

    @property
    def met(self) -> bool | None:
        """None where nothing says."""
        if self.reached is None:
            return None
        return self.reached <= self.limit if self.most else self.reached >= self.limit

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "met": self.met}


def goals_of(steps: Sequence[Pair], memory: Sequence[Pair], collectives: Sequence[Pair]) -> list[Goal]:
    """The promises, for these cases.

    Args:
        steps: seconds of a step.
        memory: bytes of the fullest device.
        collectives: seconds of collectives of 1 MiB and above.
    """
    step, held, moved, ranked = errors(steps), errors(memory), errors(collectives), order(steps)
    return [
        Goal("step time, median error", MEDIAN_ERROR, step.median_ape, step.n),
        Goal("step time, mean error", MEAN_ERROR, step.mape, step.n),
        Goal("rank accuracy of alike runs", RANK_ACCURACY, ranked.accuracy, ranked.pairs, most=False),
        Goal("peak memory, median error", MEMORY_ERROR, held.median_ape, held.n),
        Goal("peak memory, worst error", MEMORY_ERROR, held.worst, held.n),
        Goal("collectives from 1 MiB, median error", COLLECTIVE_MEDIAN_ERROR, moved.median_ape, moved.n),
        Goal("collectives from 1 MiB, worst error", COLLECTIVE_WORST_ERROR, moved.worst, moved.n),
    ]
