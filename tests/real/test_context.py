"""Attention over gloo processes is what it is on virtual devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import context
import pytest
import torch
from context import CASES
from safetensors.torch import load_file
from torch import Tensor

import emu

pytestmark = pytest.mark.real

FLOAT64_TIER = 1e-12  # gloo reduces in another order


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: Any, processes: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What every process wrote."""
    ranks: int = request.param
    folder: Path = tmp_path_factory.mktemp("context")
    done = processes("context.py", ranks, folder, timeout_s=300)
    assert done.returncode == 0, done.output[-20000:]
    return [load_file(folder / f"context{rank}.safetensors") for rank in range(ranks)]


@cache
def virtual(case: str, ranks: int) -> Any:
    return emu.launch(context.program, emu.Mesh(cp=ranks), args=(case,), backend="virtual", track=False).results


def error(u: Tensor, v: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if u.shape != v.shape or u.dtype != v.dtype:
        return float("inf")
    return float((u - v).abs().max() / v.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_the_virtual_run(ran: list[dict[str, Tensor]], case: str) -> None:
    for rank, expected in enumerate(virtual(case, len(ran))):
        for key, value in expected.items():
            assert error(ran[rank][f"{case}|{key}"], value) <= FLOAT64_TIER, (rank, key)


@pytest.mark.parametrize("case", ["ring", "zigzag", "zigzag packed", "striped"])
def test_a_ring_has_the_virtual_run_s_bits(ran: list[dict[str, Tensor]], case: str) -> None:
    """Its sums are in the ring's own order, whoever carries the messages."""
    for rank, expected in enumerate(virtual(case, len(ran))):
        assert all(torch.equal(ran[rank][f"{case}|{key}"], value) for key, value in expected.items())


def test_another_cut_or_rank_would_be_noticed(ran: list[dict[str, Tensor]]) -> None:
    """Negative control."""
    expected = virtual("zigzag", len(ran))
    assert error(ran[0]["striped|out"], expected[0]["out"]) > 0.1
    assert error(ran[0]["zigzag|out"] * (1 + 1e-11), expected[0]["out"]) > FLOAT64_TIER
    assert error(ran[0]["zigzag packed|out"], expected[0]["out"]) > 0.1
