"""Strategies: each turns a plain model into a distributed one. They know torch and spmd, and nothing else."""

from emu.parallel.asynchronous import ParameterServer, Update, largest_stable_lr
from emu.parallel.axes import parse_mesh
from emu.parallel.batch import Batch, as_batch, check_model
from emu.parallel.data import DataParallel
from emu.parallel.flat import Flat, Span
from emu.parallel.local import LocalSGD
from emu.parallel.noise import GradientNoise, Noise, Tradeoff, fit_tradeoff, noise_from
from emu.parallel.optimistic import OptimisticStep
from emu.parallel.optimizer import Optimizer, Stepped
from emu.parallel.parallelize import parallelize
from emu.parallel.pipeline.pipeline import Pipeline
from emu.parallel.plan import Plan, checked_plan, mesh_of
from emu.parallel.plan_and_model import check_fit
from emu.parallel.scaling import LossScale
from emu.parallel.state import Piece, export_dcp, import_dcp, load, load_dcp, load_state, save, save_dcp, save_state
from emu.parallel.statistics import SyncBatchNorm, synchronize_statistics
from emu.parallel.tensor import Sharding, shard_model

__all__ = [
    "Batch",
    "DataParallel",
    "Flat",
    "GradientNoise",
    "LocalSGD",
    "LossScale",
    "Noise",
    "OptimisticStep",
    "Optimizer",
    "ParameterServer",
    "Piece",
    "Pipeline",
    "Plan",
    "Sharding",
    "Span",
    "Stepped",
    "SyncBatchNorm",
    "Tradeoff",
    "Update",
    "as_batch",
    "check_fit",
    "check_model",
    "checked_plan",
    "export_dcp",
    "fit_tradeoff",
    "import_dcp",
    "largest_stable_lr",
    "load",
    "load_dcp",
    "load_state",
    "mesh_of",
    "noise_from",
    "parallelize",
    "parse_mesh",
    "save",
    "save_dcp",
    "save_state",
    "shard_model",
    "synchronize_statistics",
]
