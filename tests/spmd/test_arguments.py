"""Arguments that one rank can check alone: whole numbers in every guise, and nothing that only looks like one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emu.spmd import EmuError, Mesh
from emu.virtual.launch import run_virtual


def on_two(call):
    return run_virtual(lambda rank: call(rank, rank.group("dp"), torch.arange(4.0) + int(rank)), Mesh(dp=2)).results


@pytest.mark.parametrize("one", [1, np.int64(1), torch.tensor(1)])
def test_whole_numbers_of_other_libraries_are_whole_numbers(one):
    assert on_two(lambda rank, dp, x: dp.broadcast(x, root=one).tolist()) == [[1.0, 2.0, 3.0, 4.0]] * 2
    shifted = on_two(lambda rank, dp, x: dp.ring_shift(x, by=one).tolist())
    assert shifted == [[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]]
    assert on_two(lambda rank, dp, x: dp.reduce_scatter(x, sizes=[one, 3]).tolist()) == [[1.0], [3.0, 5.0, 7.0]]


@pytest.mark.parametrize(
    "call",
    [
        lambda rank, dp, x: dp.broadcast(x, root=True),
        lambda rank, dp, x: dp.broadcast(x, root=1.0),
        lambda rank, dp, x: dp.reduce_scatter(x, sizes=[1.9, 2.1]),
        lambda rank, dp, x: dp.reduce_scatter(x, sizes="22"),
        lambda rank, dp, x: dp.reduce_scatter(x, sizes=4),
        lambda rank, dp, x: dp.all_gather(x, dim=0.5),
        lambda rank, dp, x: dp.ring_shift(x, by=1.5),
        lambda rank, dp, x: dp.ring_shift(None),
        lambda rank, dp, x: dp.exchange(None),
        lambda rank, dp, x: dp.scatter(x if rank == 0 else None),
        lambda rank, dp, x: rank.group(["dp"]),
        lambda rank, dp, x: rank.group(members=3),
    ],
)
def test_anything_else_is_refused_with_a_hint(call):
    with pytest.raises(EmuError) as caught:
        on_two(call)
    assert caught.value.hint
