"""README's table of what cannot be combined, row by row."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emu
from emu.models import Config, Decoder
from emu.parallel import Plan, check_fit
from emu.spmd import PlanError

README = (Path(__file__).parents[2] / "README.md").read_text()
TABLE = README.partition("### What cannot be combined, and why")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
    for line in TABLE.splitlines()
    if line.startswith("| `")
]


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(x).square().sum()


def model(kind: str) -> nn.Module:
    if kind == "Linear":
        return Linear()
    options: dict[str, Any] = {
        "dense": {},
        "4 experts": {"experts": 4},
        "balanced over the batch": {"experts": 4, "balance": 0.1, "balance_over": "batch"},
    }[kind]
    return Decoder(Config(layers=2, width=8, heads=4, vocab=11, seq=16, **options))


def fields(cell: str) -> dict[str, Any]:
    call = ast.parse(f"f({cell})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


def asked(kind: str, wish: dict[str, Any]) -> None:
    plan = Plan(**wish)
    if kind != "any":
        check_fit(model(kind), plan)


def test_there_is_a_row_for_every_kind_of_refusal() -> None:
    assert len(ROWS) == 25 and all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("plan, kind, why, nearest", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_refused_for_that_reason_and_what_is_nearest_is_possible(
    plan: str, kind: str, why: str, nearest: str
) -> None:
    wish = fields(plan)
    with pytest.raises(PlanError) as caught:
        asked(kind, wish)
    refused: Any = caught.value
    assert why in refused.message and {refused.field: refused.nearest} == fields(nearest)
    asked(kind, wish | fields(nearest))


@pytest.mark.parametrize("plan, kind", [(row[0], row[1]) for row in ROWS if row[1] != "any"])
def test_what_does_not_fit_is_refused_before_anything_runs(
    plan: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    monkeypatch.setattr(importlib.import_module("emu.equivalence.verify"), "check", None)
    with pytest.raises(PlanError):
        emu.verify(model(kind), Plan(**fields(plan)))

    def program(rank: emu.Rank) -> None:
        made = model(kind)
        before = {name: p.shape for name, p in made.named_parameters()}
        with pytest.raises(PlanError):
            emu.parallelize(made, Plan(**fields(plan)), rank)
        assert {name: p.shape for name, p in made.named_parameters()} == before

    emu.launch(program, emu.parallel.mesh_of(Plan(**fields(plan))), track=False)
