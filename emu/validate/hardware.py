"""From the words of a published row to a cluster: which chip, how many nodes, which network (data/hardware.toml)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from emu.hardware import Chip, Cluster, HardwareError, Link, chip_names, cluster, smallest_cluster
from emu.hardware.build import build_link
from emu.hardware.packaged import parse_toml
from emu.hardware.presets import preset_tables

BITS = 8  # of a byte
MOST_DEVICES = 2**20  # placements of larger groups take long, and no cluster is larger


@dataclass(frozen=True)
class Machine:
    """What a run had.

    Args:
        cluster: with as many devices as the run, or the fewest whole nodes that hold it.
        power_w: limit of one device where it is not the chip's own, else None.
        assumed: what the text does not say, and is taken to be.
    """

    cluster: Cluster
    power_w: float | None = None
    assumed: tuple[str, ...] = ()


@cache
def machine(text: str | None, n_devices: int, source: str = "") -> Machine:
    """The cluster that a row's text means.

    Args:
        text: the row's `hardware`, e.g. "A100 80GB (Selene, 8xHDR200)".
        n_devices: of the run.
        source: the title of the row's source, for networks that it states elsewhere.

    Raises:
        HardwareError: no chip, or more than one, is named that emu knows; with the nearest names.
    """
    if not text:
        raise HardwareError("the hardware is not stated.", "Say it, e.g. hardware = H100 80GB.", field="hardware")
    if n_devices > MOST_DEVICES:
        raise HardwareError(
            f"{n_devices} devices are more than emu places.", f"It places up to {MOST_DEVICES}.", field="n_gpus"
        )
    rule = _first("chips", text, source) or {"chip": _named(text)}
    built, assumed = _sized(rule, n_devices)
    network = _first("networks", text, source)
    if network is not None:
        built = replace(built, scale_out=_network(built, network))
    elif built.nodes > 1:
        assumed.append(f"network: {built.scale_out.bandwidth_bytes_per_s * BITS / 1e9:.0f} Gb/s a device")
    return Machine(built, rule.get("power_w"), tuple(assumed))


def chip_in(text: str) -> str:
    """The short name of the chip that a text names, by the same rules. Raises HardwareError, as `machine`."""
    rule = _first("chips", text, "") or {"chip": _named(text)}
    return rule.get("chip") or preset_tables("clusters")[rule["cluster"]]["chip"]


def _first(table: str, text: str, source: str) -> Mapping[str, Any] | None:
    for rule in _rules()[table]:
        of_source = "sources" not in rule or re.search(rule["sources"], source, re.IGNORECASE)
        if of_source and re.search(rule["found"], text, re.IGNORECASE):
            return rule
    return None


@cache
def _rules() -> Mapping[str, Any]:
    return parse_toml((files("emu.validate") / "data" / "hardware.toml").read_text(encoding="utf-8"))


def _named(text: str) -> str:
    """The chip whose name stands in a text, whatever stands between the name's letters and digits."""
    found, left = [], text
    for name in sorted(chip_names(), key=lambda name: -len(name)):
        before, left = left, _name_pattern(name).sub("|", left)  # "A100" within "A100 40GB" does not count again
        if left != before:
            found.append(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise HardwareError(
            f'"{text:.80}" names more than one chip: {", ".join(found)}.',
            "A row has one kind of device: say which.",
            field="hardware",
            value=text,
        )
    near = _nearest(text)
    raise HardwareError(
        f'"{text:.80}" names no chip that emu knows.',
        f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(chip_names())}.",
        field="hardware",
        value=text,
    )


@cache
def _name_pattern(name: str) -> re.Pattern[str]:
    """A chip's name as a word of its own, after a count if there is one: "8xH100", "MI 300X"; not GH100 or H1000."""
    letters = r"[\s_-]*".join(re.escape(letter) for letter in name if letter.isalnum())
    return re.compile(rf"(?:(?<![a-z0-9])|(?<=\dx)){letters}(?![0-9])", re.IGNORECASE)


def _nearest(text: str) -> list[str]:
    words = [word.lower() for word in re.findall(r"[\w-]+", text[:400])]
    scored = {
        name: max((difflib.SequenceMatcher(None, word, name).ratio() for word in words), default=0.0)
        for name in chip_names()
    }
    return [name for name, score in sorted(scored.items(), key=lambda item: -item[1]) if score >= 0.6][:3]


def _sized(rule: Mapping[str, Any], n_devices: int) -> tuple[Cluster, list[str]]:
    """A cluster of this many devices, or of the fewest whole nodes that hold them."""
    if "cluster" in rule:
        per_node = cluster(rule["cluster"]).node.devices_per_node
        built = cluster(rule["cluster"], nodes=-(-n_devices // per_node))
    else:
        per_node = preset_tables("nodes")[rule["chip"]]["devices_per_node"]
        fits = n_devices < per_node or n_devices % per_node == 0
        built = cluster(f"{rule['chip']}-{n_devices}") if fits else smallest_cluster(n_devices, rule["chip"])
    assumed = [] if built.n_devices == n_devices else [f"{n_devices} devices on {built.nodes} nodes of {per_node}"]
    own = {key: rule[key] for key in ("hbm_bytes", "hbm_bytes_per_s") if key in rule}
    if own:
        built = replace(built, chip=_other(built.chip, own, rule["source"]))
    if "scale_up_bytes_per_s" in rule:
        link = _faster_or_slower(built.node.scale_up, rule["scale_up_bytes_per_s"], rule["source"])
        built = replace(built, node=replace(built.node, scale_up=link))
    return built, assumed


def _other(chip: Chip, own: dict[str, float], source: str) -> Chip:
    own = {key: int(value) if key == "hbm_bytes" else value for key, value in own.items()}
    return replace(chip, **own, sources={**chip.sources, **dict.fromkeys(own, source)})


def _faster_or_slower(link: Link, bytes_per_s: float, source: str) -> Link:
    sources = {**link.sources, "bandwidth_bytes_per_s": source}
    return replace(link, bandwidth_bytes_per_s=bytes_per_s, source=source, sources=sources)


def _network(built: Cluster, rule: Mapping[str, Any]) -> Link:
    per_device = rule.get("device_bits_per_s") or rule["node_bits_per_s"] / built.node.devices_per_node
    bytes_per_s, link = per_device / BITS, built.scale_out
    if "link" in rule:
        table = {**preset_tables("links")[rule["link"]], "bandwidth_bytes_per_s": bytes_per_s}
        link = build_link(table)
    return _faster_or_slower(link, bytes_per_s, rule["source"])
