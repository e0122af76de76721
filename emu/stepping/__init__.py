"""Stepping through a program of many ranks: forth and back, with every rank's tensors, memory, streams and messages."""

from emu.stepping.algorithms import Hop, Move
from emu.stepping.begin import step
from emu.stepping.chunks import Walk
from emu.stepping.history import WentAnotherWay
from emu.stepping.moment import Moment, RankMoment
from emu.stepping.ops import Op
from emu.stepping.stepper import Stepper
from emu.stepping.tensors import Held

__all__ = ["Held", "Hop", "Moment", "Move", "Op", "RankMoment", "Stepper", "Walk", "WentAnotherWay", "step"]
