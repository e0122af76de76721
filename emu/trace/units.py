"""Numbers for people, wherever a record describes itself. Bytes are decimal (1 GB = 1e9 bytes), as in data sheets."""

from __future__ import annotations

import math


def metric_text(value: float, unit: str) -> str:
    """A number with three digits and the prefix that fits: (4.5e11, "B/s") -> "450 GB/s"."""
    import humanize

    if value != value or math.isinf(value):
        return "not known" if value != value else "infinite"
    if value == 0:
        return f"0 {unit}"
    return humanize.metric(value, unit).replace("\N{GREEK SMALL LETTER MU}", "µ")


def bytes_text(n_bytes: float) -> str:
    """Bytes in decimal units with three digits: 3352000000 -> "3.35 GB"."""
    # Whole bytes below a thousand: "12 B" rather than "12.0 B".
    return f"{int(n_bytes)} B" if 0 <= n_bytes < 1000 and n_bytes == int(n_bytes) else metric_text(n_bytes, "B")


def time_text(time_s: float) -> str:
    """Seconds in the unit that fits, with three digits: 0.000123 -> "123 µs"."""
    return metric_text(time_s, "s")


def percent_text(fraction: float) -> str:
    """A fraction 0-1 as a percentage: 0.4321 -> "43.2 %"."""
    if fraction != fraction:
        return "not known"
    percent = 100 * fraction
    # What is small but not zero must not read as zero.
    return "< 0.1 %" if 0 < percent < 0.05 else f"{percent:.1f} %"


def count_text(n: int, noun: str) -> str:
    """How many of what, in English: (1, "rank") -> "1 rank"; (1200, "event") -> "1,200 events"."""
    return f"{n:,} {noun}{'s' if n != 1 else ''}"


def ranks_text(ranks: list[int]) -> str:
    """Which ranks: [0, 1, 2] -> "0 to 2"; [1, 4] -> "1, 4"."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks)) or "none"


def plain_text(text: str) -> str:
    """A text as a terminal may be given it: what is no printable character is written as in Python, "\\x1b" for an escape.

    Names come from programs and files; a terminal would obey an escape sequence in one, and cannot show half a surrogate pair.
    Lines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
