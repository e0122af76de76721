"""Pipelines over gloo processes do what they do on virtual devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch
from pipelines import CASES
from safetensors.torch import load_file
from torch import Tensor

import emu

pytestmark = pytest.mark.real

RANKS = 4
FLOAT64_TIER = 1e-12  # gloo adds norms and losses of four ranks in another order


@pytest.fixture(scope="module")
def ran(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("pipelines")
    done = processes("pipelines.py", RANKS, folder, timeout_s=300)
    assert done.returncode == 0, done.output[-20000:]
    return [load_file(folder / f"pipelines{rank}.safetensors") for rank in range(RANKS)]


@cache
def virtual(case: str) -> Any:
    """With the kernels that torch runs when nothing watches it."""
    axes, _ = CASES[case]
    return emu.launch(pipelines.program, emu.Mesh(**axes), args=(case,), backend="virtual", track=False).results


def of_case(case: str, results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.split("|")[1]: v for k, v in results.items() if k.split("|")[0] == case}


def error(u: Tensor, v: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if u.shape != v.shape or u.dtype != v.dtype:
        return float("inf")
    return float((u - v).abs().max() / v.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_the_virtual_run(ran: list[dict[str, Tensor]], case: str) -> None:
    for rank, expected in enumerate(virtual(case)):
        got = of_case(case, ran[rank])
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert error(got[key], value) <= FLOAT64_TIER, (rank, key)


@pytest.mark.parametrize("case", ["1f1b", "zb-h1"])
def test_gradients_of_one_stage_have_the_virtual_run_s_bits(ran: list[dict[str, Tensor]], case: str) -> None:
    """No other rank adds to them, or one does: the sum of two numbers has one order."""
    for rank, expected in enumerate(virtual(case)):
        got = of_case(case, ran[rank])
        keys = [key for key in expected if key.startswith(("gradient", "loss 0"))]
        assert len(keys) > 10
        assert all(torch.equal(got[key], expected[key]) for key in keys)


def test_another_schedule_or_rank_would_be_noticed(ran: list[dict[str, Tensor]]) -> None:
    """Negative control: ranks hold different layers, and losses of other microbatches' sums differ in their bits at most."""
    first, second = (of_case("1f1b", ran[rank]) for rank in (0, 1))
    assert first.keys() != second.keys()
    changed = {key: value * (1 + 1e-11) for key, value in first.items()}
    assert max(error(changed[key], value) for key, value in first.items()) > FLOAT64_TIER
