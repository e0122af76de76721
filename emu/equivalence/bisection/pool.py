"""Finding the numbers of a tensor among those of others: whole, as a slice, or in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

ALIKE = 1e-9  # of the larger: float64 sums in another order differ by far less, wrong numbers by far more
MOST = 64  # tensors that are looked through for one

Array = np.ndarray[Any, np.dtype[np.float64]]


class _Numbers:
    """One tensor's numbers, sorted, with the places where they stood."""

    def __init__(self, flat: Array) -> None:
        self.size = flat.size
        self.place = np.argsort(flat, kind="stable")
        self.sorted = flat[self.place]
        self.near = ALIKE * float(np.abs(flat).max())
        apart = np.diff(self.sorted) > 2 * self.near
        self.alone = np.concatenate([[True], apart]) & np.concatenate([apart, [True]])  # no other number is alike
        self.likes = np.concatenate([[0], np.cumsum(apart)])  # which numbers are alike, and how many there are
        self.count = np.bincount(self.likes)
        self.order = np.sort(self.likes * self.size + self.place)  # of numbers that are alike, where they stand

    def places(self, flat: Array) -> Any:
        """Where these numbers stand in the tensor, of those that no other is like; None if they are not all there, in order."""
        at = np.searchsorted(self.sorted, flat).clip(0, self.size - 1)
        before = (at - 1).clip(0)
        at = np.where(np.abs(self.sorted[before] - flat) < np.abs(self.sorted[at] - flat), before, at)
        if not bool((np.abs(self.sorted[at] - flat) <= self.near).all()):
            return None
        if bool((np.bincount(self.likes[at], minlength=self.count.size) > self.count).any()):
            return None
        places, alone = self.place[at], self.alone[at]
        if not bool((np.diff(places[alone]) > 0).all()):
            return None
        # Each of the others stands somewhere between those before and behind it that no other is like.
        before = np.maximum.accumulate(np.where(alone, places, -1))
        behind = np.minimum.accumulate(np.where(alone, places, self.size)[::-1])[::-1]
        first = self.likes[at] * self.size
        following = np.searchsorted(self.order, first + before, side="right").clip(0, self.size - 1)
        there = (self.order[following] > first + before) & (self.order[following] < first + behind)
        return places[alone] if bool((there | alone).all()) else None


class Pool:
    """The numbers of many tensors, each with what it stands for."""

    def __init__(self, tensors: Iterable[tuple[Tensor, Any]]) -> None:
        different: dict[bytes, tuple[Array, Any]] = {}
        for tensor, what in tensors:
            flat = _flat(tensor)
            if flat.size and np.isfinite(flat).all() and flat.any():
                different[flat.tobytes()] = flat, what  # the last of several that are alike
        self._what = [what for _, what in different.values()]
        self._numbers = [_Numbers(flat) for flat, _ in different.values()]
        sizes = [numbers.size for numbers in self._numbers]
        every = np.concatenate([numbers.sorted for numbers in self._numbers] or [np.empty(0)])
        order = np.argsort(every, kind="stable")
        self._every = every[order]
        self._whose = np.repeat(np.arange(len(sizes)), sizes)[order]

    def find(self, tensor: Tensor) -> Any:
        """What a tensor's numbers are, whole or a slice; or, of a vector, whose pieces it has, in any
        order and with zeros between. None if they are nobody's.

        A slice, along any dims, has its numbers in the order of the whole; so has one of a transposed tensor, which is
        tried, too. Zeros are nobody's.
        """
        flat = _flat(tensor)
        top = float(np.abs(flat).max()) if flat.size else 0.0
        if not top or not np.isfinite(top):
            return None
        looks = [flat, _flat(tensor.mT)] if tensor.dim() > 1 else [flat]
        start, end = self._among(flat)
        if not bool(((end > start) | (np.abs(flat) <= ALIKE * top)).all()):
            return None
        largest = int(np.argmax(np.abs(flat)))
        candidates = np.unique(self._whose[start[largest] : end[largest]])
        for whole in (True, False):  # rather a whole tensor than a slice of another
            for i in candidates[-MOST:]:
                numbers = self._numbers[i]
                fits = numbers.size == flat.size if whole else numbers.size > flat.size
                if fits and any(numbers.places(look) is not None for look in looks):
                    return self._what[i]
        return self._what[candidates[-1]] if tensor.dim() == 1 and flat.size > 1 else None

    def covered(self, what: Any, parts: Sequence[Tensor]) -> float:
        """Which share of a tensor's numbers some slices of it have between them, of those that no other is like."""
        return max(_share(numbers, parts) for numbers, known in zip(self._numbers, self._what) if known is what)

    def _among(self, flat: Array) -> tuple[Any, Any]:
        """Where numbers like these begin and end among all."""
        near = ALIKE * np.abs(flat)
        return np.searchsorted(self._every, flat - near), np.searchsorted(self._every, flat + near)


def _share(numbers: _Numbers, parts: Sequence[Tensor]) -> float:
    there: set[int] = set()
    for part in parts:
        for look in (part, part.mT) if part.dim() > 1 else (part,):
            if (places := numbers.places(_flat(look))) is not None:
                there.update(places.tolist())
    alone = int(numbers.alone.sum())
    return len(there) / alone if alone else 1.0


def _flat(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().reshape(-1).numpy()
