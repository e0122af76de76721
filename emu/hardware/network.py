"""Which wires a message takes through a cluster: inside a node by the node's shape, between nodes by the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import HardwareError
from .topology import Topology
from .wires import Wire

if TYPE_CHECKING:
    from .clusters import Cluster


def network_of(cluster: Cluster) -> Topology:
    """The wires between the NICs of a cluster's devices; see Cluster.network."""
    fabric, n = cluster.fabric, cluster.n_devices
    if fabric is None:
        return Topology("switch", (n,))
    pods = -(-n // fabric.pod_devices)
    thin = float(fabric.oversubscription)
    if fabric.kind == "rails":
        per_node = cluster.node.devices_per_node
        return Topology("rails", (pods, fabric.pod_devices // per_node, per_node), oversubscription=(thin,))
    racks = fabric.pod_devices // fabric.rack_devices
    return Topology("fat tree", (pods, racks, fabric.rack_devices), oversubscription=(1.0, thin))


def path_between(cluster: Cluster, source: int, target: int) -> tuple[tuple[str, Wire], ...]:
    """The wires between two devices with their levels; see Cluster.path."""
    if source == target:
        return ()
    per_node, network = cluster.node.devices_per_node, network_of(cluster)
    if cluster.node_of(source) == cluster.node_of(target):
        return _inside(cluster, source % per_node, target % per_node)
    first: tuple[tuple[str, Wire], ...] = ()
    if network.kind == "rails":
        first = _inside(cluster, source % per_node, target % per_node)
        source += target % per_node - source % per_node
    return first + tuple(("scale_out", wire) for wire in network.path(source, target))


def _inside(cluster: Cluster, source: int, target: int) -> tuple[tuple[str, Wire], ...]:
    shape = cluster.node.shape
    if shape is None:
        raise HardwareError(
            f"{cluster.name}: the wires inside its nodes of {cluster.node.devices_per_node} are not known.",
            'Give the node a shape in a TOML file, e.g. [node.shape] with kind = "torus" and sizes = [4, 4, 4].',
            field="node.shape",
        )
    return tuple(("scale_up", wire) for wire in shape.path(source, target))
