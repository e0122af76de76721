"""What carries bytes between devices, and to hosts: bandwidth, and the time of a step that carries none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Protocol:
    """One way NCCL moves a message: less latency is paid for with less bandwidth. A collective takes the fastest.

    time of a collective = base_s + steps * latency_s + bytes on the busiest link / bandwidth, with
    bandwidth = min(fraction * ring bandwidth, cap_bytes_per_s). Source: NVIDIA/nccl src/graph/tuning.cc.

    Args:
        name: "LL", "LL128" or "Simple".
        base_s: paid once a collective, by its algorithm's first hop.
        latency_s: of one step of a ring over this link.
        tree_latency_s: of one step of a tree over this link.
        fraction: share of the Simple ring's bandwidth that it reaches.
        cap_bytes_per_s: bus bandwidth it never exceeds; None for no cap.
    """

    name: str
    base_s: float
    latency_s: float
    tree_latency_s: float
    fraction: float = 1.0
    cap_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Link:
    """One device's connection at one level of the cluster.

    Args:
        name: e.g. "NVLink 4".
        bandwidth_bytes_per_s: per direction per device, by the data sheet.
        achievable_fraction: share of it that a large ring collective reaches (bus bandwidth over bandwidth).
        latency_s: alpha, the time of one ring step that carries no bytes (protocol Simple).
        base_s: paid once a collective (protocol Simple).
        tree_latency_s: one step of a tree (protocol Simple).
        protocols: all of NCCL's protocols, fewest steps' latency first; () means Simple alone.
        in_switch_fraction: bus bandwidth over bandwidth of an all-reduce of eight devices that the switch sums (NVLS);
            may exceed 1, because each byte then crosses the link once, not twice. None where the switch cannot sum. Of
            a network card: of an all-reduce among nodes whose switches sum (NVLSTree).
        in_switch_latency_s: its fixed time, of a network card that of one step between nodes; None where the switch
            cannot sum.
        launch_s: what a collective costs beside NCCL's own time, as benchmarks from a framework see it; paid once a
            collective at each level that it crosses. None where none is known.
        fill_s, fill_bytes: what a message of S bytes loses while large messages' pipes fill (protocol Simple and
            in-switch sums): fill_s * S / (S + fill_bytes). None where nothing is known.
        fitted: families of the constants that it takes (emu.hardware.fitted).
        calibrated_bytes_per_s: bus bandwidth fitted to a machine at hand; None until calibrated.
        source, sources: where the link was described; field name to where its number was read.
    """

    name: str
    bandwidth_bytes_per_s: float
    achievable_fraction: float
    latency_s: float
    base_s: float
    tree_latency_s: float
    protocols: tuple[Protocol, ...] = ()
    in_switch_fraction: float | None = None
    in_switch_latency_s: float | None = None
    launch_s: float | None = None
    fill_s: float | None = None
    fill_bytes: float | None = None
    fitted: tuple[str, ...] = ()
    calibrated_bytes_per_s: float | None = None
    source: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s per direction that a large ring reaches: calibrated, else the achievable share of bandwidth."""
        return self.calibrated_bytes_per_s or self.bandwidth_bytes_per_s * self.achievable_fraction

    @property
    def simple(self) -> Protocol:
        """The protocol of large messages."""
        return Protocol("Simple", self.base_s, self.latency_s, self.tree_latency_s)

    def __str__(self) -> str:
        rate, step = self.bandwidth_bytes_per_s / 1e9, self.latency_s * 1e6
        return f"{self.name}: {rate:.4g} GB/s a direction, {step:.3g} us a step"


@dataclass(frozen=True)
class HostLink:
    """One device's link to the host's memory. It carries both directions at once; in each, one copy at a time.

    Args:
        name: e.g. "PCIe 5 x16".
        bandwidth_bytes_per_s: of one direction, by the standard.
        achievable_fraction: share of it that a large copy from or to pinned memory reaches.
        latency_s: of a copy without bytes.
        calibrated_bytes_per_s: fitted to a machine at hand; None until calibrated.
        sources: field name to where its number was read.
    """

    name: str
    bandwidth_bytes_per_s: float
    achievable_fraction: float
    latency_s: float
    calibrated_bytes_per_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s of one direction that a large copy reaches: calibrated, else the achievable share of bandwidth."""
        return self.calibrated_bytes_per_s or self.bandwidth_bytes_per_s * self.achievable_fraction
