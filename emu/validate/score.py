"""How far predictions are off, and whether they put runs in the right order: figures over plain numbers.

An error is signed and relative, predicted over measured less one. Its size is taken for medians and means, so that 0.08
is eight percent; bias keeps the sign.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

# Two runs are in an order when their times differ by more than this: the same layout differs by 5.8 % (median) between
# two releases of one framework (the reference's README).
NOISE = 0.06
WITHIN = (0.05, 0.10, 0.20)


@dataclass(frozen=True)
class Pair:
    """A predicted and a measured number of one case, and what it is grouped by.

    Args:
        id: the case's.
        measured, predicted: in one unit, above 0.
        source: where it was read.
        axes: name of an axis to its value, for errors by axis.
        alike: what two runs must have in common to be ordered: source, model, hardware, devices.
        batch: what they must have in common besides to be ordered by the harder count: batch and sequence.
    """

    id: str
    measured: float
    predicted: float
    source: str = ""
    axes: Mapping[str, str] = field(default_factory=dict)
    alike: Hashable = None
    batch: Hashable = None

    @property
    def error(self) -> float:
        """Signed and relative: predicted / measured - 1."""
        return self.predicted / self.measured - 1


class Errors(NamedTuple):
    """Figures over some cases; all but n are None where there are none.

    n: how many; median_ape, mape: median and mean absolute error; bias: median signed error; worst: the largest absolute
    error; within: share of cases with an error of at most 5, 10 and 20 %.
    """

    n: int
    median_ape: float | None
    mape: float | None
    bias: float | None
    worst: float | None
    within: Mapping[str, float]

    def as_dict(self) -> dict[str, object]:
        return {**self._asdict(), "within": dict(self.within)}


class Order(NamedTuple):
    """Pairs of runs whose times differ, and how many of them the predictions put in the measured order."""

    pairs: int
    right: int

    @property
    def accuracy(self) -> float | None:
        """Share of pairs in the right order; None without pairs."""
        return self.right / self.pairs if self.pairs else None


def errors(pairs: Iterable[Pair]) -> Errors:
    """The figures of these cases."""
    signed = [pair.error for pair in pairs]
    sizes = [abs(error) for error in signed]
    if not sizes:
        return Errors(0, None, None, None, None, {})
    within = {f"{limit:.0%}": sum(size <= limit for size in sizes) / len(sizes) for limit in WITHIN}
    return Errors(len(sizes), median(sizes), fmean(sizes), median(signed), max(sizes), within)


def errors_by(pairs: Iterable[Pair], key: Callable[[Pair], Hashable]) -> dict[Hashable, Errors]:
    """The same for each value of a key, most cases first."""
    groups: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[key(pair)].append(pair)
    return {value: errors(group) for value, group in sorted(groups.items(), key=lambda item: -len(item[1]))}


def errors_by_axis(pairs: Sequence[Pair]) -> dict[str, dict[str, Errors]]:
    """For each axis, the figures of each of its values, in the order of the values."""
    axes = dict.fromkeys(axis for pair in pairs for axis in pair.axes)
    found = {}
    for axis in axes:
        having = [pair for pair in pairs if axis in pair.axes]
        by_value = errors_by(having, lambda pair, axis=axis: pair.axes[axis])
        found[axis] = {str(value): by_value[value] for value in sorted(by_value, key=_natural)}
    return found


def order(pairs: Iterable[Pair], *, equal_batch: bool = False, noise: float = NOISE) -> Order:
    """How many pairs of alike runs the predictions put in the measured order.

    Args:
        equal_batch: only pairs of equal batch and sequence, whose order a batch's size does not give away.
        noise: a pair counts if the larger time is more than this above the smaller.

    A tie of predictions is no order, and counts as wrong.
    """
    groups: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[(pair.alike, pair.batch) if equal_batch else pair.alike].append(pair)
    count = right = 0
    for group in groups.values():
        measured = np.log([pair.measured for pair in group])
        predicted = np.log([pair.predicted for pair in group])
        for i in range(1, len(group)):
            apart = measured[i] - measured[:i]
            differ = np.abs(apart) > math.log1p(noise)
            count += int(differ.sum())
            right += int((differ & (apart * (predicted[i] - predicted[:i]) > 0)).sum())
    return Order(count, right)


def _natural(value: Hashable) -> tuple[int, float, str]:
    """Numbers by size and before texts; "65-512" and ">512" by the number in them."""
    text = str(value)
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    if not digits:
        return (1, 0.0, text)
    return (0, float(digits[0]) + (0.5 if text.startswith(">") else 0), text)
