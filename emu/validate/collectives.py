"""Measured collectives set beside their prices (emu.cost.collectives)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from emu.cost import PricingError
from emu.cost.collectives import KINDS, choose, place_evenly
from emu.hardware import Cluster, HardwareError
from emu.hardware.presets import preset_tables

from .hardware import chip_in, machine
from .reading import Line
from .rows import CollectiveRow
from .score import Pair
from .words import Unclear, meaning

LARGE_BYTES = 2**20  # from here up the goals hold; below, times are mostly launches
Pricer = Callable[[CollectiveRow, Cluster, str], float]


@dataclass(frozen=True)
class Timed:
    """A measured collective and its price.

    Args:
        row: as it was read.
        measured_s, predicted_s: None where there is none.
        algorithm, protocol: of the price.
        why_not: why it cannot be compared; None if it can.
    """

    row: CollectiveRow
    measured_s: float | None = None
    predicted_s: float | None = None
    algorithm: str = ""
    protocol: str = ""
    why_not: str | None = None

    @property
    def large(self) -> bool:
        """Whether it is of a size that the goals hold for."""
        return (self.row.bytes_ or 0) >= LARGE_BYTES


def timed_collectives(lines: Iterable[Line]) -> list[Timed]:
    """The collectives among the rows of a file, priced."""
    return [timed(line.row) for line in lines if isinstance(line.row, CollectiveRow)]


def timed(row: CollectiveRow) -> Timed:
    """One measured collective and its price; what cannot be compared says why."""
    try:
        measured_s = _measured_s(row)
        cluster, per_node = _where(row)
        algorithm = meaning("algorithm", row.algo) or ""
        at = place_evenly(_gpus(row), per_node, cluster)
        chosen = choose(row.op, float(_size(row)), at, cluster, algorithm)
    except Unclear as error:
        return Timed(row, why_not=str(error))
    except (HardwareError, PricingError) as error:
        return Timed(row, why_not=f"{error.message} {error.hint}".strip())
    return Timed(row, measured_s, chosen.seconds, chosen.algorithm, chosen.protocol)


def pairs(of: Iterable[Timed], large: bool = True) -> list[Pair]:
    """Measured and predicted seconds of those that have both; only of 1 MiB and above, if large."""
    return [
        Pair(
            id=one.row.id,
            measured=one.measured_s,
            predicted=one.predicted_s,
            source=one.row.source or "",
            axes={"op": one.row.op, "devices": str(one.row.gpus), "hardware": chip_in(one.row.hardware or "")},
        )
        for one in of
        if one.measured_s is not None and one.predicted_s is not None and (one.large or not large)
    ]


def bus_factor(op: str, n: int) -> float:
    """Bus bandwidth over bytes per second, as nccl-tests defines it.

    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md: 2 (n-1) / n of all-reduce; (n-1) / n of all-gather, reduce-scatter
    and all-to-all; 1 of broadcast and reduce.
    """
    if op == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def _measured_s(row: CollectiveRow) -> float:
    if row.op not in KINDS:
        raise Unclear(f'"{row.op:.40}" is no collective that emu prices; it can be {", ".join(KINDS)}')
    if row.time_us is not None:
        return row.time_us * 1e-6
    n = _gpus(row)
    if row.busbw_GBps is None:
        raise Unclear("neither its time nor its bus bandwidth is stated")
    if n < 2:
        raise Unclear("a collective of one device has no bus bandwidth")
    return _size(row) * bus_factor(row.op, n) / (row.busbw_GBps * 1e9)


def _size(row: CollectiveRow) -> int:
    if row.bytes_ is None:
        raise Unclear("the size of the message is not stated")
    return row.bytes_


def _gpus(row: CollectiveRow) -> int:
    if row.gpus is None:
        raise Unclear("the number of devices is not stated")
    return row.gpus


def _where(row: CollectiveRow) -> tuple[Cluster, int]:
    """Whole nodes of what the row names, and how many devices of each take part."""
    gpus, text = _gpus(row), row.hardware or ""
    if not text:
        raise Unclear("the hardware is not stated")
    size = preset_tables("nodes")[chip_in(text)]["devices_per_node"]
    nodes = row.nodes or -(-gpus // size)
    if gpus % nodes:
        raise Unclear(f"{gpus} devices do not lie evenly on {nodes} nodes")
    return machine(text, nodes * size, row.source or "").cluster, gpus // nodes
