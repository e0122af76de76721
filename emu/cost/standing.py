"""One rank may stand for others that do the same at the same time; how many, and on what kind of cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emu.hardware import Cluster
from emu.spmd import EmuError


@dataclass(frozen=True)
class Standing:
    """For how many ranks each rank of a record stands.

    Args:
        counts: rank -> how many, itself among them; all ranks of the mesh together.
        levels: see `levels_of`: of the cluster for which they were found to be alike.
    """

    counts: Mapping[int, int]
    levels: tuple[int, ...]

    def holds_on(self, cluster: Cluster) -> bool:
        """Whether it is sure that they are in time on a cluster, too: their groups lie in its nodes as they did."""
        return all(n == 1 for n in self.counts.values()) or levels_of(cluster) == self.levels

    def error(self, what: str, cluster: Cluster) -> EmuError:
        """Why a cluster is refused.

        Args:
            what: the run, in words.
        """
        return EmuError(
            f"{what} is of {len(self.counts)} ranks that stand for all {sum(self.counts.values()):,}; on {cluster.name} "
            "groups of ranks lie in nodes, racks and pods of other sizes, so that these may not be in time with them",
            f"simulate it on {cluster.name}; what is simulated with all_ranks=True can be priced anywhere",
        )


def levels_of(cluster: Cluster) -> tuple[int, ...]:
    """How many devices share a node, a rack and a pod: by these, ranks that do the same may differ in time."""
    fabric = cluster.fabric
    return cluster.node.devices_per_node, *((fabric.rack_devices, fabric.pod_devices) if fabric else ())
