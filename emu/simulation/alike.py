"""Which ranks do the same, so that one may stand for all of them: groups know the others, and take them to be in time.

Along dp ranks do the same that have as many rows and as large shards; along tp, if their pieces of every weight are as
large. Along pp stages differ, and along cp ranks attend to different pairs; experts get different tokens. Ranks that do
the same also take the same time only where each of their groups lies in nodes, racks and pods as those of the others do.
What follows from the plan alone is looked up before anything runs; what from the model, by the ranks that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise, product
from math import prod
from typing import Any

from emu.hardware import Cluster
from emu.parallel import Plan, mesh_of
from emu.spmd import EmuError, Mesh, Shard, Slices, split_sizes

Classes = Mapping[str, tuple[tuple[int, ...], ...]]  # of every axis, its places, those together that do the same


class NotAlike(EmuError):
    """Ranks along an axis do different things after all. Fields: classes, in which they are apart."""


def classes_of(plan: Plan, cluster: Cluster) -> Classes:
    """Which places along every axis do the same at the same time, as far as plan and cluster tell."""
    axes = plan.axes()
    classes = everyone(plan)
    if plan.ep * plan.etp > 1 or (plan.replicate > 1 and axes.get("cp", 1) > 1) or not nested(plan, cluster):
        return classes
    if "dp" in axes:
        classes["dp"] = apart((tuple(range(axes["dp"])),), split_sizes(plan.global_batch, axes["dp"]).__getitem__)
    if "tp" in axes and not plan.seq % (axes["tp"] * 2 * axes.get("cp", 1)):
        classes["tp"] = (tuple(range(axes["tp"])),)
    return classes


def everyone(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Every place by itself."""
    return {axis: tuple((place,) for place in range(size)) for axis, size in mesh_of(plan).axes.items()}


def apart(classes: tuple[tuple[int, ...], ...], told: Callable[[int], Any]) -> tuple[tuple[int, ...], ...]:
    """The same classes, with places apart of which something different is told."""
    finer: dict[Any, list[int]] = {}
    for number, places in enumerate(classes):
        for place in places:
            finer.setdefault((number, told(place)), []).append(place)
    return tuple(tuple(places) for places in finer.values())


def weights(mesh: Mesh, classes: Classes) -> dict[int, int]:
    """Rank -> how many ranks it stands for, itself among them: the first of every class along every axis runs."""
    return {
        mesh.rank_at({axis: places[0] for axis, places in zip(mesh.axes, some)}): prod(map(len, some))
        for some in product(*(classes[axis] for axis in mesh.axes))
    }


def nested(plan: Plan, cluster: Cluster) -> bool:
    """Whether boxes of the mesh fill nodes, racks and pods, so that groups that are alike lie alike in them."""
    sizes = [(size // plan.replicate if axis == "dp" else size) for axis, size in plan.axes().items()]
    if plan.replicate > 1 and "dp" in plan.axes():  # groups of neighbours along dp, and such groups
        sizes.insert(list(plan.axes()).index("dp"), plan.replicate)
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


def check_alike(dist: Any, classes: Classes) -> None:
    """Raises NotAlike where a rank sees that places which are taken to do the same hold more or less of the model.

    Args:
        dist: the distributed model on this rank.
    """
    for axis, held in (("dp", _shards), ("tp", _pieces)):
        given = classes.get(axis, ())
        if all(len(places) == 1 for places in given):
            continue
        finer = apart(given, held(dist, axis).__getitem__)
        if finer != given:
            raise NotAlike(
                f"ranks along {axis} hold different parts", "run one of each", classes={**classes, axis: finer}
            )


def _shards(dist: Any, axis: str) -> list[tuple[Any, ...]]:
    """At every place along an axis: how much is held there of every vector that is cut over ranks of several places."""
    mesh = dist.rank.mesh
    found: list[list[int]] = [[] for _ in range(mesh.axes[axis])]
    places_of: dict[tuple[int, ...], list[int]] = {}
    for shards in dist.vectors:
        members = shards.place.group.members
        if not shards.place.stage or len(set(shards.flat.cuts)) == 1:
            continue
        if members not in places_of:
            places_of[members] = [mesh.coords(member)[axis] for member in members]
        places = places_of[members]
        if len(set(places)) > 1:
            for place, cut in zip(places, shards.flat.cuts):
                found[place].append(cut)
    return [tuple(some) for some in found]


def _pieces(dist: Any, axis: str) -> list[tuple[Any, ...]]:
    """The same, and how large the piece of every parameter is that is held there: of tp."""
    ranks = dist.rank.mesh.axes[axis]
    sharding: Any = dist.sharding
    found: list[list[Any]] = [[some] for some in _shards(dist, axis)]
    for name, held in sharding.held.items() if sharding else ():
        placed = held.layout[axis]
        sizes: Any = [0] * ranks
        if held.kind == "experts":
            sizes = range(ranks)  # who get different tokens
        elif isinstance(placed, Shard):
            sizes = split_sizes(sharding.shapes[name][placed.dim], ranks)
        elif isinstance(placed, Slices):
            ranges = sorted(part for parts in placed.ranges for part in parts)
            # Of what several hold, one counts it.
            shared = any(end > start for (_, end), (start, _) in pairwise(ranges))
            sizes = range(ranks) if shared else [tuple(b - a for a, b in parts) for parts in placed.ranges]
        for place, size in zip(found, sizes):
            place.append(size)
    return [tuple(some) for some in found]
