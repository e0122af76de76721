"""Where communication runs while a program goes on: a thread for each queue on CPUs, a CUDA stream for each on GPUs.

A lane does its jobs one after another, in the order they were given, as a communicator does. On CPUs a thread per lane
also keeps every blocking call away from the program's own thread, which therefore can always tell that it waits for
something that will never come (board.py), and can be interrupted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """A job given to a lane."""

    def finished(self, timeout_s: float) -> bool:
        """Whether the host need not wait any more; waits up to `timeout_s` for that."""
        ...

    def result(self) -> None:
        """Makes the current stream come after the job; raises what the job raised."""
        ...


class ThreadJob:
    """A job on a thread."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        try:
            self._job()
        except BaseException as error:
            self._error = error
        self._job = _nothing  # its buffers belong to the program again
        self._over.set()

    def finished(self, timeout_s: float) -> bool:
        return self._over.wait(timeout_s) if timeout_s else self._over.is_set()

    def result(self) -> None:
        if self._error is not None:
            raise self._error


class ThreadLane:
    """Jobs in order on a thread of their own. The thread is a daemon: a job that is stuck does not keep the process."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[ThreadJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"emu {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job.run()

    def submit(self, job: Callable[[], None]) -> ThreadJob:
        pending = ThreadJob(job)
        self._jobs.put(pending)
        return pending

    def close(self, timeout_s: float = 1.0) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)


class StreamJob:
    """A job on a CUDA stream: the host has issued it, an event tells when it is over."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def finished(self, timeout_s: float) -> bool:
        return True if timeout_s else self._event.query()

    def result(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamLane:
    """Jobs in order on a CUDA stream, each after what the current stream has been given so far."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def submit(self, job: Callable[[], None]) -> StreamJob:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                job()
                return StreamJob(self._stream.record_event())

    def close(self, timeout_s: float = 1.0) -> None:
        pass


def _nothing() -> None:
    pass
