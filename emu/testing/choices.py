"""Every option of a plan, and of a model for it: what may be chosen, and what goes together.

A case is one choice of each, as plain data: {"dp": 2, "zero": 3, "model": "experts", ...}. Cases can be listed, covered
and compared; plans and models are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from math import prod
from typing import Any

from emu.models import Config, Decoder
from emu.parallel import Plan
from emu.parallel.context import KINDS
from emu.parallel.pipeline import SCHEDULES
from emu.parallel.pipeline.schedules import make
from emu.spmd import PlanError

Case = dict[str, Any]

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
_NOT_FIELDS = (*AXES, "order", "fold", "model", "documents", "tied", "positions")


def possible(case: Case, most: int = MOST_RANKS) -> Case | None:
    """The case with options that say nothing in it at their defaults; None where it cannot be, as plans say."""
    case = dict(case)
    if not 1 < prod(case[axis] for axis in AXES) <= most:
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
    return case if fits(case) else None


def fits(case: Mapping[str, Any]) -> bool:
    """Whether there is such a plan, and a model for it trains under it."""
    inner, dense = prod(FOLDS[case["fold"]]), prod(case[axis] for axis in AXES if axis != "pp")
    if dense % inner or (case["model"] != "dense" and (dense // inner) % case["replicate"]):
        return False  # replicas are made of the ranks that hold the same experts
    if case["model"] == "balanced over the batch" and (case["pp"] > 1 or case["microbatches"] > 1):
        return False  # it depends on how a batch is cut, on one device, too
    try:
        plan_of(case)
    except PlanError:
        return False
    return True


def plan_of(case: Mapping[str, Any]) -> Plan:
    """The plan of a case.

    Raises:
        PlanError: it cannot be.
    """
    mesh = ",".join(f"{axis}={case[axis]}" for axis in case["order"].split() if case[axis] > 1)
    ep, etp = FOLDS[case["fold"]]
    return Plan(mesh, ep=ep, etp=etp, **{name: value for name, value in case.items() if name not in _NOT_FIELDS})


def stages_of(case: Mapping[str, Any]) -> int:
    """Into how many stages its schedule cuts a model."""
    return make(case["schedule"], case["pp"], case["microbatches"], case["chunks"]).stages if case["pp"] > 1 else 1


def config_of(case: Mapping[str, Any], layers: int | None = None) -> Config:
    """Its model's shape, as small as it may be: a layer a stage, and heads that can be shared out; but two of each at least.

    Args:
        layers: how many instead.
    """
    tp, exchanging = case["tp"], case["cp"] if case["context"] == "ulysses" else 1
    heads = tp * max(2 if tp < 3 else 1, exchanging)
    ep, etp = FOLDS[case["fold"]]
    return Config(
        layers=layers or max(2, stages_of(case)),
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
        experts=0 if case["model"] == "dense" else max(3, ep),  # more than a token meets, or balance would not matter
        balance=0.1 if "balanced" in case["model"] else 0.0,
        balance_over="batch" if case["model"] == "balanced over the batch" else "sequence",
    )


def model_of(case: Mapping[str, Any]) -> Decoder:
    """Its model."""
    return Decoder(config_of(case))
