"""Pipeline parallelism: schedules as data, checks without running, and one executor."""

from emu.parallel.pipeline.actions import Action, overlap, parse
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.grid import grid
from emu.parallel.pipeline.lowering import lowered
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.pipeline.timing import Timed, Times, activations, peak_activations, timed

__all__ = [
    "Action",
    "Schedule",
    "Timed",
    "Times",
    "activations",
    "check",
    "grid",
    "lowered",
    "overlap",
    "parse",
    "peak_activations",
    "timed",
]
