"""What the scheduler cannot see: a rank that holds the baton and stands still, or that will not end."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

from emu.spmd.errors import Deadlock

LOOK_S = 1.0
STILL_LOOKS = 30  # a rank that has waited this long for a lock of Python's waits for another rank, which cannot run
ENDING_LOOKS = 20  # a rank that has been told to end this long ago catches what ends it

_LIBRARY = (os.path.dirname(threading.__file__) + os.sep, "<frozen")


class Watchdog:
    """Looks at the rank that runs, once in LOOK_S, from the thread that launched it."""

    def __init__(self) -> None:
        self._seen: tuple[int, int, int] | None = None
        self._still = self._ending = 0

    def stands_still(self, rank: int, ident: int) -> Deadlock | None:
        """The error to raise if the rank waits for a lock that nobody can release."""
        frame = sys._current_frames().get(ident)
        waits = frame is not None and os.path.basename(frame.f_code.co_filename) in ("threading.py", "queue.py")
        seen = (rank, id(frame), frame.f_lasti) if frame is not None and waits else None
        self._still = self._still + 1 if seen is not None and seen == self._seen else 0
        self._seen = seen
        if self._still < STILL_LOOKS:
            return None
        return Deadlock(
            f"rank {rank} has stood still for {STILL_LOOKS * LOOK_S:.0f} s in {_place(frame)}: it waits for a lock, event or "
            "queue, and no other rank runs meanwhile",
            "let ranks talk through their groups (send, recv, collectives), not through threads, events or queues",
            waiting={rank: []},
        )

    def will_not_end(self) -> bool:
        """Whether the ranks were told to end long enough ago."""
        self._ending += 1
        return self._ending > ENDING_LOOKS


def _place(frame: FrameType | None) -> str:
    """The innermost line that is not the standard library's."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "a library"
