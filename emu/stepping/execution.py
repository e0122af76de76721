"""One run of the program that stands still between two steps.

The program runs on virtual devices as ever, in a launch of its own thread. Before every step its rank asks whether the goal
is reached; if so it stands still, baton in hand, until it is told to go on. Meanwhile the process is as outside of a launch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from emu.spmd import EmuError, Mesh, Rank
from emu.stepping.history import History, Standing, WentAnotherWay
from emu.stepping.meetings import Meetings
from emu.stepping.ops import Op, op_at
from emu.virtual.device import VirtualDevice
from emu.virtual.launch import paused, run_virtual
from emu.virtual.scheduler import RANK, Abort, Scheduler
from emu.virtual.thread import Stop

Goal = Callable[[int, Op], bool]  # (number of a step, the step) -> whether to stand still before it
PATIENCE_S = 2.0  # how long an interrupted program may take to its next step before it is ended


class Closed(EmuError):
    """A stepper was closed: what ends the ranks of its program."""


class Execution:
    """A run of a program under control.

    Attributes:
        index: the step before which it stands.
        ended: whether its ranks have ended; closed: because it was closed.
        failure: what the program raised, while the rank that raised it stands still.
        outcome: what came out of a run that ended well.

    Args:
        history: the steps known so far, which it follows, and adds to.
        how: further arguments of run_virtual.
    """

    def __init__(self, program: Callable[..., Any], mesh: Mesh, history: History, how: dict[str, Any]) -> None:
        if threading.current_thread().name.startswith(RANK):
            raise EmuError(
                "a program cannot step another: its ranks hold what the process has one of", "step it outside"
            )
        self.history, self.index, self.ended, self.closed = history, 0, False, False
        self.failure: BaseException | None = None
        self.failed_rank = -1
        self.outcome: Any = None
        self.devices: dict[int, VirtualDevice] = {}
        self.scheduler = Scheduler([])
        self.meetings = Meetings(self.scheduler)
        self._goal: Goal = lambda index, op: True
        self._prefer: int | None = None
        self._breaks = True
        self._rested_at = -1
        self._cuts = len(history.cuts)  # of the history that it follows
        self._given = 0  # how often the baton was given away before this step
        self._last: dict[int, tuple[Any, ...]] = {}
        self._go, self._rests = threading.Lock(), threading.Event()
        self._go.acquire()
        self._run = partial(run_virtual, program, mesh, **how, within=self._within, rendezvous=self._meet)
        self._thread = threading.Thread(target=self._main, name="emu stepper", daemon=True)

    @property
    def strayed(self) -> bool:
        """Whether it went a way that is not the known one any more: another run let another rank go first."""
        return any(cut <= self.index for cut in self.history.cuts[self._cuts :])

    @property
    def alive(self) -> bool:
        """Whether its ranks stand still, with all that they hold."""
        return self._thread.is_alive() and not self.ended

    # What the stepper's caller does, on its own thread.

    def advance(self, goal: Goal, prefer: int | None = None, breaks: bool = True) -> None:
        """Goes on until a step that reaches the goal, or to the end. Ctrl-C leaves it before the next step.

        Args:
            goal: asked before every step.
            prefer: the rank that goes on whenever it can.
            breaks: whether a breakpoint() in the program stops it, too.
        """
        if self.ended or self.failure is not None:
            return
        self._goal, self._prefer, self._breaks = goal, prefer, breaks
        self._rests.clear()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        try:
            self._rests.wait()
        except KeyboardInterrupt:
            self._goal = lambda index, op: True
            self._rested_at = -1
            if not self._rests.wait(PATIENCE_S):
                self.close()
                self.index = max(self.index - 1, 0)  # the step that did not end
            raise

    def close(self) -> None:
        """Ends every rank. Nothing is left of them."""
        self.closed = True
        if self._thread.ident is None or not self._thread.is_alive():
            self.ended = True
            return
        self.scheduler.fail(-1, Closed("the stepper was closed"))
        if self._go.locked():
            self._go.release()
        self.scheduler.end_all(Closed("the stepper was closed"))
        self._thread.join()

    def _main(self) -> None:
        try:
            self.outcome = self._run()
        except BaseException as error:
            if not isinstance(error, Closed):
                self.failure = error
        if self.failure is not None or self.outcome is not None:
            self.history.end(self._standings(), self._records(), self.failure)
        self.ended = True
        self._rests.set()

    # What its ranks do, on their threads.

    def _meet(self, scheduler: Scheduler) -> Meetings:
        self.scheduler = scheduler
        scheduler.stop = self._stop
        scheduler.hook()
        self.meetings = Meetings(scheduler)
        return self.meetings

    @contextmanager
    def _within(self, rank: Rank) -> Iterator[None]:
        self.devices[rank.id] = cast(VirtualDevice, rank._device)
        with breakpoints(lambda: self._stop(rank.id, Stop("breakpoint", "breakpoint"))):
            try:
                yield
            except Exception as error:
                if not self.scheduler.ending:
                    self._fails(rank.id, error)
                raise

    def _stop(self, rank: int, stop: Stop) -> None:
        """A rank stands before something."""
        op = op_at(self.devices[rank], stop) if rank in self.devices else None
        if op is None:
            return
        history = self.history
        while True:
            index = self.index
            to = self._goes_first(rank)
            if to is not None:
                history.coming[rank] = op
                self._given += 1
                self.scheduler.give(rank, to)
                continue
            history.note(index, op, self._standings(rank), self._records())
            if self._rested_at == index or not ((self._breaks and op.kind == "breakpoint") or self._goal(index, op)):
                break
            self._rested_at = index
            self._rest(rank)
        history.coming.pop(rank, None)
        self.index, self._given = self.index + 1, 0

    def _goes_first(self, rank: int) -> int | None:
        """Who is let go before a rank that stands before the next step, by an earlier choice or a new one; None if nobody is."""
        history, index, prefer = self.history, self.index, self._prefer
        chosen = history.choices.get(index, [])[self._given :]
        known = history.ops[index].rank if index < len(history) else None
        can_go = prefer is not None and self.scheduler.can_give(prefer)
        if prefer is None or known == prefer or not (can_go or prefer == rank):
            return chosen[0] if chosen else None
        if known is not None:
            history.cut(index, self._given)
            self._cuts = len(history.cuts)
        if prefer == rank:
            return None
        history.choices.setdefault(index, []).append(prefer)
        return prefer

    def _rest(self, rank: int) -> None:
        with paused(self.scheduler, rank):
            self._rests.set()
            self._go.acquire()
        if self.scheduler.ending:
            raise Abort

    def _fails(self, rank: int, error: BaseException) -> None:
        """A rank's program raised: it stands still with all that it holds, until the stepper is closed."""
        if not isinstance(error, WentAnotherWay):
            self.history.end(self._standings(rank), self._records(), error, rank)
        self.failure, self.failed_rank = error, rank
        with paused(self.scheduler, rank):
            self._rests.set()
            self._go.acquire()

    def _records(self) -> dict[int, Sequence[Any]]:
        return {rank: device.events for rank, device in self.devices.items()}

    def _standings(self, here: int | None = None) -> dict[int, Standing]:
        """How the ranks stand of which that has changed since it was asked last. `here` is the one that asks."""
        changed: dict[int, Standing] = {}
        last, devices = self._last, self.devices
        for rank, thread in self.scheduler.threads.items():
            device, waiting = devices.get(rank), None if rank == here else thread.waiting
            released = waiting is not None and thread.queued
            now = (0 if device is None else len(device.events), waiting, released, thread.done)
            if last.get(rank) != now:
                last[rank] = now
                what, where = (waiting.what, waiting.where) if waiting and not released else ("", "")
                state = "ended" if thread.done else "waiting" if what else "ready" if device else "not begun"
                changed[rank] = Standing(rank, now[0], state, what, where)
        return changed


# breakpoint() on the thread of a rank that is stepped is a step; on other threads it is what it was.
_stops: dict[int, Callable[[], None]] = {}
_before: list[Any] = []


@contextmanager
def breakpoints(stop: Callable[[], None]) -> Iterator[None]:
    """Makes breakpoint() stop this thread's rank."""
    me = threading.get_ident()
    if not _stops:
        _before[:] = [sys.breakpointhook]
        sys.breakpointhook = _breakpoint
    _stops[me] = stop
    try:
        yield
    finally:
        del _stops[me]
        if not _stops and sys.breakpointhook is _breakpoint:
            sys.breakpointhook = _before.pop()


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    stop = _stops.get(threading.get_ident())
    return stop() if stop is not None else _before[0](*args, **kwargs)
