"""Plain tables, as TOML gives them, to chips, links, nodes and clusters. Presets and users' files both end here.

A table may hold a table `sources`: a source for each of its numbers by name, and "default" for those it does not name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .chips import Chip
from .clusters import Fabric, Host, Node, Storage
from .links import HostLink, Link, Protocol
from .parts import part_of
from .topology import Topology

_OF_THE_WHOLE_NODE = ("host_bytes", "racks", "power_w")


def build_chip(table: Mapping[str, Any]) -> Chip:
    """A chip from its table."""
    values = _values(table)
    for name in ("hbm_bytes", "l2_bytes", "sm_bytes", "register_bytes"):
        if values.get(name) is not None:
            values[name] = int(values[name])
    values["fitted"] = tuple(values.get("fitted", ()))
    return Chip(**values, sources=_sources(table))


def build_link(table: Mapping[str, Any]) -> Link:
    """A link from its table."""
    values = _values(table)
    values["fitted"] = tuple(values.get("fitted", ()))
    values["protocols"] = tuple(Protocol(**_values(p)) for p in table.get("protocols", ()))
    sources = _sources(table)
    values.setdefault("source", sources.get("bandwidth_bytes_per_s") or next(iter(sources.values()), ""))
    return Link(**values, sources=sources)


def build_host(table: Mapping[str, Any]) -> Host:
    """A host from its table."""
    sources = _sources(table)
    return Host(**_values(table), source=sources.get("launch_s", ""), sources=sources)


def build_node(table: Mapping[str, Any]) -> Node:
    """A node from its table and those of its links and its shape."""
    own = {key: value for key, value in table.items() if key not in ("scale_up", "host_link")}
    host = table.get("host_link")
    host_link = None if host is None else HostLink(**_values(host), sources=_sources(host))
    shape = table.get("shape")
    return Node(
        devices_per_node=table["devices_per_node"],
        scale_up=build_link(table["scale_up"]),
        topology=table.get("topology", ""),
        host_link=host_link,
        shape=None if shape is None else build_shape(shape),
        **{name: table.get(name) for name in ("ports", *_OF_THE_WHOLE_NODE)},
        sources=_sources(own),
    )


def build_shape(table: Mapping[str, Any]) -> Topology:
    """A topology from its table. Raises HardwareError if there is none such."""
    return Topology(table["kind"], tuple(table["sizes"]), tuple(table.get("lanes", ())))


def part_of_node(table: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """A node's table with so many devices in place of its own: what belongs to the whole node alone falls away.

    Its shape is the part's (see emu.hardware.parts), whose lanes keep their bandwidth: so a device has the whole's ports.
    """
    part = {**table, "devices_per_node": devices}
    if devices == table["devices_per_node"]:
        return part
    shape = part.pop("shape", None)
    for name in _OF_THE_WHOLE_NODE:
        part.pop(name, None)
    if shape is None:
        return part
    whole = build_shape(shape)
    smaller = part_of(whole, devices)
    if smaller is None:
        return {**part, "topology": f"a part of {whole}, whose wires are not known"}
    part["shape"] = {"kind": smaller.kind, "sizes": list(smaller.sizes), "lanes": list(smaller.lanes)}
    part["ports"] = max(table.get("ports", 0), whole.ports, smaller.ports)
    sources = {"ports": "as in the whole node", **part.get("sources", {})}
    if smaller.kind not in ("switch", "full mesh"):
        part["topology"] = f"{smaller}, a part of {whole}"
        sources["shape"] = f"emu/hardware/parts.py: its first devices, or the most compact box of {whole}"
    part["sources"] = sources
    return part


def build_storage(table: Mapping[str, Any]) -> Storage:
    """The storage from its table."""
    return Storage(**_values(table), sources=_sources(table))


def build_fabric(table: Mapping[str, Any]) -> Fabric:
    """The levels above a node from their table."""
    return Fabric(**_values(table), sources=_sources(table))


def numbers(table: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a table by dotted name, e.g. "peak_flops.bfloat16"; of a list of tables, by the tables' names."""
    found: dict[str, float] = {}
    for key, value in table.items():
        if key == "sources":
            continue
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, Mapping):
                    found |= numbers(item, f"{prefix}{key}.{item['name']}.")
                elif isinstance(item, (int, float)):
                    found[f"{prefix}{key}.{i}"] = item
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{key}"] = value
    return found


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("sources", "protocols")}


def _sources(table: Mapping[str, Any]) -> dict[str, str]:
    given = table.get("sources", {})
    found = {}
    for name in numbers(table):
        source = given.get(name) or given.get(name.split(".")[0]) or given.get("default")
        if source:
            found[name] = source
    return found
