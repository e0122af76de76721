"""What the scheduler knows of one rank."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from emu.virtual.rng import RandomState


@dataclass(slots=True)
class Waiting:
    """Why a rank stands still: what it called, where, a function that tells which ranks it waits for, and the meeting."""

    what: str
    where: str
    missing: Callable[[], list[int]]
    item: object = None


def raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Raises an exception in another thread, at its next bytecode; None takes back one that has not arrived."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), None if error is None else ctypes.py_object(error)
    )


class _Arrived(BaseException):
    pass


def none_is_under_way() -> None:
    """Lets CPython forget that it looks for exceptions from other threads; called once all have arrived or never will.

    It does so until one arrives, even if what was sent has been taken back or its thread is gone. That costs every call a
    look, and in 3.11 the first call under sys.settrace (of a debugger, coverage, hypothesis) never begins. So one arrives.
    """
    interrupt: BaseException | None = None
    waits = True
    while waits:
        try:
            raise_in(threading.get_ident(), _Arrived)
            while True:
                pass
        except _Arrived:
            waits = False
        except BaseException as error:  # Ctrl-C came first
            interrupt = error
    if interrupt is not None:
        raise interrupt


class Stop(NamedTuple):
    """What a rank is about to do, for whoever steps it."""

    kind: str  # "op", "kernel", "collective", "messages", "wait", "event", "host", "mark" or "breakpoint"
    of: Any  # torch's operator, the group, or a text
    args: Any = ()  # the operator's arguments, the call, or the messages


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
