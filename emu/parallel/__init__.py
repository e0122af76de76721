"""Strategies: each turns a plain model into a distributed one. They know torch and spmd, and nothing else."""

from emu.parallel.batch import Batch, as_batch, check_model
from emu.parallel.data import DataParallel
from emu.parallel.flat import Flat, Span
from emu.parallel.optimizer import Optimizer, Stepped
from emu.parallel.plan import Plan, checked_plan, mesh_of, parallelize, parse_mesh
from emu.parallel.scaling import LossScale
from emu.parallel.state.piece import Piece

__all__ = [
    "Batch",
    "DataParallel",
    "Flat",
    "LossScale",
    "Optimizer",
    "Piece",
    "Plan",
    "Span",
    "Stepped",
    "as_batch",
    "check_model",
    "checked_plan",
    "mesh_of",
    "parallelize",
    "parse_mesh",
]
