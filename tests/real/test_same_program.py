"""One program file, run on virtual devices here and on processes under torchrun, does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import same
import torch
from safetensors.torch import load_file
from torch import Tensor

import emu
from emu.trace.events import Alloc, Free, HostCopy, HostFree, Kernel, Recategorise
from emu.trace.files import loads

pytestmark = pytest.mark.real

FLOAT64_TIER = 1e-12  # sums over ranks are made in another order


@pytest.fixture(scope="module")
def real(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("same")
    done = launch("same.py", 4, directory)
    assert done.returncode == 0, done.output[-20000:]
    return directory


@pytest.fixture(scope="module")
def virtual() -> Any:
    dtype = torch.get_default_dtype()
    run = emu.launch(same.program, emu.Mesh(**same.MESH), backend="virtual")
    torch.set_default_dtype(dtype)
    return run


def error(u: Tensor, v: Tensor) -> float:
    if u.shape != v.shape or u.dtype != v.dtype:
        return float("inf")
    return float((u - v).abs().max() / v.abs().max().clamp(min=1e-30)) if u.numel() else 0.0


def test_results_agree_with_the_virtual_run(real: Path, virtual: Any) -> None:
    for rank, expected in enumerate(virtual.results):
        got = load_file(real / f"on{rank}of{rank}.safetensors")
        assert got.keys() == expected.keys()
        worst = max((error(got[k], v.detach()), k) for k, v in expected.items())
        assert worst[0] <= FLOAT64_TIER, (rank, worst)


def test_ranks_differ_so_the_comparison_is_one(virtual: Any) -> None:
    """Negative control: rank 0's results are not rank 1's."""
    a, b = virtual.results[:2]
    assert sum(error(a[k], b[k]) > FLOAT64_TIER for k in a.keys() & b.keys()) > 10


def test_gathered_results_are_the_same_on_every_rank(real: Path) -> None:
    for of in range(4):
        own = load_file(real / f"on{of}of{of}.safetensors")
        for on in range(4):
            there = load_file(real / f"on{on}of{of}.safetensors")
            assert there.keys() == own.keys() and all(torch.equal(there[k], own[k]) for k in own)


def test_both_runs_leave_the_same_record(real: Path, virtual: Any) -> None:
    """All but memory and module scopes, which real devices do not record."""
    for rank in range(4):
        trace = loads((real / f"trace{rank}.jsonl").read_bytes())
        expected = [e for e in virtual.trace[rank] if not isinstance(e, (Alloc, Free, HostFree, Recategorise))]
        assert [_plain(e) for e in trace[rank]] == [_plain(e) for e in expected]


def test_tensors_in_host_memory_come_back_with_their_bits_and_are_on_record(real: Path, virtual: Any) -> None:
    for rank, expected in enumerate(virtual.results):
        got = load_file(real / f"on{rank}of{rank}.safetensors")
        assert all(torch.equal(got[name], expected[name]) for name in ("host.0", "host.1", "host.y"))
        trace = loads((real / f"trace{rank}.jsonl").read_bytes())
        copies = [e for e in trace[rank] if isinstance(e, HostCopy)]
        assert [(e.kind, e.bytes, e.stream) for e in copies] == [
            (kind, n, stream) for kind, stream in (("to_host", "d2h"), ("from_host", "h2d")) for n in (48, 24)
        ]


def _plain(event: Any) -> Any:
    return event._replace(scope="") if isinstance(event, Kernel) else event
