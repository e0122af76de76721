"""Work shared out among processes that are forked from this one, so that nothing is pickled on the way there.

A forked process has all that its parent has but its other threads, and what a library made of those: of a device, say.
So each first shows that it is fit to work; where none is, or none can be forked, this process does everything itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from emu.spmd import EmuError
from emu.virtual.scheduler import RANK

T = TypeVar("T")
R = TypeVar("R")

WORTH_S = 4.0  # work that takes less is not worth a second process
SLOWEST = 50.0  # times the usual time of a job, after which its process is given up
_FAILED = "failed"


class WorkerDied(EmuError):
    """A process ended in the middle of a job. Fields: job (str), exitcode (int; negative: by that signal)."""


def worth(jobs: int, seconds: float) -> int:
    """How many processes to share `jobs` jobs of `seconds` s each out among; 1: this one does them all.

    One a core, as far as their memory fits. None is forked off the main thread, on which alone signals arrive, while ranks
    run on others, or where it is not known to be safe: not on macOS.
    """
    if jobs < 2 or jobs * seconds < WORTH_S or sys.platform != "linux":
        return 1
    here, threads = threading.current_thread(), threading.enumerate()
    if here is not threading.main_thread() or any(t.name.startswith(RANK) for t in threads):
        return 1
    if multiprocessing.current_process().daemon:  # the user's own worker, which may have no children
        return 1
    return max(1, min(jobs, len(os.sched_getaffinity(0)), _that_fit()))


def _that_fit() -> int:
    """How many processes as large as this one was at most fit in half of the free memory."""
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // (2 * max(largest, 1))


def each(
    work: Callable[[T], R],
    jobs: Sequence[T],
    processes: int,
    *,
    fit: Callable[[], bool] = lambda: True,
    patience_s: float = 60.0,
    seconds: float = 0.0,
    starting: Callable[[T], None] = lambda job: None,
) -> list[R]:
    """`[work(job) for job in jobs]`, by several processes.

    Args:
        work: what it returns can be pickled. A job that raises in a process is done again here, and raises here.
        processes: how many to fork; with 1, none is.
        fit: run by every process first: whether it may work.
        patience_s: how long that may take; a process that takes longer is given up.
        seconds: about how long a job takes. One that takes SLOWEST times as long and patience_s more is done again here: its
            process may wait for a lock that another thread held when it was forked.
        starting: called here when a job is begun, in the order of jobs.

    Raises:
        WorkerDied: a process ended in the middle of a job. No process is left then, nor after Ctrl-C.
    """
    results: dict[int, R] = {}
    waiting = deque(range(len(jobs)))

    def alone(i: int) -> None:
        results[i] = work(jobs[i])

    if processes > 1:
        with _forked(work, jobs, fit, processes) as workers:
            _share_out(workers, waiting, jobs, patience_s, patience_s + SLOWEST * seconds, starting, results, alone)
    for i in waiting:  # all of them, where nothing was forked
        starting(jobs[i])
        alone(i)
    return [results[i] for i in range(len(jobs))]


def _share_out(
    workers: dict[Connection, Any],
    waiting: deque[int],
    jobs: Sequence[Any],
    patience_s: float,
    limit_s: float,
    starting: Callable[[Any], None],
    results: dict[int, Any],
    alone: Callable[[int], None],
) -> None:
    """Gives every process one job after the other. Leaves in `waiting` what no process is left for."""
    idle: set[Connection] = set()
    busy: dict[Connection, int] = {}
    until: dict[Connection, float] = {}  # when a busy one is given up
    while workers and (waiting or busy):
        for end in [end for end in workers if end in idle][: len(waiting)]:
            idle.remove(end)
            busy[end] = waiting.popleft()
            until[end] = time.monotonic() + limit_s
            starting(jobs[busy[end]])
            with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: seen below
                end.send(busy[end])
        left_s = min(until[end] for end in busy) - time.monotonic() if busy else patience_s
        ready: list[Any] = wait(list(workers), max(left_s, 0.0))
        if not ready and not busy:
            return
        for end in [end for end in busy if end not in ready and time.monotonic() >= until[end]]:
            workers.pop(end).kill()
            alone(busy.pop(end))
        for end in ready:
            try:
                said = end.recv()
            except (EOFError, ConnectionResetError):
                idle.discard(end)
                _bury(workers.pop(end), busy.pop(end, None), waiting, jobs)
                continue
            if end in busy:
                i = busy.pop(end)
                if said == _FAILED:
                    alone(i)
                else:
                    (results[i],) = said
            elif not said:  # unfit
                workers.pop(end).kill()
                continue
            idle.add(end)


def _bury(process: Any, job: int | None, waiting: deque[int], jobs: Sequence[Any]) -> None:
    """A process that has ended. One that was killed, for want of memory mostly, leaves its job to others."""
    process.join()
    if job is None:
        return
    if process.exitcode == -signal.SIGKILL:
        waiting.appendleft(job)
        return
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    raise WorkerDied(
        f"{jobs[job]}: the process that ran it ended, {how}",
        "let the program raise an exception instead of ending its process (os._exit, a crash in a library)",
        job=str(jobs[job]),
        exitcode=code,
    )


@contextmanager
def _forked(
    work: Callable[[Any], Any], jobs: Sequence[Any], fit: Callable[[], bool], n: int
) -> Iterator[dict[Connection, Any]]:
    """n processes, by our end of the pipe to each; none is left afterwards."""
    context = multiprocessing.get_context("fork")
    workers: dict[Connection, Any] = {}
    everyone = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in them for good, here until each is known
    try:
        try:
            for _ in range(n):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, [*workers, ours], work, jobs, fit))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # other threads: see `fit`
                    process.start()
                theirs.close()
                workers[ours] = process
                everyone.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield workers
    finally:
        for process in everyone:
            process.kill()
        for process in everyone:
            process.join()


def _serve(
    end: Connection,
    parents: Sequence[Connection],
    work: Callable[[Any], Any],
    jobs: Sequence[Any],
    fit: Callable[[], bool],
) -> None:
    """The life of a forked process: it ends with its parent, whose ends of pipes it must not hold open.

    SIGINT stays blocked, as it was when it was forked: Ctrl-C is the parent's to answer.
    """
    for other in parents:
        other.close()
    try:
        end.send(_tried(fit, False))
        while True:
            job = jobs[end.recv()]
            said = _tried(lambda job=job: (work(job),), _FAILED)
            sys.stdout.flush()
            sys.stderr.flush()
            end.send(said)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _tried(function: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return function()
    except Exception:
        return otherwise
