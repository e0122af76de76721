"""A user's cluster from a TOML file: all of it is checked, and every complaint names file, line, field and value.

    name = "my-cluster"                  # optional; else the file's name
    like = "llama3-24576"                # a cluster described as a whole that gives what is not said here; or
    chip = "h100"                        # a preset chip, whose nodes do; or a table of one's own:
    nodes = 4                            # optional, 1
    n_devices = 32                       # optional: if given, must agree

    [chip]
    like = "h100"                        # optional: a preset that gives what is not said here
    name = "my-chip"
    hbm_bytes = "80GiB"                  # a number of bytes, or text with a unit
    hbm_bytes_per_s = 3.35e12
    hbm_fraction = 0.84
    kernel_s = 2e-6
    peak_flops = { bfloat16 = 989e12, float32 = 67e12 }
    achievable_flops = { bfloat16 = 794e12 }        # optional, like l2_bytes, sm_count, sm_bytes, register_bytes, tdp_w,
                                                    # year, vector_flops, calibrated_*, and what prices of kernels ask
                                                    # for: see emu.hardware.chips.Chip
    sources = { default = "my data sheet" }         # optional in every table; else "given in" the file

    [node]
    devices_per_node = 8
    [node.scale_up]                      # and [scale_out]
    bandwidth_bytes_per_s = 450e9
    achievable_fraction = 0.8
    latency_s = 3.4e-6                   # a step; optional: name, base_s, tree_latency_s, protocols, in_switch_*,
                                         # launch_s, fill_s, fill_bytes, calibrated_bytes_per_s
    [node.host_link]                     # optional: what copies to host memory and back take, one at a time a direction
    bandwidth_bytes_per_s = 63e9
    achievable_fraction = 0.84
    latency_s = 6e-6                     # of a copy; optional: name, calibrated_bytes_per_s

    [node.shape]                         # optional, as are node.ports, host_bytes, racks and power_w
    kind = "torus"                       # one of emu.hardware.topology
    sizes = [4, 2]                       # optional: lanes = [1, 2]

    [host]
    launch_s = 7e-6                      # optional: compiled_launch_s, graph_launch_s

    [fabric]                             # optional
    rack_devices = 16
    pod_devices = 3072
    oversubscription = 7
    kind = "fat tree"                    # optional, or "rails"

    [storage]                            # optional
    capacity_bytes = 240e15
    bytes_per_s = 2e12                   # optional: name, peak_bytes_per_s

What cannot be is refused: what is missing, of another kind, negative or endless (emu.hardware.complaints); numbers that no
unit explains (emu.hardware.plausible); numbers that contradict each other (emu.hardware.contradictions).

What a table does not say comes from the preset. A chip of one's own (a table without `like`) has no
preset: the file must then describe node, both links and host itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .build import (
    build_chip,
    build_fabric,
    build_host,
    build_link,
    build_node,
    build_storage,
    numbers,
)
from .clusters import Cluster
from .complaints import check_sources, explain
from .contradictions import CONTRADICTIONS
from .errors import HardwareError
from .packaged import parse_toml
from .places import File
from .plausible import check_plausible
from .schema import ClusterTable
from .underlying import tables_under

MOST_LEVELS = 16  # of tables in tables: a cluster has four; chosen
_TABLES = ("chip", "node", "scale_up", "host_link", "scale_out", "host", "fabric", "storage")


def load_cluster(path: str | PathLike[str]) -> Cluster:
    """The cluster that a file describes. Raises HardwareError for what is missing, unknown or impossible in it."""
    file = _read(fspath(path))
    given = _parse(file)
    given.setdefault("name", Path(file.path).stem)
    check_sources(given, file)
    base = tables_under(given, file)
    merged = _merge(base, given)
    try:
        table = ClusterTable.model_validate(merged)
    except ValidationError as e:
        raise explain(e, file) from None
    check_plausible(table.model_dump(exclude_none=True, by_alias=True), file)
    for contradiction in CONTRADICTIONS:
        contradiction(table, file)
    # Sources are worked out after checking, so that they need not doubt what they read.
    return _build(
        _with_sources(table.model_dump(exclude_none=True, by_alias=True), given, base, f"given in {file.path}")
    )


def _read(path: str) -> File:
    if Path(path).exists() and not Path(path).is_file():  # who reads a pipe or a device waits, perhaps for ever
        raise HardwareError("cannot be read: it is no ordinary file.", "Give a TOML file in UTF-8.", file=path)
    try:
        # Some editors begin a file with a mark that says UTF-8, which TOML does not know.
        return File(path, Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise HardwareError(
            "there is no such file.", "Check the path; it is relative to where you are.", file=path
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise HardwareError(f"cannot be read ({e}).", "It must be a TOML file in UTF-8.", file=path) from None


def _parse(file: File) -> dict[str, Any]:
    try:
        found = parse_toml(file.text)
        if _is_deep(found, MOST_LEVELS):
            raise RecursionError
        return found
    except RecursionError:
        raise HardwareError("is nested too deeply.", "Write each table by its own [name].", file=file.path) from None
    except ValueError as e:  # TOMLDecodeError is one, in tomllib and tomli alike
        raise HardwareError(
            f"is not valid TOML: {e}.",
            "Each name and each [table] may stand once: take one of them away, or join them."
            if re.search("overwrite|twice|redefine|already", str(e), re.IGNORECASE)
            else 'A line is name = value or [table]; text stands in "quotes".',
            file=file.path,
            line=file.line_in_message(str(e)),
        ) from None


def _is_deep(value: Any, most: int) -> bool:
    """Whether there are more tables and lists in each other than so many."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(v, most - 1) for v in inner)


def _merge(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `base`, table by table."""
    merged = dict(base)
    if any(key in given for key in ("latency_s", "base_s", "tree_latency_s")):
        merged.pop("protocols", None)  # a preset's protocols would contradict latencies of one's own
    if "peak_flops" in given:
        # What was measured on the preset, or its other unit reaches, says nothing of another peak.
        merged.pop("achievable_flops", None)
        merged.pop("vector_flops", None)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        whole = key in ("sources", "shape")  # sizes of one's own do not go with a preset's kind
        merged[key] = _merge(merged[key], value) if both and not whole else value
    return merged


def _with_sources(
    table: dict[str, Any], given: Mapping[str, Any], base: Mapping[str, Any], file: str
) -> dict[str, Any]:
    """Each table with a source by name for every number: the file's, or the preset's where the file says nothing."""
    done = {}
    for key, value in table.items():
        if isinstance(value, dict) and key in _TABLES:
            done[key] = _with_sources(value, given.get(key, {}), base.get(key, {}), file)
        else:
            done[key] = value
    own, preset = numbers(given), numbers(base)
    said, known = given.get("sources", {}), base.get("sources", {})
    done["sources"] = {
        name: _look_up(said, name) or file
        if name in own or _text_size(given, name)
        else _look_up(known, name) or "unverified"
        if name in preset
        else f"assumed: not {file}"
        for name in numbers(done)
    }
    return done


def _look_up(sources: Mapping[str, str], name: str) -> str | None:
    return sources.get(name) or sources.get(name.split(".")[0]) or sources.get("default")


def _text_size(given: Mapping[str, Any], name: str) -> bool:
    """Whether a number was given as text with a unit, "80GiB"."""
    return isinstance(given.get(name), str)


def _build(table: dict[str, Any]) -> Cluster:
    return Cluster(
        name=table["name"],
        chip=build_chip(table["chip"]),
        node=build_node(table["node"]),
        nodes=table["nodes"],
        scale_out=build_link(table["scale_out"]),
        host=build_host(table["host"]),
        fabric=build_fabric(table["fabric"]) if "fabric" in table else None,
        storage=build_storage(table["storage"]) if "storage" in table else None,
    )
