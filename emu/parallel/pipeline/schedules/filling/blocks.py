"""Building blocks: what one microbatch does on every rank and when, so that it can be repeated without two steps at once.

Each chunk's forwards, and its backwards of inputs, follow each other from stage to stage at the same distance. Time is
counted in ticks, one for each step whatever it takes: a block gives an order, and how much memory that order needs.
The idea of Qi et al. 2024 (https://arxiv.org/abs/2405.15362, section 3), who search among blocks as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from emu.parallel.pipeline.schedules.filling.problem import FORWARD, INPUT, TOLERANCE, WEIGHT, Problem, Row

MOST = 32  # blocks
Block = tuple[int, ...]  # the tick of each step, by its number


@lru_cache(maxsize=64)
def blocks(places: tuple[int, ...], ranks: int) -> tuple[Block, ...]:
    """The shortest blocks for each choice of distances; the same sum of them on the way out and back holds ranks equal.

    Args:
        places: the rank that holds each stage: those of the even chunks from first to last, those of the odd ones back.
        ranks: how many; every `ranks` stages are a chunk.

    Returns:
        At most `MOST`, of short distances and of long; none with more than three chunks, where the search would take long.
    """
    if len(places) > 3 * ranks:
        return ()
    period = 3 * len(places) // ranks
    found = {}
    for whole in range(2, period + 1):
        # A rank's order stays the same if its clock is set: so the way out may be 1, by setting it a little more on each rank.
        for back in range(1, whole):
            for block in _Legs(places, ranks, (1, back), (whole - 1, whole - back), period).shortest():
                found[block] = None
    return tuple(found)[:: 1 + (len(found) - 1) // MOST]


class _Legs:
    """A block in the making: leg by leg, a chunk's forwards or backwards from its first stage to its last, or back."""

    def __init__(
        self, places: tuple[int, ...], ranks: int, forward: tuple[int, int], backward: tuple[int, int], period: int
    ) -> None:
        self.places, self.period = places, period
        chunks = [range(first, first + ranks) for first in range(0, len(places), ranks)]
        self.legs = [(forward[c % 2], [3 * s + FORWARD for s in chunk]) for c, chunk in enumerate(chunks)]
        back = [(backward[c % 2], [3 * s + INPUT for s in reversed(chunk)]) for c, chunk in enumerate(chunks)]
        self.legs += reversed(back)
        self.taken = [[False] * period for _ in range(ranks)]
        self.ticks = [0] * (3 * len(places))

    def shortest(self) -> list[Block]:
        """Those that wait least between a leg and the next, all waiting together; none where that is too much."""
        for waits in range(2 * self.period):
            if found := list(self._laid(0, 0, waits)):
                return found
        return []

    def _laid(self, leg: int, start: int, waits: int) -> Iterator[Block]:
        """Blocks with this leg from `start` on and those after it, if legs wait for so many ticks altogether."""
        if leg == len(self.legs):
            if not waits:
                yield self._with_weights()
            return
        apart, steps = self.legs[leg]
        for wait in range(min(waits, self.period - 1) + 1 if leg else 1):
            laid = []
            for nth, step in enumerate(steps):
                tick = self.ticks[step] = start + wait + apart * nth
                taken, spot = self.taken[self.places[step // 3]], tick % self.period
                if taken[spot]:
                    break
                taken[spot] = True
                laid.append((taken, spot))
            else:
                yield from self._laid(leg + 1, self.ticks[steps[-1]] + 1, waits - wait)
            for taken, spot in laid:
                taken[spot] = False

    def _with_weights(self) -> Block:
        """Backwards of weights in the ticks that are left, each in the first after that of inputs."""
        ticks, period = list(self.ticks), self.period
        taken = [list(of) for of in self.taken]
        for tick, step in sorted((ticks[step], step) for step in range(INPUT, len(ticks), 3)):
            mine = taken[self.places[step // 3]]
            free = next(t for t in range(tick + 1, tick + 1 + period) if not mine[t % period])
            mine[free % period] = True
            ticks[step + WEIGHT - INPUT] = free
        return tuple(ticks)


def repeated(problem: Problem, block: Block) -> list[Row] | None:
    """Rows in the order of this block at every period; None where they do not fit into the memory."""
    period = 3 * problem.stages // problem.ranks
    rows = []
    for stages in problem.stages_of:
        steps = [3 * s + kind for s in stages for kind in (FORWARD, INPUT, WEIGHT)]
        ticks = sorted((block[step] + period * k, step) for step in steps for k in range(problem.microbatches))
        row = [step for _, step in ticks]
        if _peak(problem, row) > problem.limit + TOLERANCE:
            return None
        rows.append(row)
    return rows


def _peak(problem: Problem, row: Row) -> float:
    """What a rank holds at most in this order if it does weights at once."""
    held = most = 0.0
    for step in row:
        if step % 3 == FORWARD:
            held += 1.0
            most = max(most, held)
        elif step % 3 == INPUT:
            held -= 1.0
            most = max(most, held + problem.share)
    return most
