"""Every option of a plan, with every other: what may be chosen, what goes together, and what a case costs to try."""

from __future__ import annotations

import importlib
from itertools import permutations, product
from math import prod
from typing import Any

import pytest

import emu
from emu.models import Config, Decoder
from emu.parallel.context import KINDS
from emu.parallel.pipeline import SCHEDULES
from emu.parallel.pipeline.schedules import make
from emu.spmd import PlanError

from .covering import Case

AXES = ("dp", "pp", "cp", "tp")
FOLDS = {
    "none": (1, 1),
    "ep2": (2, 1),
    "etp2": (1, 2),
    "ep4": (4, 1),
    "etp4": (1, 4),
    "ep2 etp2": (2, 2),
    "ep3": (3, 1),
    "ep8": (8, 1),
    "ep4 etp2": (4, 2),
}
MOST_RANKS = 16
ORDERS = [" ".join(order) for order in permutations(AXES)]
CHOICES: dict[str, list[Any]] = {
    "dp": [1, 2, 3, 4],
    "pp": [1, 2, 3, 4],
    "cp": [1, 2, 3, 4],
    "tp": [1, 2, 3, 4],
    "order": ORDERS,
    "zero": [0, 1, 2, 3],
    "replicate": [1, 2],
    "reshard_after_forward": [True, False],
    "prefetch": [1, 2],
    "sp": [False, True],
    "fold": list(FOLDS),
    "schedule": list(SCHEDULES),
    "chunks": [1, 2],
    "microbatches": [1, 2, 4],
    "context": list(KINDS),
    "checkpoint": ["none", "full", "every:2", "sqrt", "naive", "selective", "repeated:2", "halving"],
    "offload": [False, True],
    "precision": ["fp32", "bf16-mixed"],
    "model": ["dense", "experts", "balanced", "balanced over the batch"],
    "documents": [False, True],
    "tied": [False, True],
    "positions": ["rotary", "learned"],
    "seq": [5, 8, 11],
    "global_batch": [2, 3, 5],
}
MESHES = [sizes for sizes in product(range(1, MOST_RANKS + 1), repeat=len(AXES)) if 1 < prod(sizes) <= MOST_RANKS]


def possible(case: Case, most: int = MOST_RANKS) -> Case | None:
    """The case with options that say nothing in it at their defaults; None where it cannot be, as plans say."""
    case = dict(case)
    ranks = prod(case[axis] for axis in AXES)
    if not 1 < ranks <= most:
        return None
    if case["tp"] == 1:
        case["sp"] = False
    if case["pp"] == 1:
        case["schedule"], case["chunks"] = "1f1b", 1
    if case["cp"] == 1:
        case["context"] = "zigzag"
    if case["zero"] != 3:
        case["reshard_after_forward"], case["prefetch"] = True, 1
    if case["zero"] == 0:
        case["replicate"] = 1
    if case["model"] == "dense":
        case["fold"] = "none"
    inner = prod(FOLDS[case["fold"]])
    holders = ranks // case["pp"] // inner  # of the same experts
    if (ranks // case["pp"]) % inner or (case["model"] != "dense" and holders % case["replicate"]):
        return None
    if case["model"] == "balanced over the batch" and (case["pp"] > 1 or case["microbatches"] > 1):
        return None  # it depends on how a batch is cut, on one device, too
    try:
        plan_of(case)
    except PlanError:
        return None
    return case


def plan_of(case: Case) -> emu.Plan:
    """The plan of a case."""
    mesh = ",".join(f"{axis}={case[axis]}" for axis in case["order"].split() if case[axis] > 1)
    ep, etp = FOLDS[case["fold"]]
    own = (*AXES, "order", "fold", "model", "documents", "tied", "positions")
    return emu.Plan(mesh, ep=ep, etp=etp, **{name: value for name, value in case.items() if name not in own})


def stages_of(case: Case) -> int:
    """Into how many stages its schedule cuts a model."""
    return make(case["schedule"], case["pp"], case["microbatches"], case["chunks"]).stages if case["pp"] > 1 else 1


def model_of(case: Case) -> Decoder:
    """Its model, as small as it may be: a layer a stage, and heads that can be shared out; but two of each at least."""
    tp, exchanging = case["tp"], case["cp"] if case["context"] == "ulysses" else 1
    heads = tp * max(2 if tp < 3 else 1, exchanging)
    ep, etp = FOLDS[case["fold"]]
    experts = 0 if case["model"] == "dense" else max(2, ep)
    config = Config(
        layers=max(2, stages_of(case)),
        width=4,
        heads=heads,
        kv_heads=2 if heads % 2 == 0 else 1,
        head_dim=2,
        ffn=max(4, tp, etp),
        vocab=11,
        seq=11,
        positions=case["positions"],
        norm="rms",
        tied=case["tied"],
        document_end=0 if case["documents"] else None,
        experts=experts,
        balance=0.1 if "balanced" in case["model"] else 0.0,
        balance_over="batch" if case["model"] == "balanced over the batch" else "sequence",
    )
    return Decoder(config)


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
