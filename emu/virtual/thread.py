"""What the scheduler knows of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from emu.virtual.rng import RandomState


@dataclass(slots=True)
class Waiting:
    """Why a rank stands still: what it called, where, a function that tells which ranks it waits for, and the meeting."""

    what: str
    where: str
    missing: Callable[[], list[int]]
    item: object = None


class Thread:
    """The scheduler's view of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.baton = threading.Lock()
        self.baton.acquire()
        self.waiting: Waiting | None = None
        self.done = False
        self.queued = True  # in the list of those that can run
        self.clock_s = 0.0
        self.rng = RandomState(rank)
        self.raise_this: BaseException | None = None
        self.worker: threading.Thread | None = None
        self.told = False  # sent an exception
        self.asked = 0  # how often it asked in vain whether a communication is done, since its last one
