"""What each rank is about, for the others to read when they wait too long.

A rank whose wait takes longer than a moment writes down what it waits for, in the store that all ranks share, and reads
what the others wrote: who has finished, who has failed, who waits for whom. So a wait that can never end is an error
within seconds, and says why, where processes of torch.distributed would sit until a timeout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from emu.real.lanes import Pending
from emu.spmd.errors import CollectiveMismatch, Deadlock, EmuError, RankLeft

MOMENT_S = 0.5  # a wait shorter than this is not written down
POLL_S = 0.25


@dataclass(frozen=True)
class Waiting:
    """One wait: what for, at which line, and the operation's number in each member's own count.

    Args:
        needs: global rank -> the count in which that rank would have to reach `seq`.
    """

    what: str
    where: str
    seq: int
    needs: Mapping[int, str]


@dataclass
class Board:
    """This rank's side of the board.

    Args:
        store: a client of the store that all ranks share, for this use alone.
        issued: how many operations this rank has given to each of its groups; kept by the channel.
    """

    store: Any
    rank: int
    size: int
    timeout_s: float
    issued: dict[str, int] = field(default_factory=dict)

    def post(self, state: str, **about: Any) -> None:
        """Writes this rank's state: running, waiting, finished or failed."""
        about |= {"state": state, "issued": self.issued}
        with suppress(RuntimeError):  # the store's host is gone, and with it all who could read
            self.store.set(f"board/{self.rank}", json.dumps(about))

    def failed(self, error: BaseException, where: str) -> None:
        text = str(error).split("\n", 1)[0]
        known = isinstance(error, (Deadlock, CollectiveMismatch))
        self.post("failed", what=f"{type(error).__name__}: {text}", where=where, seen_elsewhere=known)

    def read(self) -> list[dict[str, Any]]:
        """Every rank's state, by rank; a rank that has not written any yet is running."""
        try:
            keys = [f"board/{r}" for r in range(self.size)]
            there = [key for key in keys if self.store.check([key])]
            found = dict(zip(there, self.store.multi_get(there))) if there else {}
            return [json.loads(found[key]) if key in found else {"state": "running"} for key in keys]
        except RuntimeError:
            return [{"state": "running"} for _ in range(self.size)]

    def wait(self, pending: Pending, waiting: Waiting) -> None:
        """Waits for a job of this rank.

        Raises:
            RankLeft: a rank that it needs has finished or failed.
            Deadlock: ranks wait for each other, or the timeout has passed.
            CollectiveMismatch, and whatever else the job raised.
        """
        if not pending.finished(MOMENT_S):
            self._wait_long(pending, waiting)
        try:
            pending.result()
        except EmuError:
            raise
        except RuntimeError as error:
            raise self._broken(waiting, error) from error

    def _wait_long(self, pending: Pending, waiting: Waiting) -> None:
        self.post("waiting", what=waiting.what, where=waiting.where, seq=waiting.seq, needs=dict(waiting.needs))
        start, before = time.monotonic(), None
        while not pending.finished(POLL_S):
            states = self.read()
            error = _someone_failed(waiting, states) or _someone_left(self.rank, states)
            if error is None and states == before:  # nothing moved between two looks
                error = _nobody_moves(self.rank, states)
            if error is not None and not pending.finished(0):
                raise error
            if time.monotonic() - start > self.timeout_s:
                raise Deadlock(
                    f"rank {self.rank} has waited {self.timeout_s:g} s in {waiting.what} ({waiting.where})\n"
                    + _listing(states),
                    "see what the other ranks do; if they only compute for long, raise timeout_s",
                    waiting={self.rank: _missing(self.rank, states)},
                )
            before = states
        self.post("running")

    def _broken(self, waiting: Waiting, error: RuntimeError) -> EmuError:
        """A backend's own error: most often a member is gone. Gives it a moment to be known why."""
        for _ in range(8):
            states = self.read()
            gone = _someone_failed(waiting, states)
            if gone is not None:
                return gone
            time.sleep(POLL_S)
        first = str(error).split("\n", 1)[0]
        return RankLeft(
            f"{waiting.what} ({waiting.where}) broke off: {first}\n{_listing(self.read())}",
            "a member's process has most likely ended: look for its own error above or below this one",
            waiting={self.rank: [r for r in waiting.needs if r != self.rank]},
        )

    def drain(self) -> None:
        """The end of the program: waits until every rank has ended it.

        Raises:
            RankLeft: another rank failed.
        """
        self.post("finished")
        start = time.monotonic()
        pause_s = 0.001
        while True:
            states = self.read()
            error = _someone_failed(Waiting("the end of the program", "", 0, {}), states)
            if error is not None:
                raise error
            if all(s["state"] == "finished" for s in states):
                return
            if time.monotonic() - start > self.timeout_s:
                raise Deadlock(
                    f"rank {self.rank} has finished, but others have not after {self.timeout_s:g} s\n{_listing(states)}",
                    "see what the other ranks do; if they only compute for long, raise timeout_s",
                    waiting={},
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)


def _missing(rank: int, states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Members that the rank waits for and that, being at rest, have not come to the same operation."""
    about = states[rank]
    if about["state"] != "waiting":
        return []
    return [
        r
        for r, key in ((int(r), key) for r, key in about["needs"].items())
        if states[r]["state"] in ("waiting", "finished") and states[r]["issued"].get(key, 0) <= about["seq"]
    ]


def _someone_failed(waiting: Waiting, states: Sequence[Mapping[str, Any]]) -> EmuError | None:
    failed = [r for r, s in enumerate(states) if s["state"] == "failed"]
    if not failed:
        return None
    # What a rank raised because of another is not the cause.
    first = min(failed, key=lambda r: (states[r]["seen_elsewhere"], r))
    where = f" ({states[first]['where']})" if states[first]["where"] else ""
    at = f" ({waiting.where})" if waiting.where else ""
    return RankLeft(
        f"rank {first} failed while this rank waits in {waiting.what}{at}: {states[first]['what']}{where}",
        f"rank {first}'s own traceback tells more",
        waiting={},
        finished=failed,
    )


def _someone_left(rank: int, states: Sequence[Mapping[str, Any]]) -> EmuError | None:
    left = [r for r in _missing(rank, states) if states[r]["state"] == "finished"]
    if not left:
        return None
    names = ", ".join(map(str, left))
    return RankLeft(
        f"deadlock: rank {names} finished while others still wait for it\n{_listing(states)}",
        "every rank must call every collective of its groups: give the short rank an empty batch instead of none",
        waiting={rank: left},
        finished=left,
    )


def _nobody_moves(rank: int, states: Sequence[Mapping[str, Any]]) -> EmuError | None:
    """A deadlock: this rank and all that it waits for, and so on, wait for a rank that itself will never come."""
    missing = {r: _missing(r, states) for r, s in enumerate(states) if s["state"] == "waiting"}
    stuck = {r for r in missing if missing[r]}
    while gone := {r for r in stuck if not any(m in stuck or states[m]["state"] == "finished" for m in missing[r])}:
        stuck -= gone
    if rank not in stuck:
        return None
    return Deadlock(
        f"deadlock: these ranks cannot go on\n{_listing(states)}",
        "let both sides call the same collective in the same order; post sends and receives of a pair together "
        "with exchange([...]), or swap the order on one rank",
        waiting={r: missing[r] for r in sorted(stuck)},
    )


def _listing(states: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for rank, about in enumerate(states[:16]):
        match about["state"]:
            case "waiting":
                missing = _missing(rank, states)
                whom = f" for rank {', '.join(map(str, missing))}" if missing else ""
                lines.append(f"  rank {rank} waits in {about['what']} ({about['where']}){whom}")
            case "failed":
                lines.append(f"  rank {rank} failed: {about['what']}")
            case "finished":
                lines.append(f"  rank {rank} has finished its program")
            case _:
                lines.append(f"  rank {rank} is running, or waited in nothing for long")
    return "\n".join(lines + ([f"  ... and {len(states) - 16} more"] if len(states) > 16 else []))
