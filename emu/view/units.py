"""Numbers for people. Bytes are decimal everywhere (1 GB = 1e9 bytes), because data sheets of chips and links are;
so "3.35 GB" is 3.12 GiB, and an "80 GB" H100 and its traffic are counted in the same unit.
"""

from __future__ import annotations

from emu.trace.units import bytes_text, metric_text, percent_text, time_text

__all__ = [
    "byte_unit",
    "bytes_text",
    "count_text",
    "number_text",
    "percent_text",
    "rate_text",
    "time_text",
    "time_unit",
]
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def rate_text(per_s: float, unit: str) -> str:
    """A rate with three digits: (4.5e11, "B/s") -> "450 GB/s"."""
    return metric_text(per_s, unit)


def count_text(count: float) -> str:
    """A number with separated thousands: 1234567 -> "1,234,567"."""
    return f"{count:,}" if float(count).is_integer() else f"{count:,.4g}"


def number_text(value: float) -> str:
    """A number as people read it, in about three digits from a million on: 0.5, 24, 1,024, 3 million."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if 0.9995 * size <= value < 999.5 * size:
            return f"{value / size:.3g} {word}"
    if value >= 999.5e12:
        return f"{value:.0e}"
    return f"{value:,.0f}" if value >= 9.5 or value == int(value) else f"{value:.2g}"


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
