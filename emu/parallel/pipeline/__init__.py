"""Pipeline parallelism: schedules as data, checks without running, and one executor (`emu.parallel.Pipeline`)."""

from emu.parallel.pipeline.actions import Action, overlap, parse
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.division.weighing import layers_by_cost, layers_by_memory
from emu.parallel.pipeline.grid import grid
from emu.parallel.pipeline.lowering import lowered
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.parallel.pipeline.schedules.auto import least_cost
from emu.parallel.pipeline.timing import Timed, Times, activations, peak_activations, timed

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "Timed",
    "Times",
    "activations",
    "check",
    "grid",
    "layers_by_cost",
    "layers_by_memory",
    "least_cost",
    "lowered",
    "make",
    "overlap",
    "parse",
    "peak_activations",
    "timed",
]
