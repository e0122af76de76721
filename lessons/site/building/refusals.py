"""Plans that cannot be: the rows of README's table, each with what emu says when it is asked for it."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from building.markdown import code, plain, table
from building.readme import section
from emu.models import Config, Decoder
from emu.parallel import Plan, check_fit
from emu.spmd import PlanError

HEADING = "What cannot be combined, and why"
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "4 experts": {"experts": 4},
    "balanced over the batch": {"experts": 4, "balance": 0.1, "balance_over": "batch"},
}


class Linear(nn.Linear):
    """A model that nobody knows how to cut."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(x).square().sum()


def rows() -> list[list[str]]:
    """The table's rows: plan, model, why, nearest, without the backticks."""
    lines = [line for line in section(HEADING).splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def fields(plan: str) -> dict[str, Any]:
    """The fields of a plan that is written as arguments of `Plan`."""
    call = ast.parse(f"f({plan})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


def refused(plan: str, model: str) -> PlanError:
    """What emu says to a plan, written as arguments of `Plan`, for a model of the table.

    Raises:
        ValueError: it is not refused.
    """
    try:
        asked = Plan(**fields(plan))
        if model != "any":
            check_fit(_made(model), asked)
    except PlanError as error:
        return error
    raise ValueError(f"README says that Plan({plan}) is refused for the model {model!r}, and it is not")


def all_refused() -> str:
    """The table, with the message and the hint that come of each row."""
    told = []
    for plan, model, _, nearest in rows():
        error = refused(plan, model)
        said = plain(f"{error.message}. Hint: {error.hint}")
        told.append((_words(plan), plain(model), _words(nearest), said))
    return table(("plan", "model", "nearest", "what emu says"), told)


def _words(plan: str) -> str:
    """A plan's fields as code, each in one piece."""
    return ", ".join(code(f"{name}={_written(value)}") for name, value in fields(plan).items())


def _written(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _made(model: str) -> nn.Module:
    if model == "Linear":
        return Linear()
    return Decoder(Config(layers=2, width=8, heads=4, vocab=11, seq=16, **MODELS[model]))
