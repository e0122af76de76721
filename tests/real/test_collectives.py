"""Every collective over gloo equals its definition, computed here from all inputs in plain torch."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import KINDS, REDUCING, draw, made
from collectives import program
from safetensors.torch import load_file
from torch import Tensor

import emu

pytestmark = pytest.mark.real

SEED, COUNT = 20, 160
COMBINE = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
# What one rounding, at the end, can do to values whose sums were kept in float32; float32 sums round at every addition.
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}
FLOAT64_TIER = 1e-12


def definition(case: dict[str, Any], number: int) -> dict[int, Tensor]:
    """Global rank -> what it must get; reductions of floats in float64."""
    members, kind, dim, root, n = case["members"], case["kind"], case["dim"], case["root"], len(case["members"])
    xs = [made(case, number, i) for i in range(n)]
    out: list[Tensor | None] = [None] * n
    if kind in REDUCING:
        wide = [x.double() if x.is_floating_point() else x for x in xs]
        total = reduce(COMBINE[case["op"]], wide)
        total = total / n if case["op"] == "avg" else total
        if kind == "all_reduce":
            out = [total] * n
        elif kind == "reduce":
            out = [total if i == root else x for i, x in enumerate(xs)]
        else:
            out = list(total.split(case["cuts"][0], dim))
    elif kind == "broadcast":
        out = [xs[root]] * n
    elif kind in ("all_gather", "gather"):
        whole = torch.cat([x.view(torch.uint8) if "float8" in case["dtype"] else x for x in xs], dim)
        whole = whole.view(xs[0].dtype) if "float8" in case["dtype"] else whole
        out = [whole if kind == "all_gather" or i == root else None for i in range(n)]
    elif kind == "scatter":
        out = list(xs[root].split(case["cuts"][0], dim))
    elif kind == "all_to_all":
        pieces = [x.view(torch.uint8).split(c, dim) if "float8" in case["dtype"] else x.split(c, dim)
                  for x, c in zip(xs, case["cuts"])]  # fmt: skip
        out = [torch.cat([pieces[j][i] for j in range(n)], dim).view(xs[0].dtype) for i in range(n)]
    elif kind == "ring_shift":
        out = [xs[(i - case["by"]) % n] for i in range(n)]
    return {members[i]: value for i, value in enumerate(out) if value is not None}


def wrong(got: Tensor, expected: Tensor) -> str:
    """What is wrong with a result, or ""."""
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.dtype == expected.dtype and not (got.dtype == torch.float64 or got.is_complex()):
        same = torch.equal(raw(got), raw(expected))
        return "" if same else "other bits"
    if not got.numel():
        return ""
    tolerance = ROUNDING.get(got.dtype, FLOAT64_TIER)
    got = got if got.is_complex() else got.double()
    error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return "" if error <= tolerance else f"off by {error:.3g} relative to the largest"


def raw(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def outcome(directory: Path, rank: int) -> tuple[dict[int, Tensor], list[int]]:
    about = json.loads((directory / f"rank{rank}.json").read_text())
    wires = load_file(directory / f"rank{rank}.safetensors")
    # Cloned first: in the file a tensor may start at an address that its dtype cannot.
    tensors = {
        int(k): wires[k].clone().view(getattr(torch, d)).view(shape) for k, (d, shape) in about["tensors"].items()
    }
    return tensors, about["called"]


@pytest.fixture(scope="module", params=(2, 3, 4))
def results(request: pytest.FixtureRequest, processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("collectives")
    done = processes("collectives.py", request.param, SEED, COUNT, directory)
    assert done.returncode == 0, done.output[-20000:]
    return request.param, [outcome(directory, rank) for rank in range(request.param)]


def test_every_collective_equals_its_definition(results: Any) -> None:
    world, outcomes = results
    faults = []
    for number, case in enumerate(draw(SEED, world, COUNT)):
        expected = definition(case, number)
        for rank in case["members"]:
            tensors, called = outcomes[rank]
            assert number in called
            assert (number in tensors) == (rank in expected), (rank, case)
            if rank in expected and (fault := wrong(tensors[number], expected[rank])):
                faults.append((rank, fault, case))
    assert not faults, faults[:5]


def test_virtual_devices_give_the_same(results: Any) -> None:
    """In the float64 tier; bit for bit where nothing is added. Narrow floats are rounded at every addition there."""
    world, outcomes = results
    run = emu.launch(program, emu.Mesh(dp=world), backend="virtual", track=False, args=(SEED, COUNT))
    faults = []
    for number, case in enumerate(draw(SEED, world, COUNT)):
        for rank in case["members"]:
            there, here = outcomes[rank][0].get(number), run.results[rank][number]
            assert (there is None) == (here is None)
            if there is None or (case["dtype"] in ("float16", "bfloat16", "float32") and case["op"]):
                continue
            assert there.dtype == here.dtype
            if fault := wrong(there, here):
                faults.append((rank, fault, case))
    assert not faults, faults[:5]


def test_a_result_given_to_the_wrong_member_would_be_noticed(results: Any) -> None:
    """Negative control: exchange what two members got, wherever the definition tells them apart."""
    world, outcomes = results
    noticed = 0
    for number, case in enumerate(draw(SEED, world, COUNT)):
        expected = definition(case, number)
        if len(expected) < 2:
            continue
        (a, x), (b, y) = list(expected.items())[:2]
        if x.shape != y.shape or wrong(x, y):
            assert wrong(outcomes[a][0][number], y) or wrong(outcomes[b][0][number], x), case
            noticed += 1
    assert noticed > 10


def test_the_cases_reach_all_that_matters() -> None:
    cases = draw(SEED, 4, COUNT)
    assert {c["kind"] for c in cases} == set(KINDS)
    assert {c["op"] for c in cases} >= {"sum", "max", "min", "prod", "avg"}
    assert {len(c["members"]) for c in cases} == {1, 2, 3, 4}
    assert any(c["members"] != sorted(c["members"]) for c in cases)
    assert any(0 in c["cuts"][0] and c["uneven"] and c["kind"] == "all_gather" for c in cases)
    assert {c["dtype"] for c in cases if c["op"]} >= {"float64", "bfloat16", "int8", "complex128"}
    assert all(any(c["kind"] == k and c["async"] for c in cases) for k in KINDS)
