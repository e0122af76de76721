"""Numbers for people. Bytes are decimal everywhere (1 GB = 1e9 bytes), because data sheets of chips and links are;
so "3.35 GB" is 3.12 GiB, and an "80 GB" H100 and its traffic are counted in the same unit.
"""

from __future__ import annotations

import math

TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def _metric(value: float, unit: str) -> str:
    import humanize

    if value != value or math.isinf(value):
        return "not known" if value != value else "infinite"
    if value == 0:
        return f"0 {unit}"
    return humanize.metric(value, unit).replace("\N{GREEK SMALL LETTER MU}", "µ")


def bytes_text(n_bytes: float) -> str:
    """Bytes in decimal units with three digits: 3352000000 -> "3.35 GB"."""
    # Whole bytes below a thousand: "12 B" rather than "12.0 B".
    return f"{int(n_bytes)} B" if 0 <= n_bytes < 1000 and n_bytes == int(n_bytes) else _metric(n_bytes, "B")


def time_text(time_s: float) -> str:
    """Seconds in the unit that fits, with three digits: 0.000123 -> "123 µs"."""
    return _metric(time_s, "s")


def rate_text(per_s: float, unit: str) -> str:
    """A rate with three digits: (4.5e11, "B/s") -> "450 GB/s"."""
    return _metric(per_s, unit)


def percent_text(fraction: float) -> str:
    """A fraction 0-1 as a percentage: 0.4321 -> "43.2 %"."""
    if fraction != fraction:
        return "not known"
    percent = 100 * fraction
    # What is small but not zero must not read as zero.
    return "< 0.1 %" if 0 < percent < 0.05 else f"{percent:.1f} %"


def count_text(count: float) -> str:
    """A number with separated thousands: 1234567 -> "1,234,567"."""
    return f"{count:,}" if float(count).is_integer() else f"{count:,.4g}"


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for an axis that ends at `longest_s`, and its length in seconds: 0.02 -> ("ms", 0.001)."""
    for name, length_s in TIME_UNITS:
        # An axis reads well from about 1 to 1000; 0.9 keeps "1 ms" from turning into "1000 µs".
        if longest_s >= 0.9 * length_s:
            return name, length_s
    return ("s", 1.0) if longest_s <= 0 else TIME_UNITS[-1]


def byte_unit(largest_bytes: float) -> tuple[str, float]:
    """The decimal unit for an axis that ends at `largest_bytes`, and its size in bytes: 5e9 -> ("GB", 1e9)."""
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest_bytes >= 0.9 * size:
            return name, size
    return "B", 1.0
