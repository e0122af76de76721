"""The data centre as one computer, as tables: what a cluster's summary says, for the terminal and for HTML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emu.hardware.quantities import short
from emu.hardware.summary import HEADERS
from emu.view.tables import Table

MOST_USED = ("bfloat16", "float16", "float32")  # the dtype that each chip's training uses, first that it has


def summary_tables(summary: Any) -> tuple[Table, Table]:
    """A summary of a cluster as two tables: its totals, and its levels of memory and network.

    Args:
        summary: what cluster.summary() gives.
    """
    whose = f"all {summary.n_devices:,} devices together" if summary.n_devices > 1 else "the device"
    totals = Table((whose, "value"), summary.facts(), summary.name, left=(0, 1))
    note = "Bandwidths are of one direction, by data sheets; an empty cell is a figure that no source was found for."
    return totals, Table(HEADERS, summary.rows(), "", note, left=(0,))


def summaries_table(*summaries: Any, title: str = "") -> Table:
    """Clusters side by side: how many devices, what one does, what all do, and what that costs in power.

    Args:
        summaries: what cluster.summary() gives, two or more.
        title: above the table.
    """

    def device_flops(s: Any) -> float:
        return next(s.peak_flops[d] for d in MOST_USED if d in s.peak_flops)

    def watts(s: Any) -> float | None:
        return s.power_w or s.device_power_w

    rows: list[tuple[str, Callable[[Any], float | None], str]] = [
        ("matrix peak of a device", lambda s: device_flops(s) / s.n_devices, "FLOP/s"),
        ("of all", device_flops, "FLOP/s"),
        ("device memory", lambda s: s.level("hbm").memory_bytes, "B"),
        ("its bandwidth", lambda s: s.level("hbm").bytes_per_s, "B/s"),
        ("scale-up bandwidth", lambda s: s.level("scale_up").bytes_per_s, "B/s"),
        ("power", watts, "W"),
        ("FLOP/s per watt", lambda s: watts(s) and device_flops(s) / (watts(s) or 1), "FLOP/s"),
    ]

    def said(value: float | None, unit: str) -> str:
        return "not known" if value is None else short(value, unit)

    cells = [("devices", *(f"{s.n_devices:,}" for s in summaries))]
    cells += [(name, *(said(of(s), unit) for s in summaries)) for name, of, unit in rows]
    note = "Peaks are dense, of bfloat16, or float16 or float32 where a chip has none. Power is with hosts where known."
    return Table(("", *(s.name for s in summaries)), cells, title, note, left=(0,))


def summary_html(summary: Any) -> str:
    """Both tables of a summary, one below the other."""
    return "<div>" + "\n".join(table.html() for table in summary_tables(summary)) + "</div>"
