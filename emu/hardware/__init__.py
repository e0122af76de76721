"""What exists: chips, links, nodes and clusters, with a source on every number."""

from .chips import Chip
from .clusters import Cluster, Fabric, Host, Node, Storage
from .constants import Constant, fitted, with_constants
from .errors import HardwareError
from .links import HostLink, Link, Protocol
from .presets import chip, chip_names, cluster, cluster_names, smallest_cluster
from .similar import Workload
from .summary import Summary
from .topology import Topology
from .wires import Wire

__all__ = [
    "Chip",
    "Cluster",
    "Constant",
    "Fabric",
    "HardwareError",
    "Host",
    "HostLink",
    "Link",
    "Node",
    "Protocol",
    "Storage",
    "Summary",
    "Topology",
    "Wire",
    "Workload",
    "chip",
    "chip_names",
    "cluster",
    "cluster_names",
    "fitted",
    "smallest_cluster",
    "with_constants",
]
