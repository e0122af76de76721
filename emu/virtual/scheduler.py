"""The baton: every rank is a real thread, and exactly one of them runs at a time.

A rank hands the baton on when it must wait for others, and, where the order asks for it, before any op. Which rank
runs next depends on nothing but the program and the policy, so the same program gives the same bytes every time.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from emu.spmd.errors import EmuError

PREEMPT_ODDS = 0.05  # chance that a seeded order hands over before an op


class Abort(BaseException):
    """Ends a rank because another one failed. Not an Exception, so that programs do not catch it by accident."""


@dataclass(slots=True)
class Waiting:
    """Why a rank stands still: what it called, where, and a function that tells which ranks it waits for."""

    what: str
    where: str
    missing: Callable[[], list[int]]


class Thread:
    """The scheduler's view of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.baton = threading.Lock()
        self.baton.acquire()
        self.waiting: Waiting | None = None
        self.started = False
        self.done = False
        self.queued = True  # in the list of those that can run
        self.clock_s = 0.0
        self.rng = RandomState.fresh(rank)
        self.raise_this: BaseException | None = None
        self.ident = 0


class RandomState:
    """The process-wide generators' state (torch, random, and numpy if it is in use), kept per rank.

    Every rank starts as a fresh process does: torch's default seed, alike on every rank.
    """

    __slots__ = ("numpy", "python", "torch")

    @classmethod
    def fresh(cls, rank: int) -> RandomState:
        state = cls()
        state.torch = torch.Generator().get_state()
        state.python = random.Random(rank).getstate()
        state.numpy = None
        if (module := sys.modules.get("numpy.random")) is not None:
            state.numpy = module.MT19937(rank)
        return state

    def save(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.python = random.getstate()
        # numpy's global functions draw from an exchangeable generator: exchanging it is cheap, copying its state is not.
        self.numpy = module.get_bit_generator() if (module := sys.modules.get("numpy.random")) is not None else None

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_bit_generator(self.numpy)


class Scheduler:
    """Runs one function per rank, one at a time.

    Args:
        n: number of ranks.
        order: "program" (in turn), "time" (earliest virtual clock first), or a seed that fuzzes the interleaving.
    """

    def __init__(self, n: int, order: str | int = "program") -> None:
        if order not in ("program", "time") and (isinstance(order, bool) or not isinstance(order, int)):
            raise EmuError(f"there is no order {order!r}", 'use "program", "time", or a whole number as a seed')
        self.threads = [Thread(rank) for rank in range(n)]
        self.order = order
        self.preempts = order != "program"  # whether the hook before an op has anything to do
        self.ending = False
        self.failure: tuple[int, BaseException] | None = None
        self.describe: Callable[[list[Thread]], EmuError] = lambda threads: EmuError("deadlock")
        self._chance = random.Random(order) if isinstance(order, int) else None
        self._runnable = list(range(n))
        self._finished = threading.Event()

    def run(self, body: Callable[[int], None]) -> None:
        """Runs body(rank) on every rank until all are done, and re-raises the first failure."""
        before = RandomState()
        before.save()
        workers = [
            threading.Thread(target=self._main, args=(thread, body), name=f"rank {thread.rank}", daemon=True)
            for thread in self.threads
        ]
        for worker in workers:
            worker.start()
        try:
            self._pass_on(self._next())
            while not self._finished.wait(1.0):
                pass
        except BaseException as interrupt:  # Ctrl-C: every rank ends first
            self._interrupt(interrupt)
        finally:
            for worker in workers:
                worker.join()
            before.restore()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure[1]

    def _main(self, thread: Thread, body: Callable[[int], None]) -> None:
        thread.baton.acquire()
        thread.ident = threading.get_ident()
        try:
            if not self.ending:
                thread.started = True
                thread.rng.restore()
                body(thread.rank)
        except Abort:
            pass
        except BaseException as error:
            self.fail(thread.rank, error)
        finally:
            thread.done = True
            self._leave()

    def fail(self, rank: int, error: BaseException) -> None:
        """Notes a failure, if it is the first, and ends every rank."""
        if self.failure is None:
            self.failure = (rank, error)
        self.ending = True

    def _interrupt(self, interrupt: BaseException) -> None:
        self.fail(-1, interrupt)
        told: set[int] = set()
        while not self._finished.wait(0.5):
            # A rank that calls no op sees no hook: an asynchronous exception reaches it between two bytecodes.
            for thread in self.threads:
                if thread.started and not thread.done and thread.waiting is None and thread.rank not in told:
                    told.add(thread.rank)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abort))
                    break

    # Handing the baton on. Called by the rank that holds it.

    def block(self, rank: int, waiting: Waiting, ready: Callable[[], bool]) -> None:
        """Stands still until `ready()`; whoever makes it true calls `wake`."""
        thread = self.threads[rank]
        while not ready():
            thread.waiting = waiting
            self._switch(thread)
            thread.waiting = None

    def wake(self, rank: int) -> None:
        thread = self.threads[rank]
        if thread.waiting is not None and not thread.queued:
            self._queue(thread)

    def _queue(self, thread: Thread) -> None:
        thread.queued = True
        self._runnable.append(thread.rank)

    def before_op(self, rank: int) -> None:
        """The hook before every op: ends the rank if the run is ending, and lets the order have its way."""
        if self.ending:
            raise Abort
        if not self.preempts or not self._runnable:
            return
        if self._chance is not None:
            if self._chance.random() >= PREEMPT_ODDS:
                return
        elif min(self.threads[r].clock_s for r in self._runnable) >= self.threads[rank].clock_s:
            return
        self._queue(self.threads[rank])
        self._switch(self.threads[rank])

    def _switch(self, thread: Thread) -> None:
        following = self._next()
        if following is None:
            self._stuck()
            following = self._next()
        if following != thread.rank:
            thread.rng.save()
            self._pass_on(following)
            thread.baton.acquire()
            thread.rng.restore()
        if thread.raise_this is not None:
            error, thread.raise_this = thread.raise_this, None
            raise error
        if self.ending:
            raise Abort

    def _next(self) -> int | None:
        if not self._runnable:
            return None
        at = 0
        if self._chance is not None:
            at = self._chance.randrange(len(self._runnable))
        elif self.order == "time":
            clocks = [(self.threads[rank].clock_s, rank) for rank in self._runnable]
            at = clocks.index(min(clocks))
        rank = self._runnable.pop(at)
        self.threads[rank].queued = False
        return rank

    def _stuck(self) -> None:
        """Nobody can go on: the error is raised in the first rank that waits, where its program stands."""
        stuck = [t for t in self.threads if t.waiting is not None]
        stuck[0].raise_this = self.describe(self.threads)
        self._queue(stuck[0])

    def _pass_on(self, rank: int | None) -> None:
        if rank is not None:
            self.threads[rank].baton.release()

    def _leave(self) -> None:
        """The rank that holds the baton is done."""
        following = None
        if self.ending:
            following = next((t.rank for t in self.threads if not t.done), None)
        elif (following := self._next()) is None and not all(t.done for t in self.threads):
            self._stuck()
            following = self._next()
        if following is None:
            self._finished.set()
        else:
            self._pass_on(following)
