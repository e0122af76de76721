"""Experts on other processes over gloo train as they do on virtual devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experts
import pytest
import torch
from safetensors.torch import load_file

import emu

pytestmark = pytest.mark.real

FLOAT64_TIER = 1e-12  # gloo adds in another order than ranks are numbered


@pytest.fixture(scope="module", params=(2, 4))
def ran(request: pytest.FixtureRequest, processes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("experts")
    done = processes("experts.py", request.param, folder, timeout_s=300)
    assert done.returncode == 0, done.output[-20000:]
    return request.param, folder


def apart(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, relative to its largest value."""
    assert got.keys() == expected.keys()
    return max(
        float((got[k] - v).abs().max() / v.abs().max().clamp(min=1e-30)) for k, v in expected.items() if v.numel()
    )


def test_every_rank_gets_what_its_virtual_twin_gets(ran: tuple[int, Path]) -> None:
    ranks, folder = ran
    for case in experts.CASES[ranks]:
        virtual = emu.launch(experts.trained, experts.mesh(ranks, case), backend="virtual", args=(case,)).results
        for rank, expected in enumerate(virtual):
            got = load_file(folder / f"{case} {rank}.safetensors")
            assert any("experts" in name for name in got)
            assert apart(got, expected) <= FLOAT64_TIER, (case, rank)


def test_the_tier_tells_another_rank_apart(ran: tuple[int, Path]) -> None:
    """Negative control: a neighbour's experts are others."""
    _, folder = ran
    first, second = (load_file(folder / f"ep {rank}.safetensors") for rank in (0, 1))
    names = [name for name in first if "experts" in name]
    assert names and apart({n: first[n][:1] for n in names}, {n: second[n][:1] for n in names}) > 1e-3
