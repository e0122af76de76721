"""What a preset gives under a cluster file's own tables, without what the file's own makes untrue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .build import part_of_node
from .errors import HardwareError, unknown
from .places import File, in_words
from .presets import chip_names, cluster_names, described_parts, preset_parts, preset_tables, short_name
from .switched import KINDS as SWITCHED


def tables_under(given: dict[str, Any], file: File) -> dict[str, Any]:
    """The preset tables that a file stands on, none if it describes everything itself.

    Removes the references to presets (`like`, and `chip` by name) from `given`. Raises HardwareError for an unknown one.
    """
    like = given.pop("like", None)
    base = _of_chip(given, file) if like is None else _of_cluster(like, given, file)
    return _fitting(_resized(base, given.get("node")), given)


def _of_cluster(like: Any, given: dict[str, Any], file: File) -> dict[str, Any]:
    """The tables of a cluster described as a whole: like = "llama3-24576"."""
    described = preset_tables("clusters").get(like) if isinstance(like, str) else None
    if described is None:
        hint = unknown("cluster", str(like), cluster_names()).hint
        if like in chip_names():
            hint = f'It is a chip: say chip = "{like}".'
        raise file.error("like", f"like = {in_words(like)} is not a cluster that emu describes.", hint, like)
    chip = given.get("chip")
    if isinstance(chip, str) or (isinstance(chip, Mapping) and "like" in chip):
        field, value = ("chip", chip) if isinstance(chip, str) else ("chip.like", chip["like"])
        message = f"{field} = {in_words(value)} names a preset, and so does {file.said('like', like)}."
        hint = (
            f'A cluster like it is of "{described["chip"]}": take one of them away, or give numbers in a table [chip].'
        )
        raise file.error(field, message, hint, value)
    given.setdefault("chip", {})
    nodes = {"nodes": described["nodes"]} if "nodes" in described else {}
    sources = {"sources": described["sources"]} if nodes else {}
    return {"chip": preset_tables("chips")[described["chip"]], **described_parts(like), **nodes, **sources}


def _of_chip(given: dict[str, Any], file: File) -> dict[str, Any]:
    """The tables of a chip and its nodes: chip = "h100", or like = "h100" in [chip]."""
    chip = given.get("chip")
    field = "chip"
    if isinstance(chip, Mapping):
        given["chip"] = {key: value for key, value in chip.items() if key != "like"}
        field, chip = "chip.like", chip.get("like")
    elif isinstance(chip, str):
        given["chip"] = {}
    if chip is None:
        return {}
    try:
        short = short_name(chip)
    except (HardwareError, AttributeError) as e:
        hint = getattr(e, "hint", 'Give a name in quotes, e.g. "h100".')
        described = preset_tables("clusters").get(chip) if isinstance(chip, str) else None
        if described is not None:
            hint = f'It is a cluster: say like = "{chip}" instead, above all tables.'
        raise HardwareError(
            f"{field} = {in_words(chip)} is not a chip that emu knows.",
            f"{hint} Or describe it yourself in a table [chip].",
            file=file.path,
            line=file.line_of(field),
            field=field,
            value=chip,
        ) from None
    return {"chip": preset_tables("chips")[short], **preset_parts(short)}


def _resized(base: dict[str, Any], node: Any) -> dict[str, Any]:
    """The preset tables with what belongs to the preset's whole node left out, if the file says another size."""
    devices = node.get("devices_per_node") if isinstance(node, Mapping) else None
    if "node" not in base or not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        return base  # nothing to resize, or for the checks to complain of
    return {**base, "node": part_of_node(base["node"], devices)}


def _fitting(base: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset tables without what the file's own shape or launches make untrue, for the file to say anew."""
    node, host = given.get("node"), given.get("host")
    shape = node.get("shape") if isinstance(node, Mapping) else None
    if "node" in base and isinstance(shape, Mapping):
        # Lanes of the preset's direct wires are lanes of any other shape that has no more; a switch's one lane is not.
        switched = base["node"].get("shape", {}).get("kind") in SWITCHED
        dropped = ("topology", "ports") if switched else ("topology",)
        base = {**base, "node": {key: value for key, value in base["node"].items() if key not in dropped}}
        if shape.get("kind") not in SWITCHED:  # no switch that sums
            up = {k: v for k, v in base["node"]["scale_up"].items() if not k.startswith("in_switch_")}
            base["node"]["scale_up"] = up
    launch = host.get("launch_s") if isinstance(host, Mapping) else None
    if "host" in base and isinstance(launch, (int, float)) and launch < base["host"]["compiled_launch_s"]:
        base = {**base, "host": {k: v for k, v in base["host"].items() if k != "compiled_launch_s"}}
    return base
