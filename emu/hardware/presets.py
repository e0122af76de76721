"""The hardware that comes with emu, by short name. Its numbers are in data/*.toml."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from .assumed import links_with_fitted, with_fitted
from .build import build_chip, build_fabric, build_host, build_link, build_node, build_storage, part_of_node
from .chips import Chip
from .clusters import Cluster, Fabric
from .errors import HardwareError, unknown
from .packaged import packaged

_NAME_AND_COUNT = re.compile(r"(?P<name>.+)-(?P<count>\d+)")


@cache
def preset_tables(file: str) -> dict[str, Any]:
    """A packaged TOML file as plain tables: "chips", "links", "nodes" or "clusters"; chips and links with their constants."""
    tables = packaged(file)
    return {"chips": with_fitted, "links": links_with_fitted}.get(file, dict)(tables)


def chip_names() -> tuple[str, ...]:
    """Short names of all chips, e.g. "h100"."""
    return tuple(preset_tables("chips"))


def cluster_names() -> tuple[str, ...]:
    """Names of all clusters described as a whole, e.g. "h100-16384"; any chip's name with "-N" is one too."""
    return tuple(preset_tables("clusters"))


@cache
def chip(name: str) -> Chip:
    """A chip by its short name ("h100") or its maker's ("H100-SXM-80GB"). Raises HardwareError with near matches."""
    return build_chip(preset_tables("chips")[short_name(name)])


def cluster(name: str, nodes: int | None = None) -> Cluster:
    """A cluster by name.

    >>> emu.cluster("h100", nodes=4).n_devices
    32

    Args:
        name: a chip's short name, "h100"; or with a number of devices, "h100-8", that is fewer than a node's or fills
            whole nodes; or a cluster described as a whole, "h100-16384", which is the one that trained Llama 3, or
            "dgx-1"; see cluster_names().
        nodes: how many nodes, one if neither the name nor this says.

    Raises HardwareError with near matches for an unknown name, or with the nearest possible numbers of devices.
    """
    if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1):
        raise HardwareError(
            f"nodes={nodes!r} is not a number of nodes.", "Give a whole number from 1.", field="nodes", value=nodes
        )
    return _cluster(name, nodes)


@cache
def _cluster(name: str, nodes: int | None) -> Cluster:
    described = preset_tables("clusters").get(name.lower())
    if described is not None and (nodes is None or "nodes" not in described):
        n = nodes or described.get("nodes", 1)
        return _described(name.lower() + (f" x {n}" if nodes and n > 1 else ""), described, n)
    try:
        short, count = short_name(name), None
    except HardwareError:
        match = _NAME_AND_COUNT.fullmatch(name)
        if match is None or not _is_known(match["name"]):
            raise
        short, count = short_name(match["name"]), int(match["count"])
    per_node = preset_tables("nodes")[short]["devices_per_node"]
    if count is None:
        n = nodes or 1
        return assemble(f"{short}-{n * per_node}", short, n)
    if nodes is not None:
        raise HardwareError(
            f"{name} already says {count} devices, and nodes={nodes} says {nodes * per_node}.",
            f'Say one of them: cluster("{short}", nodes={nodes}) or cluster("{name}").',
            field="nodes",
            value=nodes,
        )
    if count < 1 or (count > per_node and count % per_node):
        below = max(1, count // per_node * per_node)
        raise HardwareError(
            f"{name}: {count} devices do not fill whole {short} nodes of {per_node}.",
            f"Take {short}-{below} or {short}-{(count // per_node + 1) * per_node}.",
            field="name",
            value=name,
        )
    return assemble(f"{short}-{count}", short, max(1, count // per_node), devices=min(count, per_node))


def smallest_cluster(n_devices: int, chip: str = "h100") -> Cluster:
    """The fewest whole nodes of a chip that hold n_devices. Raises HardwareError unless n_devices is at least 1."""
    if n_devices < 1:
        raise HardwareError(
            f"A cluster for {n_devices} devices does not exist.",
            "Ask for at least 1.",
            field="n_devices",
            value=n_devices,
        )
    per_node = preset_tables("nodes")[short_name(chip)]["devices_per_node"]
    return cluster(chip, nodes=-(-n_devices // per_node))


def assemble(name: str, short: str, nodes: int, devices: int | None = None, fabric: Fabric | None = None) -> Cluster:
    """A cluster of preset nodes of the chip with this short name; `devices` makes its nodes smaller."""
    tables = preset_parts(short)
    return Cluster(
        name=name,
        chip=chip(short),
        node=build_node(part_of_node(tables["node"], devices or tables["node"]["devices_per_node"])),
        nodes=nodes,
        scale_out=build_link(tables["scale_out"]),
        host=build_host(tables["host"]),
        fabric=fabric,
    )


def described_parts(name: str) -> dict[str, Any]:
    """Tables of what surrounds the chip of a cluster described as a whole: as preset_parts, with what it says itself."""
    described = preset_tables("clusters")[name]
    parts = preset_parts(described["chip"])
    own = described.get("node", {})
    node = _overlay(part_of_node(parts["node"], own.get("devices_per_node", parts["node"]["devices_per_node"])), own)
    parts = {**parts, "node": node, "scale_out": _overlay(parts["scale_out"], described.get("scale_out", {}))}
    return parts | {key: described[key] for key in ("fabric", "storage") if key in described}


def _described(name: str, described: dict[str, Any], nodes: int) -> Cluster:
    parts = described_parts(name.split(" ")[0])
    return Cluster(
        name=name,
        chip=chip(described["chip"]),
        node=build_node(parts["node"]),
        nodes=nodes,
        scale_out=build_link(parts["scale_out"]),
        host=build_host(parts["host"]),
        fabric=build_fabric(parts["fabric"]) if "fabric" in parts else None,
        storage=build_storage(parts["storage"]) if "storage" in parts else None,
    )


def preset_parts(short: str) -> dict[str, Any]:
    """Tables of what surrounds a preset chip: "node" (with "scale_up" and "host_link"), "scale_out" and "host"."""
    node = dict(preset_tables("nodes")[short])
    links = preset_tables("links")
    for level in ("scale_up", "scale_out", "host_link"):
        if level in node:
            node[level] = _overlay(links[node[level]["link"]], node[level])
    return {"scale_out": node.pop("scale_out"), "node": node, "host": preset_tables("nodes")["host"]}


def _overlay(link: dict[str, Any], use: dict[str, Any]) -> dict[str, Any]:
    """A kind of link with the numbers that a node gives it."""
    own = {key: value for key, value in use.items() if key != "link"}
    return {**link, **own, "sources": {**link.get("sources", {}), **own.get("sources", {})}}


@cache
def _long_names() -> dict[str, str]:
    return {table["name"].lower(): short for short, table in preset_tables("chips").items()}


def _is_known(name: str) -> bool:
    return name.lower() in preset_tables("chips") or name.lower() in _long_names()


def short_name(name: str) -> str:
    """The short name of a chip given by either of its names. Raises HardwareError with near matches."""
    lower = name.lower()
    if lower in preset_tables("chips"):
        return lower
    if lower in _long_names():
        return _long_names()[lower]
    raise unknown("chip or cluster", name, [*chip_names(), *cluster_names()])
