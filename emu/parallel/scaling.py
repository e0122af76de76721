"""Dynamic loss scaling: float16's small numbers are kept from vanishing, and its overflows from being learnt."""

from __future__ import annotations

import weakref
from typing import Any

from emu.spmd import EmuError

UNKNOWN, DIVIDED = "unknown", "divided"  # of gradients: whether they carry a scale, and that they do no longer


class LossScale:
    """A factor on the loss, the same on every rank (arXiv 1710.03740, section 3.2).

    Gradients carry it until the optimizer's step, which divides it out before it clips. Where any rank's gradient
    overflowed, all ranks skip the step and the factor is halved; after `interval` steps without overflow it doubles.

    Args:
        value: to begin with; a power of two keeps every digit.
        growth, backoff: factors.
        interval: steps without overflow before it grows.
    """

    def __init__(self, value: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        if not (value > 0 and growth >= 1 and 0 < backoff < 1 and interval >= 1):
            raise EmuError(
                f"LossScale({value}, growth={growth}, backoff={backoff}, interval={interval})",
                "value is above 0, growth at least 1, backoff between 0 and 1, interval at least 1",
            )
        self.value, self.growth, self.backoff, self.interval = float(value), growth, backoff, interval
        self.since = 0  # steps since it last changed
        self._user: Any = lambda: None  # a weak reference to who uses it

    def belongs_to(self, user: Any) -> None:
        """Notes on whose `rank` it is.

        Raises:
            EmuError: another rank of this process uses it: every step would change it once for each.
        """
        other = self._user()
        if other is not None and other.rank != user.rank:  # the same rank of a launch that failed may still be around
            raise EmuError(
                f"ranks {other.rank} and {user.rank} share one LossScale, which would change once for each of them in a step",
                "make it within the program, so that every rank has its own",
            )
        self._user = weakref.ref(user)

    def update(self, overflowed: bool) -> None:
        """After a step, with the decision of all ranks."""
        self.since += 1
        if overflowed:
            self.value, self.since = self.value * self.backoff, 0
        elif self.since == self.interval:
            self.value, self.since = self.value * self.growth, 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "since": self.since}

    def load(self, state: dict[str, Any]) -> None:
        self.value, self.since = float(state["value"]), int(state["since"])

    def __repr__(self) -> str:
        return f"LossScale({self.value:g}, {self.since} steps since it changed)"


def checked_scale(scale: Any) -> LossScale | None:
    """The scale, if it is one, or None; else an EmuError."""
    if scale is not None and not isinstance(scale, LossScale):
        raise EmuError(f"scale={scale!r} is a {type(scale).__name__}", "pass a LossScale: emu.parallel.LossScale(1024)")
    return scale
