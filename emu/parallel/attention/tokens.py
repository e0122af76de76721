"""Some tokens of a sequence: which positions they have, and to which documents they belong. Plain host data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from emu.spmd import EmuError


@dataclass(frozen=True)
class Run:
    """Positions start, start + step, ... below stop."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"a run's step is at least 1, not {self.step}: its positions increase")

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    @property
    def last(self) -> int:
        """The last position of a run that is not empty."""
        return self.start + (len(self) - 1) * self.step


@dataclass(frozen=True, eq=False)
class Tokens:
    """Some tokens of a sequence, in increasing order of position.

    Args:
        runs: their positions in closed form; None where positions differ by row.
        positions: [n] or, where they differ by row, [rows, n], int64, on the host.
        documents: [rows, n] int64, on the host: tokens with the same number may see each other. None: one document.
    """

    runs: tuple[Run, ...] | None
    positions: Tensor
    documents: Tensor | None = None

    def __len__(self) -> int:
        return self.positions.shape[-1]


def tokens(runs: Iterable[Run], documents: Tensor | None = None) -> Tokens:
    """The tokens of runs of positions that follow each other.

    Args:
        runs: in increasing order; empty ones are left out.
        documents: [rows, length] int64 of the whole sequence, on the host, or None.

    Raises:
        ValueError: the runs overlap or do not increase.
    """
    kept = tuple(run for run in runs if len(run))
    for before, after in pairwise(kept):
        if after.start <= before.last:
            raise ValueError(
                f"{before} and {after} do not follow each other: give runs in increasing order of position"
            )
    places = [np.arange(run.start, run.stop, run.step, dtype=np.int64) for run in kept]
    positions = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
    return Tokens(kept, host(positions), None if documents is None else host(values(documents)[:, positions]))


def tokens_by_row(positions: np.ndarray, documents: Tensor | None = None) -> Tokens:
    """Tokens whose positions differ by row.

    Args:
        positions: [rows, n] int64, increasing in each row.
        documents: [rows, length] int64 of the whole sequence, on the host, or None.

    Raises:
        ValueError: positions do not increase, or have other rows than documents.
    """
    if positions.ndim != 2 or (np.diff(positions) <= 0).any():
        raise ValueError(f"positions {positions.shape} are not [rows, n] with every row increasing")
    if documents is not None and len(documents) != len(positions):
        raise ValueError(f"positions of {len(positions)} rows do not fit documents of {len(documents)} rows")
    own = None if documents is None else host(np.take_along_axis(values(documents), positions, axis=1))
    return Tokens(None, host(positions.astype(np.int64)), own)


def values(x: Tensor) -> np.ndarray:
    """The numbers of host data, whatever devices are at work: in a shape run, too, and no device notices.

    Raises:
        EmuError: the tensor was made in a shape run's program, and has no numbers.
    """
    if x.is_meta:
        raise EmuError(
            f"documents or positions {tuple(x.shape)} have no values: they were made in the program of a shape run",
            "make them outside of the program; every rank may read what was made there",
        )
    with torch._C._DisableTorchDispatch():
        return x.numpy()


def host(array: np.ndarray) -> Tensor:
    """Host data out of numbers, which no device counts as its own."""
    with torch._C._DisableTorchDispatch():
        return torch.from_numpy(np.ascontiguousarray(array))
