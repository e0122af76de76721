"""Which ranks do the same, so that one may stand for all of them: groups know the others, and take them to be in time.

Along dp every rank does the same where all have as many rows and as large shards. Along tp it does where every cut is even.
Along pp stages differ, and along cp ranks attend to different pairs; experts get different tokens. Ranks that do the
same also take the same time only where each of their groups lies in nodes, racks and pods as those of the others do.
What follows from the plan alone is looked up before anything runs; what from the model, by the ranks that run.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from emu.hardware import Cluster
from emu.parallel import Plan, mesh_of
from emu.spmd import EmuError, Shard, Slices

MERGED = ("dp", "tp")


class NotAlike(EmuError):
    """Ranks along an axis do different things after all. Fields: axis."""


def alike_axes(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The axes along which, as far as plan and cluster tell, all ranks do the same, at the same time."""
    axes = plan.axes()
    found = []
    if axes.get("dp", 1) > 1 and not plan.global_batch % axes["dp"]:
        found.append("dp")
    if axes.get("tp", 1) > 1 and not plan.seq % (axes["tp"] * 2 * axes.get("cp", 1)):
        found.append("tp")
    if plan.ep * plan.etp > 1 or (plan.replicate > 1 and axes.get("cp", 1) > 1) or not nested(plan, cluster):
        return ()
    return tuple(found)


def nested(plan: Plan, cluster: Cluster) -> bool:
    """Whether boxes of the mesh fill nodes, racks and pods, so that groups that are alike lie alike in them."""
    sizes = [(size // plan.replicate if axis == "dp" else size) for axis, size in plan.axes().items()]
    if plan.replicate > 1:  # groups of neighbours along dp, and such groups
        at = list(plan.axes()).index("dp")
        sizes.insert(at, plan.replicate)
    fabric = cluster.fabric
    levels = [cluster.node.devices_per_node, *((fabric.rack_devices, fabric.pod_devices) if fabric else ())]
    return all(_fills(sizes, level) for level in levels)


def _fills(sizes: list[int], level: int) -> bool:
    """Whether boxes of so many neighbouring devices are made of whole rows along the mesh's inner axes."""
    inner = 1
    for place, size in reversed(list(enumerate(sizes))):
        outer_too = inner * size
        if level <= outer_too or not place:
            outermost = all(n == 1 for n in sizes[:place])
            return level >= outer_too or (not level % inner and (outermost or not outer_too % level))
        inner = outer_too
    return True


def representatives(plan: Plan, alike: tuple[str, ...]) -> list[int]:
    """The ranks that run: of every axis along which all do the same, the first; of others, all."""
    mesh = mesh_of(plan)
    ranges = [range(1 if axis in alike else size) for axis, size in mesh.axes.items()]
    return sorted(mesh.rank_at(dict(zip(mesh.axes, at))) for at in product(*ranges))


def check_alike(dist: Any, axes: tuple[str, ...]) -> None:
    """Raises NotAlike where a rank sees that others hold more or less of the model than it does.

    Args:
        dist: the distributed model on this rank.
        axes: those along which all are taken to do the same.
    """
    if axes and any(shards.place.stage and len(set(shards.flat.cuts)) > 1 for shards in dist.vectors):
        raise NotAlike("shards differ in size", f"run all ranks along {axes[0]}", axis=axes[0])
    if "tp" not in axes or dist.sharding is None:
        return
    ranks = dist.rank.mesh.axes["tp"]
    for name, held in dist.sharding.held.items():
        placed = held.layout["tp"]
        if isinstance(placed, Shard) and dist.sharding.shapes[name][placed.dim] % ranks:
            raise NotAlike(f"{name} is not cut evenly", "run all ranks along tp", axis="tp")
        if isinstance(placed, Slices):
            ranges = [part for parts in placed.ranges for part in parts]
            lengths = {tuple(stop - start for start, stop in parts) for parts in placed.ranges}
            if len(lengths) > 1 or len(set(ranges)) < len(ranges):
                raise NotAlike(f"{name} is not cut evenly", "run all ranks along tp", axis="tp")
        if held.kind == "experts":
            raise NotAlike(f"{name} is an expert's", "run all ranks along tp", axis="tp")
