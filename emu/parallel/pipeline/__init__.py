"""Pipeline parallelism: schedules as data, checks without running, and one executor."""

from emu.parallel.pipeline.actions import Action, overlap, parse
from emu.parallel.pipeline.schedule import Schedule

__all__ = ["Action", "Schedule", "overlap", "parse"]
