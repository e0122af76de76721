"""A schedule as text: a row a rank, a column a slot of time."""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.pipeline.timing import Timed, Times, timed

MOST_SLOTS = 200  # times without a common measure are rounded to so many


def grid(schedule: Schedule | Timed, times: Times | None = None, width: int = 120) -> str:
    """A schedule as columns of time slots: `F3` a forward of microbatch 3, `B3--` a backward that takes two slots, `.` idle.

    Where a rank holds several stages their numbers stand in front, as in `5F3`.

    Args:
        schedule: a schedule, or one with times.
        times: how long things take; by default 1 for each of F, I and W, 2 for B. A slot is the longest time of which all
            starts and stops are multiples.
        width: of a line in characters; what is longer goes on in a block of lines below.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    rows = (schedule if isinstance(schedule, Timed) else timed(schedule, times)).rows
    slot = _slot([at for row in rows for start, stop, _ in row for at in (start, stop)])
    several = any(len({part.stage for _, _, a in row for part in a.each()}) > 1 for row in rows)
    cells = [[(round(start / slot), round(stop / slot), _word(a, several)) for start, stop, a in row] for row in rows]
    # Of a word that takes several slots, each must hold its share.
    wide = max((-(-(len(word) + 1) // max(stop - start, 1)) for row in cells for start, stop, word in row), default=2)
    slots = max((row[-1][1] for row in cells if row), default=0)
    label = max(len(f"rank {len(rows) - 1}"), len("time")) + 2
    across = max(1, (width - label) // wide)
    lines = [_line(row, slots, wide) for row in cells]
    blocks = []
    for first in range(0, max(slots, 1), across):
        count = min(across, slots - first)
        step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if n * wide > len(_at(slots, slot)))
        header = "".join(
            _at(at, slot).ljust(wide * step) for at in range(first, first + count) if (at - first) % step == 0
        )
        block = [f"{'time':{label}}{header}".rstrip()]
        for rank, line in enumerate(lines):
            block.append(f"{f'rank {rank}':{label}}{line[first * wide : (first + count) * wide]}".rstrip())
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def _word(action: Action, several: bool) -> str:
    return "+".join(f"{part.stage if several else ''}{part.kind}{part.microbatch}" for part in action.each())


def _line(row: list[tuple[int, int, str]], slots: int, wide: int) -> str:
    line, at = "", 0
    for start, stop, word in row:
        line += ".".ljust(wide) * (start - at)
        if stop > start:  # what takes no time is not seen
            line += word.ljust((stop - start) * wide - 1, "-")[: (stop - start) * wide - 1] + " "
        at = max(at, stop)
    return line + ".".ljust(wide) * (slots - at)


def _at(slot: int, length: Fraction) -> str:
    return f"{float(slot * length):g}"


def _slot(moments: list[float]) -> Fraction:
    """The longest time of which all are multiples; one that is fine enough if that would be very short."""
    exact = [Fraction(at).limit_denominator(1000) for at in moments if at]
    if not exact:
        return Fraction(1)
    below = lcm(*(at.denominator for at in exact))
    slot = Fraction(gcd(*(int(at * below) for at in exact)), below)
    most = max(exact)
    return slot if most / slot <= MOST_SLOTS else most / MOST_SLOTS
