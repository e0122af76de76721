"""emu: run real distributed training programs on a cluster that does not exist, and see what they cost.

mesh = emu.Mesh(dp=8)
run = emu.launch(program, mesh)      # program(rank) runs on every rank, with real numbers
run.check(reference)                 # is it right?
run.memory, run.timeline()           # does it fit, how long does it take?
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from emu import spmd
from emu.spmd import (
    BufferInFlight,
    CollectiveMismatch,
    CrossRankAccess,
    Deadlock,
    EmuError,
    Grads,
    Group,
    Layout,
    Mesh,
    Only,
    Partial,
    PlanError,
    Precision,
    Rank,
    Replicate,
    Shard,
    Slices,
    VirtualOutOfMemory,
    grads,
)

if TYPE_CHECKING:
    from emu.equivalence import Hazards, Verdict, check, hazards, verify
    from emu.hardware import Cluster, chip, cluster
    from emu.parallel import Batch, DataParallel, Pipeline, Plan, parallelize
    from emu.run import Run, launch
    from emu.simulation import simulate
    from emu.stepping import step

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "BufferInFlight",
    "Cluster",
    "CollectiveMismatch",
    "CrossRankAccess",
    "DataParallel",
    "Deadlock",
    "EmuError",
    "Grads",
    "Group",
    "Hazards",
    "Layout",
    "Mesh",
    "Only",
    "Partial",
    "Pipeline",
    "Plan",
    "PlanError",
    "Precision",
    "Rank",
    "Replicate",
    "Run",
    "Shard",
    "Slices",
    "Verdict",
    "VirtualOutOfMemory",
    "check",
    "chip",
    "cluster",
    "grads",
    "hazards",
    "launch",
    "parallelize",
    "simulate",
    "spmd",
    "step",
    "verify",
]

# What lies above spmd is loaded when it is first used: a program that only computes pays for nothing else.
_LAZY = {
    "Batch": "emu.parallel",
    "Cluster": "emu.hardware",
    "DataParallel": "emu.parallel",
    "Hazards": "emu.equivalence",
    "Pipeline": "emu.parallel",
    "Plan": "emu.parallel",
    "Run": "emu.run",
    "Verdict": "emu.equivalence",
    "check": "emu.equivalence",
    "chip": "emu.hardware",
    "cluster": "emu.hardware",
    "hazards": "emu.equivalence",
    "launch": "emu.run",
    "parallelize": "emu.parallel",
    "simulate": "emu.simulation",
    "step": "emu.stepping",
    "verify": "emu.equivalence",
}
_PACKAGES = ("clinic", "cost", "equivalence", "export", "hardware", "models", "parallel", "testing", "trace", "view")


def _smallest_cluster(n_devices: int) -> Any:
    from emu.hardware import smallest_cluster

    return smallest_cluster(n_devices)


Mesh.smallest_cluster = staticmethod(_smallest_cluster)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"emu.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'emu' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


if "IPython" in sys.modules:  # in a notebook, meshes and clusters draw themselves from the start
    importlib.import_module("emu.run")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
