"""Strategies: each turns a plain model into a distributed one. They know torch and spmd, and nothing else."""

from emu.parallel.data import Batch, DataParallel, as_batch, check_model, sum_gradients
from emu.parallel.plan import Plan, checked_plan, mesh_of, parallelize, parse_mesh

__all__ = [
    "Batch",
    "DataParallel",
    "Plan",
    "as_batch",
    "check_model",
    "checked_plan",
    "mesh_of",
    "parallelize",
    "parse_mesh",
    "sum_gradients",
]
