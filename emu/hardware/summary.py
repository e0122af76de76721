"""The data centre as one computer: what all devices of a cluster have together, level by level."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .quantities import short

if TYPE_CHECKING:
    from .clusters import Cluster


@dataclass(frozen=True)
class Level:
    """One level of memory or network, of all devices together.

    Args:
        name: "registers", "sm", "l2", "hbm", "scale_up", "scale_out", "above_pods", "host" or "storage".
        memory_bytes: what it holds; None if it holds nothing or no figure is known.
        bytes_per_s: what all devices together move there in one direction (HBM: reads plus writes), by data sheets.
        bisection_bytes_per_s: what passes in one direction between two halves of what it joins: for "scale_up" the halves
            of every node, all nodes together; for "scale_out" the halves of the cluster. None where wires are not known.
        shape: its topology in words, or "".
    """

    name: str
    memory_bytes: float | None = None
    bytes_per_s: float | None = None
    bisection_bytes_per_s: float | None = None
    shape: str = ""


@dataclass(frozen=True)
class Summary:
    """Totals of a cluster. It prints itself as a table, and in a notebook as one too.

    Args:
        name, chip: of the cluster and its devices.
        n_devices, nodes, devices_per_node: how many.
        racks: None where no figure is known.
        peak_flops: FLOP/s by dtype, all devices.
        levels: from the registers to the storage.
        device_power_w: of the devices alone; power_w: with hosts, fans and the node's switches. None where no figure is known.
    """

    name: str
    chip: str
    n_devices: int
    nodes: int
    devices_per_node: int
    racks: float | None
    peak_flops: dict[str, float]
    levels: tuple[Level, ...]
    device_power_w: float | None
    power_w: float | None

    def level(self, name: str) -> Level:
        """A level by name. Raises KeyError if the cluster has none of that name."""
        for level in self.levels:
            if level.name == name:
                return level
        raise KeyError(f"{self.name} has no level {name!r}; it has {', '.join(level.name for level in self.levels)}")

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**asdict(self), "levels": [asdict(level) for level in self.levels]}

    def facts(self) -> list[tuple[str, str]]:
        """What it says besides the levels, as (name, value in words)."""
        plural = "s" if self.nodes != 1 else ""
        facts = [
            ("devices", f"{self.n_devices:,} {self.chip}, {self.nodes:,} node{plural} of {self.devices_per_node:,}"),
            ("racks", "not known" if self.racks is None else f"{self.racks:,.4g}"),
            *((f"peak {dtype}", short(rate, "FLOP/s")) for dtype, rate in self.peak_flops.items()),
            ("power of the devices", "not known" if self.device_power_w is None else short(self.device_power_w, "W")),
            ("power with hosts", "not known" if self.power_w is None else short(self.power_w, "W")),
        ]
        dtype = next((d for d in ("bfloat16", "float16", "float32") if d in self.peak_flops), None)
        watts = self.power_w or self.device_power_w
        if watts and dtype:
            facts.append((f"{dtype} per watt", short(self.peak_flops[dtype] / watts, "FLOP/s")))
        return facts

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The levels in words: name, memory, bandwidth, bandwidth of a device, bisection. Unknown figures are ""."""

        def said(value: float | None, unit: str) -> str:
            return "" if value is None else short(value, unit)

        return [
            (
                NAMES[level.name] + (f" ({level.shape})" if level.shape else ""),
                said(level.memory_bytes, "B"),
                said(level.bytes_per_s, "B/s"),
                said(level.bytes_per_s and level.bytes_per_s / self.n_devices, "B/s"),
                said(level.bisection_bytes_per_s, "B/s"),
            )
            for level in self.levels
        ]

    def __str__(self) -> str:
        facts = self.facts()
        width = max(len(name) for name, _ in facts)
        table = [HEADERS, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
        lines = [self.name, *(f"  {name:<{width}}  {value}" for name, value in facts), ""]
        for row in table:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(lines)


HEADERS = ("all devices together", "memory", "bandwidth", "a device", "between halves")
NAMES = {
    "registers": "registers",
    "sm": "memory of the cores",
    "l2": "last-level cache",
    "hbm": "device memory",
    "scale_up": "scale-up",
    "scale_out": "scale-out",
    "above_pods": "above the pods",
    "host": "host",
    "storage": "storage",
}


def summarise(cluster: Cluster) -> Summary:
    """What all devices of a cluster have together."""
    n, node, chip = cluster.n_devices, cluster.node, cluster.chip
    levels = [
        Level(name, size * n, chip.hbm_bytes_per_s * n if name == "hbm" else None)
        for name, size in chip.memory_levels().items()
    ]
    lane, shape = node.lane_bytes_per_s, node.shape
    halves = None if lane is None or shape is None else shape.bisection_lanes * lane * cluster.nodes
    levels.append(
        Level("scale_up", None, node.scale_up.bandwidth_bytes_per_s * n, halves, str(shape) if shape else node.topology)
    )
    if cluster.nodes > 1:
        out, network = cluster.scale_out.bandwidth_bytes_per_s, cluster.network
        # Halving the whole network, whose last pod may be partly used, so at most what the devices there are can send.
        across = min(network.bisection_lanes, n // 2) * out
        levels.append(Level("scale_out", None, out * n, across, str(network)))
        if cluster.fabric is not None and cluster.fabric.oversubscription > 1 and n > cluster.fabric.pod_devices:
            levels.append(Level("above_pods", None, out * n / cluster.fabric.oversubscription))
    host = None if node.host_link is None else node.host_link.bandwidth_bytes_per_s * n
    host_bytes = None if node.host_bytes is None else node.host_bytes * cluster.nodes
    if host is not None or host_bytes is not None:
        levels.append(Level("host", host_bytes, host))
    if cluster.storage is not None:
        levels.append(Level("storage", cluster.storage.capacity_bytes, cluster.storage.bytes_per_s))
    return Summary(
        name=cluster.name,
        chip=chip.name,
        n_devices=n,
        nodes=cluster.nodes,
        devices_per_node=node.devices_per_node,
        racks=_racks(cluster),
        peak_flops={dtype: rate * n for dtype, rate in chip.peak_flops.items()},
        levels=tuple(levels),
        device_power_w=None if chip.tdp_w is None else chip.tdp_w * n,
        power_w=None if node.power_w is None else node.power_w * cluster.nodes,
    )


def _racks(cluster: Cluster) -> float | None:
    if cluster.node.racks is not None:
        return cluster.node.racks * cluster.nodes
    if cluster.fabric is not None and cluster.fabric.kind != "rails":
        return -(-cluster.n_devices // cluster.fabric.rack_devices)
    return None
