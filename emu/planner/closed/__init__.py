"""How long a step takes and what it holds, by closed form: for runs too large to run rank by rank."""

from .workload import Moe, Prediction, Workload, WorkloadError

__all__ = ["Moe", "Prediction", "Workload", "WorkloadError"]
