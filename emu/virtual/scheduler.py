"""The baton: every rank is a real thread, and exactly one of them runs at a time.

A rank hands the baton on when it must wait for others, and, where the order asks for it, before any op. Which rank
runs next depends on nothing but the program and the policy, so the same program gives the same bytes every time.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence

import torch

from emu.spmd.errors import EmuError
from emu.virtual.freed import Fault, tell
from emu.virtual.rng import RandomState
from emu.virtual.thread import Stop, Thread, Waiting, none_is_under_way, raise_in
from emu.virtual.watchdog import LOOK_S, Watchdog

RANK = "emu rank "  # what a rank's thread is called
PREEMPT_ODDS = 0.5  # chance that a seeded order hands over before a communication
MOST_ASKED = 20_000  # times in vain that a rank asks whether a communication is done, before that is a deadlock
PATIENCE_S = 0.2  # how long an interrupted rank may take to notice before it is told again


class Abort(BaseException):
    """Ends a rank because another one failed. Not an Exception, so that programs do not catch it by accident."""


class Scheduler:
    """Runs one function per rank, one at a time.

    Args:
        ranks: those that run.
        order: "program" (in turn), "time" (earliest virtual clock first), or a seed that fuzzes the interleaving.
    """

    def __init__(self, ranks: Sequence[int], order: str | int = "program") -> None:
        if order not in ("program", "time") and (isinstance(order, bool) or not isinstance(order, int)):
            raise EmuError(f"there is no order {order!r}", 'use "program", "time", or a whole number as a seed')
        self.threads = {rank: Thread(rank) for rank in ranks}
        self.order = order
        self.hooked = order == "time"  # whether the hook before an op has anything to do
        self.stop: Callable[[int, Stop], None] | None = None  # a stepper's: called before whatever a rank does
        self.faults: dict[int, list[Fault]] = {}  # what ranks must be told before they go on
        self.ending = False
        self.failure: tuple[int, BaseException] | None = None
        self.describe: Callable[[dict[int, Thread]], EmuError] = lambda threads: EmuError("deadlock")
        self._chance = random.Random(order) if isinstance(order, int) else None
        self._runnable = list(ranks)
        self._finished = threading.Event()
        self._running: Thread | None = None  # who holds the baton
        self._reach = threading.Lock()  # held to send a rank an exception, and to put oneself out of reach

    def run(self, body: Callable[[int], None]) -> None:
        """Runs body(rank) on every rank until all are done, and re-raises the first failure."""
        self.outside = RandomState()
        try:
            for thread in self.threads.values():
                thread.worker = threading.Thread(
                    target=self._main, args=(thread, body), name=f"{RANK}{thread.rank}", daemon=True
                )
                thread.worker.start()
            self._pass_on(self._next())
            watchdog = Watchdog()
            while not self._finished.wait(LOOK_S):
                self._look(watchdog)
        except BaseException as interrupt:  # Ctrl-C: every rank ends first
            self.end_all(interrupt)
        finally:
            for thread in self.threads.values():
                if thread.worker is not None and thread.worker.ident is not None:
                    thread.worker.join()
                thread.worker = None
            self.outside.restore()
            if any(thread.told for thread in self.threads.values()):
                none_is_under_way()
        if self.failure is not None:
            failure, self.failure = self.failure[1], None
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, and everything the ranks held

    def _look(self, watchdog: Watchdog) -> None:
        """Ends a run that would not end by itself; a rank that cannot be reached is left behind."""
        running = self._running
        if running is None or running.worker is None:
            return
        error = watchdog.stands_still(running.rank, running.worker.ident or 0)
        if error is not None:
            self.fail(running.rank, error)
        elif not (self.ending and watchdog.will_not_end()):
            return
        with self._reach:
            running.done, running.worker = True, None
        self._leave()

    def _main(self, thread: Thread, body: Callable[[int], None]) -> None:
        try:
            thread.baton.acquire()
            if not self.ending:
                thread.rng.restore()
                body(thread.rank)
        except Abort:
            pass
        except BaseException as error:
            self.fail(thread.rank, error)
        finally:
            self._retire(thread)

    def _retire(self, thread: Thread) -> None:
        """Nothing reaches this rank from here on, and the baton goes to another."""
        while not thread.done:
            try:
                with self._reach:
                    thread.done = True
                    if thread.told:  # if not, there would be nothing to take back: see none_is_under_way
                        raise_in(threading.get_ident(), None)
            except Abort:
                pass
        self._leave()

    def fail(self, rank: int, error: BaseException) -> None:
        """Notes a failure, if it is the first, and ends every rank."""
        if self.failure is None:
            self.failure = (rank, error)
        self.ending = True

    def end_all(self, interrupt: BaseException) -> None:
        """Ends every rank, and returns when they have; called from outside of them."""
        self.fail(-1, interrupt)
        watchdog = Watchdog()
        while True:
            try:
                # Ranks that call ops see the hook before them; one that calls none has to be told.
                if self._finished.wait(PATIENCE_S):
                    return
                self._tell()
                self._look(watchdog)
            except KeyboardInterrupt:  # once more: they are ending already
                pass

    def _tell(self) -> None:
        """Sends an exception to the rank that runs, which it meets between two bytecodes."""
        with self._reach:
            running = self._running
            if running is not None and not running.done and running.worker is not None and running.worker.is_alive():
                running.told = True
                raise_in(running.worker.ident or 0, Abort)
                return
            if running is not None and running.done:
                return  # it is handing the baton on
            # Nobody holds the baton: interrupted before the start, or a rank ended halfway.
            for thread in self.threads.values():
                alive = thread.worker is not None and thread.worker.ident is not None and thread.worker.is_alive()
                thread.done = thread.done or not alive
        self._leave()

    def runs(self, rank: int) -> bool:
        """Whether it is this rank that holds the baton."""
        return self._running is self.threads[rank]

    # Handing the baton on. Called by the rank that holds it.

    def block(self, rank: int, waiting: Waiting, ready: Callable[[], bool]) -> None:
        """Stands still until `ready()`; whoever makes it true calls `wake`."""
        thread = self.threads[rank]
        while not ready():
            thread.waiting = waiting
            try:
                self._switch(thread)
            finally:
                thread.waiting = None

    def wake(self, rank: int) -> None:
        thread = self.threads[rank]
        if thread.waiting is not None and not thread.queued:
            self._queue(thread)

    def _queue(self, thread: Thread) -> None:
        thread.queued = True
        self._runnable.append(thread.rank)

    def hook(self) -> None:
        """Works out whether the hook before an op has anything to do."""
        self.hooked = self.order == "time" or self.stop is not None or bool(self.faults)

    def before_op(self, rank: int, what: Stop | None = None) -> None:
        """The hook before every op: ends the rank if the run is ending, and hands over to a rank that is behind in time.
        Not while autocast is on: it runs ops inside a lock of the process, for which the next rank would wait, baton in hand.
        """
        if self.ending:
            raise Abort
        if rank in self.faults:
            tell(self, rank)
        clocks_s = (self.threads[r].clock_s for r in self._runnable) if self.order == "time" else ()
        if min(clocks_s, default=math.inf) < self.threads[rank].clock_s and not torch.is_autocast_enabled("cpu"):
            self._hand_over(rank)
        if self.stop is not None and what is not None:
            self.stop(rank, what)

    def before_communication(self, rank: int, what: Stop) -> None:
        """The hook before every communication, where a seeded order may let another rank go first.

        Ranks can notice nothing else of each other, and an op might run inside a lock (logging's, an import's).
        """
        self.threads[rank].asked = 0
        if self.ending or self.hooked:
            self.before_op(rank)
        if self._chance is not None and self._runnable and self._chance.random() < PREEMPT_ODDS:
            self._hand_over(rank)
        if self.stop is not None:
            self.stop(rank, what)

    def asks(self, rank: int, waiting: Waiting) -> None:
        """A rank asked in vain whether something is done. Others go on meanwhile, or it would ask for ever."""
        thread = self.threads[rank]
        thread.asked += 1
        if thread.asked > MOST_ASKED:
            thread.waiting = waiting
            raise self.describe(self.threads)
        if self._runnable and not torch.is_autocast_enabled("cpu"):
            following = self._runnable.pop(
                0
            )  # in turn, whoever is behind in time, or two that ask would starve a third
            self.threads[following].queued = False
            self._queue(thread)
            self._switch(thread, following)

    def can_give(self, to: int) -> bool:
        """Whether the baton can be handed to a certain rank."""
        return self.threads[to].queued and not torch.is_autocast_enabled("cpu")

    def give(self, rank: int, to: int) -> None:
        """Hands the baton to a rank of a stepper's choice, which `can_give`."""
        self._runnable.remove(to)
        self.threads[to].queued = False
        self._queue(self.threads[rank])
        self._switch(self.threads[rank], to)

    def _hand_over(self, rank: int) -> None:
        self._queue(self.threads[rank])
        self._switch(self.threads[rank])

    def _switch(self, thread: Thread, following: int | None = None) -> None:
        if self.ending:
            raise Abort
        if following is None:
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
        stuck = [t for t in self.threads.values() if t.waiting is not None]
        stuck[0].raise_this = self.describe(self.threads)
        self._queue(stuck[0])

    def _pass_on(self, rank: int | None) -> None:
        if rank is not None:
            self._running = self.threads[rank]
            self._running.baton.release()

    def _leave(self) -> None:
        """The rank that holds the baton is done."""
        following = None
        if self.ending:
            following = next((t.rank for t in self.threads.values() if not t.done), None)
        elif (following := self._next()) is None and not all(t.done for t in self.threads.values()):
            self._stuck()
            following = self._next()
        if following is None:
            self._finished.set()
        else:
            self._pass_on(following)
