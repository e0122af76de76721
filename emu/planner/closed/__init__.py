"""How long a step takes and what it holds, by closed form: for runs too large to run rank by rank."""

from .stacks import Stack, stack, stack_for, stacks
from .step import predict
from .workload import Moe, Prediction, Workload, WorkloadError

__all__ = ["Moe", "Prediction", "Stack", "Workload", "WorkloadError", "predict", "stack", "stack_for", "stacks"]
