"""Numbers that no unit can explain: 80 bytes of memory, a latency of three seconds, 450 bytes per second.

Bounds are far from all that exists, toys included; they catch a forgotten factor (GB, TFLOP/s, microseconds), not a wrong
figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .places import File, in_words

MOST_DEVICES = 10**8


class Bound(NamedTuple):
    """Which fields a bound holds for, by the ending of their name or of their table's, and what to say of others."""

    ending: str
    least: float
    most: float
    unit: str
    example: str


# The first ending that fits counts.
BOUNDS = (
    Bound("hbm_bytes_per_s", 1e5, 1e17, "bytes per second", "3.35 TB/s are 3.35e12"),
    Bound("_bytes_per_s", 1e5, 1e15, "bytes per second", "450 GB/s are 450e9, and 400 Gb/s are 50e9"),
    Bound("bytes_per_s", 1e5, 1e15, "bytes per second", "2 TB/s are 2e12"),
    Bound("_flops", 1e6, 5e17, "FLOP/s of one device", "989 TFLOP/s are 989e12"),
    Bound("l2_bytes", 1e3, 1e12, "bytes", '50 MB are 50e6, or "50MB"'),
    Bound("sm_bytes", 1e3, 1e11, "bytes of one core", '228 KB are 233472, or "228KiB"'),
    Bound("register_bytes", 1e3, 1e11, "bytes of one core", '256 KB are 262144, or "256KiB"'),
    Bound("hbm_bytes", 1e3, 1e15, "bytes", '80 GB are 80e9, or "80GB"'),
    Bound("host_bytes", 1e6, 1e18, "bytes", '2 TB are 2e12, or "2TB"'),
    Bound("capacity_bytes", 1e6, 1e21, "bytes", "240 PB are 240e15"),
    Bound("fill_bytes", 1, 1e12, "bytes", '12 MB are 12e6, or "12MB"'),
    Bound("sustained", 0.01, 1, "shares of the peak", "an H100 keeps up 0.66 in bfloat16"),
    Bound("attention", 0.001, 1, "shares of the peak", "an H100's flash2 reaches about 0.4"),
    Bound("overlap_loss", 0, 0.9, "shares of what a chip computes", "0.26 is usual"),
    Bound("fraction", 0.01, 2, "shares of a rate", "0.8 is usual"),
    Bound("kernel_s", 0.0, 1e-3, "seconds", "2 microseconds are 2e-6"),
    Bound("launch_s", 0.0, 1e-2, "seconds", "7 microseconds are 7e-6"),
    Bound("_s", 0.0, 0.1, "seconds", "3.4 microseconds are 3.4e-6"),
    Bound("attention_seq", 0, 1e6, "keys", "the H100's blocks of queries start and end in the time of some 300"),
    Bound("matmul_ends", 0, 100, "times that writing a tile takes", "2 is usual"),
    Bound("power_exponent", 0, 3, "powers", "0.6 is usual"),
    Bound("limit_w", 0.01, 1e5, "watts of one device", "0.5 kW are 500"),
    Bound("tdp_w", 0.01, 1e5, "watts of one device", "0.7 kW are 700"),
    Bound("power_w", 0.01, 1e9, "watts of the whole node", "10.2 kW are 10200"),
    Bound("devices_per_node", 1, 1e6, "devices that share the fast links", "a node of H100s has 8, a TPU v5p pod 8960"),
    Bound("sm_count", 1, 1e7, "cores", "an H100 has 132"),
    Bound("racks", 1e-4, 1e5, "racks of one node", "half a rack is 0.5"),
    Bound("ports", 1, 1e6, "lanes of one device", "a device of a full mesh of eight has 7"),
)
# Rates and shares beside their names are tables: "peak_flops.bfloat16".
_TABLES_OF_RATES = ("peak_flops", "achievable_flops", "calibrated_flops", "vector_flops", "sustained", "attention")


def check_plausible(table: Mapping[str, Any], file: File) -> None:
    """Raises HardwareError for the first number of a cluster's tables that is far outside of what exists."""
    for field, value in _numbers(table):
        bound = bound_of(field)
        if bound is None or bound.least <= value <= bound.most:
            continue
        side = "too small" if value < bound.least else "too large"
        raise file.error(
            field,
            f"{field} = {in_words(value)} is {side}: it is in {bound.unit}.",
            f"{bound.example[0].upper()}{bound.example[1:]}.",
            value,
        )


def bound_of(field: str) -> Bound | None:
    """The bound of a field by its dotted name; None if anything goes that the field's own type allows."""
    parts = field.split(".")
    name = next((part for part in parts if part in _TABLES_OF_RATES), parts[-1])
    return next((bound for bound in BOUNDS if name.endswith(bound.ending)), None)


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number with its dotted name as the file's lines are looked up by, items of lists by their place."""
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield path, value
        return
    for name, item in items:
        yield from _numbers(item, f"{path}.{name}" if path else str(name))
