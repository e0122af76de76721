"""Numbers with a unit in words."""

from __future__ import annotations


def short(value: float, unit: str = "") -> str:
    """A number with three digits and its unit prefix: (3.35e12, "B") is "3.35 TB"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"
