"""Several ways to do the same, timed in rounds, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping


def compared(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, after a first round that warms up; prints them against the first way.

    Every round runs all ways after each other, in turning order. A round's ratio is to its own first way; medians over
    rounds are printed, with the middle half of the rounds beside them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round in range(rounds + 1):
        turned = list(ways)[round % len(ways) :] + list(ways)[: round % len(ways)]
        for name in turned:
            took = ways[name]()
            if round:
                seconds[name].append(took)
    base = next(iter(seconds.values()))
    print(f"{'CPU time of a step':30} {'median':>9} {'of single':>10} {'middle half':>14}")
    for name, times in seconds.items():
        ratios = sorted(t / b for t, b in zip(times, base))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{name:30} {statistics.median(times) * 1e3:6.0f} ms {statistics.median(ratios):10.2f} {low:7.2f} - {high:.2f}"
        )
    return seconds
