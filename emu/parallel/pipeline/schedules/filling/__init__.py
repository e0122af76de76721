"""Filling a pipeline's bubbles: a search for the schedule of the shortest span. `schedules/auto.py` is what to call."""

from emu.parallel.pipeline.schedules.filling.bound import lower_bound
from emu.parallel.pipeline.schedules.filling.fill import Filled, fill
from emu.parallel.pipeline.schedules.filling.problem import Problem

__all__ = ["Filled", "Problem", "fill", "lower_bound"]
