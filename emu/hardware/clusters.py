"""Devices in nodes, nodes in a fabric: what exists, and which link two devices meet on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from .chips import Chip
from .errors import HardwareError
from .links import HostLink, Link
from .network import network_of, path_between
from .summary import Summary, summarise
from .topology import Topology
from .wires import Wire


@dataclass(frozen=True)
class Node:
    """Devices that share the fast links. A domain of 72 GPUs or a whole TPU torus counts as one node.

    Args:
        devices_per_node: how many.
        scale_up: the link of each device to the others of its node.
        topology: in words, e.g. "NVSwitch".
        host_link: the link of each device to the host's memory, which carries both directions at once; None where no
            figure is known.
        shape: the wires between its devices; None where they are not known (a part of a torus, say).
        ports: lanes that a device's bandwidth is shared among; None for those of the shape. More than the shape's in a
            node that is a part of a larger one: a device of four in a full mesh of eight still has seven.
        host_bytes: the host's memory, of the whole node; racks: how many racks it fills; power_w: what it draws with
            host, fans and its own switches. Each None where no figure is known.
        sources: field name to where its number was read.
    """

    devices_per_node: int
    scale_up: Link
    topology: str = ""
    host_link: HostLink | None = None
    shape: Topology | None = None
    ports: int | None = None
    host_bytes: float | None = None
    racks: float | None = None
    power_w: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    @property
    def lane_bytes_per_s(self) -> float | None:
        """Bytes/s of one lane of the shape in one direction, by the data sheet; None without a shape."""
        return self.shape and self.scale_up.bandwidth_bytes_per_s / (self.ports or self.shape.ports)


@dataclass(frozen=True)
class Storage:
    """Where data and checkpoints lie, shared by the whole cluster.

    Args:
        name: e.g. "Tectonic".
        capacity_bytes: what it holds.
        bytes_per_s: what it sustains, all devices together; peak_bytes_per_s: what it reaches, None if not known.
        sources: field name to where its number was read.
    """

    name: str
    capacity_bytes: float
    bytes_per_s: float
    peak_bytes_per_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True)
class Host:
    """What the processor pays to set kernels going.

    Args:
        launch_s: host time to launch one kernel from eager PyTorch.
        compiled_launch_s: the same from torch.compile's generated code.
        graph_launch_s: host time to launch one captured CUDA graph, however many kernels it holds.
        source, sources: where launch_s was read; the same for every number.
    """

    launch_s: float
    compiled_launch_s: float
    graph_launch_s: float
    source: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True)
class Fabric:
    """The levels above the node: bandwidth is full up to a pod, and shared above it.

    Args:
        rack_devices, pod_devices: devices under one rack switch, and under full bisection bandwidth.
        oversubscription: 7 means that all devices of a pod sending out at once get a seventh each.
        kind: "fat tree", whose rack switches join neighbours; or "rails", where a pod has one switch for each device's
            place in its node.
        sources: field name to where its number was read.
    """

    rack_devices: int
    pod_devices: int
    oversubscription: float
    kind: str = "fat tree"
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of one chip. Devices are numbered node by node from 0.

    Args:
        name: e.g. "h100-8".
        chip, node, nodes: what a device is, what a node is, how many nodes.
        scale_out: the link of each device (its NIC) to other nodes.
        host: what a launch costs.
        fabric: levels above the node, None for a flat one.
        storage: None where no figure is known.
    """

    name: str
    chip: Chip
    node: Node
    nodes: int
    scale_out: Link
    host: Host
    fabric: Fabric | None = None
    storage: Storage | None = None

    @property
    def n_devices(self) -> int:
        """Devices in the whole cluster."""
        return self.nodes * self.node.devices_per_node

    def node_of(self, device: int) -> int:
        """The node that holds a device."""
        if not 0 <= device < self.n_devices:
            raise HardwareError(
                f"{self.name} has no device {device}: it has {self.n_devices}, numbered from 0.",
                f"Give it {max(device, 0) // self.node.devices_per_node + 1} nodes, or name a device that exists.",
                field="device",
                value=device,
            )
        return device // self.node.devices_per_node

    def crosses_nodes(self, members: Iterable[int]) -> bool:
        """Whether these devices lie in more than one node."""
        return len({self.node_of(m) for m in members}) > 1

    def link(self, members: Iterable[int]) -> Link:
        """The slowest link that a ring over these devices crosses: scale_up inside one node, else scale_out."""
        return self.scale_out if self.crosses_nodes(members) else self.node.scale_up

    def ring_bytes_per_s(self, members: Iterable[int]) -> float:
        """Achievable bytes/s per direction of a ring over these devices.

        Across nodes every member brings its own NIC and rings run side by side, as NCCL's channels do. So the node
        with the fewest members sets the bandwidth, up to the scale-up link's own.
        """
        per_node: dict[int, int] = {}
        for m in members:
            per_node[self.node_of(m)] = per_node.get(self.node_of(m), 0) + 1
        if len(per_node) <= 1:
            return self.node.scale_up.bytes_per_s
        nics = min(per_node.values())
        out = nics * self.scale_out.bytes_per_s
        return out if nics == 1 else min(out, self.node.scale_up.bytes_per_s)

    @property
    def network(self) -> Topology:
        """The wires between the devices' NICs: by the fabric, or one switch for all if there is none.

        A pod that is only partly used counts as whole, so the network may join more devices than there are.
        """
        return network_of(self)

    def path(self, source: int, target: int) -> tuple[tuple[str, Wire], ...]:
        """The wires that a message takes between two devices, each with its level, "scale_up" or "scale_out".

        Wires of "scale_up" are between the places of the devices in their node, those of "scale_out" between devices of
        the network. On rails a message first goes to the device of its own node on the target's rail, as NCCL sends it.
        Raises HardwareError for a device that does not exist, and in a node whose shape is not known.
        """
        return path_between(self, source, target)

    @property
    def sources(self) -> dict[str, str]:
        """Dotted field name, e.g. "node.scale_up.latency_s", to where its number was read."""
        parts: list[tuple[str, Any]] = [
            ("chip", self.chip),
            ("node", self.node),
            ("node.scale_up", self.node.scale_up),
            ("scale_out", self.scale_out),
            ("host", self.host),
        ]
        if self.node.host_link is not None:
            parts.append(("node.host_link", self.node.host_link))
        if self.fabric is not None:
            parts.append(("fabric", self.fabric))
        if self.storage is not None:
            parts.append(("storage", self.storage))
        return {f"{prefix}.{name}": source for prefix, part in parts for name, source in part.sources.items()}

    def similar(self, model: Any, to: Any, communication: str = "gradients") -> Cluster:
        """This cluster made as small as `model` is against `to`; see emu.hardware.similar for the law.

        Args:
            model, to: anything with n_params, width and tokens (per device per micro-batch), e.g. two Workloads.
            communication: which traffic keeps its ratio to compute where not both can: "gradients" or "activations".
        """
        from .similar import scale_between, scaled_cluster

        return scaled_cluster(self, scale_between(model, to, communication))

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Cluster:
        """A cluster described in a file, of a preset chip or of its own; see emu.hardware.loading for its fields.

        Raises HardwareError naming file, line, field and value for what is missing, unknown or impossible.
        """
        from .loading import load_cluster

        return load_cluster(path)

    def summary(self) -> Summary:
        """The data centre as one computer: its totals, which print themselves as a table."""
        return summarise(self)

    def __str__(self) -> str:
        plural = "s" if self.nodes != 1 else ""
        out = f", then {self.scale_out}" if self.nodes > 1 else ""
        return (
            f"{self.name}: {self.n_devices} devices, {self.nodes} node{plural} of {self.node.devices_per_node}\n"
            f"  {self.chip}\n  {self.node.scale_up}{out}"
        )
