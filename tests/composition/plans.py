"""Every option of a plan, with every other: what may be chosen, and what goes together."""

from __future__ import annotations

from math import prod
from typing import Any

import emu
from emu.models import Config, Decoder
from emu.parallel.context import KINDS
from emu.spmd import PlanError

from .covering import Case

AXES = ("dp", "pp", "cp", "tp")
FOLDS = {"none": (1, 1), "ep2": (2, 1), "etp2": (1, 2), "ep4": (4, 1), "ep2 etp2": (2, 2)}
MOST_RANKS = 16
CHOICES: dict[str, list[Any]] = {
    "dp": [1, 2, 3, 4],
    "pp": [1, 2, 4],
    "cp": [1, 2, 3, 4],
    "tp": [1, 2, 4],
    "order": ["pp dp cp tp", "tp cp dp pp", "cp pp tp dp", "dp tp pp cp"],
    "zero": [0, 1, 2, 3],
    "replicate": [1, 2],
    "reshard_after_forward": [True, False],
    "prefetch": [1, 2],
    "sp": [False, True],
    "fold": list(FOLDS),
    "schedule": [
        "1f1b",
        "gpipe",
        "interleaved",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "dualpipe",
        "dualpipe-v",
        "auto",
    ],
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


def possible(case: Case) -> Case | None:
    """The case with options that say nothing in it at their defaults; None where it cannot be, as plans say."""
    case = dict(case)
    ranks = prod(case[axis] for axis in AXES)
    if not 1 < ranks <= MOST_RANKS:
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
    if case["context"] == "ulysses" and case["cp"] > 4 // case["tp"]:
        return None  # of 4 heads
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


def model_of(case: Case) -> Decoder:
    """Its model: 8 layers, of 4 heads."""
    experts = 0 if case["model"] == "dense" else 4
    config = Config(
        layers=8 if case["pp"] > 1 else 3,
        width=8,
        heads=4,
        kv_heads=2,
        ffn=8,
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
