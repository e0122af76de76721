"""Every option of a plan, with every other: what may be chosen, what goes together, and what a case costs to try."""

from __future__ import annotations

import importlib
from itertools import product
from math import prod

import pytest

import emu
from emu.testing.choices import AXES, CHOICES, FOLDS, MOST_RANKS, ORDERS, model_of, plan_of, possible, stages_of

from .covering import Case

__all__ = [
    "AXES",
    "CHOICES",
    "FOLDS",
    "MESHES",
    "MOST_RANKS",
    "ORDERS",
    "cost_of",
    "equal",
    "model_of",
    "plan_of",
    "possible",
]

MESHES = [sizes for sizes in product(range(1, MOST_RANKS + 1), repeat=len(AXES)) if 1 < prod(sizes) <= MOST_RANKS]


def cost_of(case: Case) -> float:
    """About how much there is to compute, in forwards of a layer; ranks of a pipeline share it out."""
    stages = prod(case[axis] for axis in ("dp", "cp", "tp"))
    again = 1 if case["checkpoint"] == "none" else 1.4
    experts = 1 if case["model"] == "dense" else 2
    return stages * (max(2, stages_of(case)) * case["microbatches"] * again * experts + 4)


def equal(case: Case, watched: bool = False) -> str:
    """ "" where a case's gradients, losses and step are bit for bit those of one device; else what is wrong, with the plan.

    Args:
        watched: whether the program runs once more, watched for races, as `emu.verify` does by itself.
    """
    checking = importlib.import_module("emu.equivalence.check")
    with pytest.MonkeyPatch.context() as patch:
        if not watched:
            patch.setattr(checking, "_refuse_races", lambda *args: None)
        try:
            verdict = emu.verify(lambda: model_of(case), plan_of(case), mutants="none")
        except Exception as error:
            return f"{type(error).__name__}: {error}\n{plan_of(case)}\n{case}"
    said = "" if verdict.equivalent and verdict.max_rel_err == 0 else str(verdict) or "not equal"
    return said and f"{said}\n{plan_of(case)}\n{case}"
