"""Layers cut over gloo processes: as on virtual devices, and as torch's own DTensor cuts the same models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tensor
from safetensors.torch import load_file
from tensor import CONFIGS, DENSE, Case
from torch import Tensor

import emu
from emu.parallel import Sharding

pytestmark = pytest.mark.real

FLOAT64_TIER = 1e-12  # sums in another order: gloo's of four ranks, DTensor's, one device's
RANKS = (2, 4)


@pytest.fixture(scope="module", params=RANKS)
def ran(request: pytest.FixtureRequest, processes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("tensor")
    done = processes("tensor.py", request.param, folder, request.param, timeout_s=300)
    assert done.returncode == 0, done.output[-20000:]
    return request.param, folder


@cache
def virtual(case: Case, ranks: int) -> Any:
    """Every rank's results, with the kernels that torch runs when nothing watches it."""
    return emu.launch(tensor.program, case.mesh(ranks), args=(case,), backend="virtual", track=False).results


def of_case(case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {k.split("|")[1]: v for k, v in results.items() if k.split("|")[0] == str(case)}
    assert found
    return found


def read(folder: Path, whose: str, ranks: int) -> list[dict[str, Tensor]]:
    return [load_file(folder / f"{whose}{rank}.safetensors") for rank in range(ranks)]


def error(u: Tensor, v: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if u.shape != v.shape or u.dtype != v.dtype:
        return float("inf")
    return float((u - v).abs().max() / v.abs().max().clamp(min=1e-30)) if u.numel() else 0.0


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert got.keys() == expected.keys()
    return max((error(got[k], v), k) for k, v in expected.items())


def whole(case: Case, ranks: int, pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every rank's pieces put together; replicas must agree in every bit."""
    layouts, mesh = virtual(case, ranks)[0][1], case.mesh(ranks)
    nowhere = emu.Layout()
    return {
        key: layouts.get(key, nowhere).whole({r: of[key] for r, of in enumerate(pieces)}, mesh, key)
        for key in pieces[0]
    }


def test_every_case_agrees_with_the_virtual_run(ran: tuple[int, Path]) -> None:
    """Losses, norms, gradients of the first and parameters after the last step, piece by piece.

    Of two processes bit for bit: the sum of two numbers has one order. Of four, gloo has its own.
    """
    ranks, folder = ran
    for rank, got in enumerate(read(folder, "emu", ranks)):
        for case in tensor.cases(ranks):
            off, where = worst(of_case(case, got), virtual(case, ranks)[rank][0])
            assert off <= (0 if ranks == 2 else FLOAT64_TIER), (rank, str(case), where, off)


def test_a_tracked_run_agrees_too(ran: tuple[int, Path]) -> None:
    """Tracking watches what runs, and changes no bit of it."""
    ranks, folder = ran
    case = Case("llama", sp=True)
    tracked = emu.launch(tensor.program, case.mesh(ranks), args=(case,), backend="virtual").results
    for rank, got in enumerate(read(folder, "emu", ranks)):
        off, where = worst(of_case(case, got), tracked[rank][0])
        assert off <= (0 if ranks == 2 else FLOAT64_TIER), (rank, where, off)


def test_gradients_put_together_are_one_device_s(ran: tuple[int, Path]) -> None:
    ranks, folder = ran
    pieces = read(folder, "emu", ranks)
    for case in tensor.cases(ranks):
        right = tensor.alone(CONFIGS[case.config])
        mine = whole(case, ranks, [of_case(case, some) for some in pieces])
        off, where = worst({k: v for k, v in mine.items() if k in right}, right)
        assert off <= FLOAT64_TIER, (str(case), where, off)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("config", DENSE)
def test_losses_and_all_gradients_are_those_of_dtensor(ran: tuple[int, Path], config: str, sp: bool) -> None:
    ranks, folder = ran
    case = Case(config, sp)
    mine = whole(case, ranks, [of_case(case, some) for some in read(folder, "emu", ranks)])
    for rank, some in enumerate(read(folder, "dtensor", ranks)):
        theirs = of_case(case, some)
        off, where = worst({k: v for k, v in mine.items() if k in theirs}, theirs)
        assert off <= FLOAT64_TIER, (rank, where, off)
        assert len(theirs) == len(list(tensor.model(CONFIGS[config]).parameters())) + 1


def test_ranks_hold_different_pieces(ran: tuple[int, Path]) -> None:
    """Negative control: had every process saved the same, comparing each with its virtual rank would fail."""
    ranks, folder = ran
    first, second = read(folder, "emu", ranks)[:2]
    for case in tensor.cases(ranks):
        mine, others = of_case(case, first), virtual(case, ranks)[1][0]
        assert sum(error(mine[k], v) > 1e-3 for k, v in others.items()) > 10, str(case)
    assert worst(of_case(Case("gpt"), second), virtual(Case("gpt"), ranks)[1][0])[0] <= FLOAT64_TIER


def test_a_gradient_of_some_tokens_only_would_be_noticed(
    ran: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: under sp norms see a part of the sequence, and their gradients are not summed over tp."""
    ranks, folder = ran
    case = Case("llama", sp=True)
    theirs = of_case(case, load_file(folder / "dtensor0.safetensors"))

    def alone(self: Sharding, name: str, dense_axes: Any) -> Any:
        return self.rank.group(members=[self.rank.id], label="alone")

    monkeypatch.setattr(Sharding, "group_of", alone)
    broken = emu.launch(tensor.program, case.mesh(ranks), args=(case,), backend="virtual").results[0][0]
    norms = {k: error(broken[k], v) for k, v in theirs.items() if "norm" in k}
    assert len(norms) == 5
    assert min(norms.values()) > 1e-3
    assert error(broken["loss 0"], theirs["loss 0"]) <= FLOAT64_TIER
