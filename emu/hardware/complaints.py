"""Complaints about a cluster file, written for who wrote the file: where, which field, which value, what to do."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .build import build_shape
from .errors import HardwareError
from .schema import ClusterTable

_HEADER = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")

# What a field of a given ending holds, most telling ending first.
_KINDS = (
    ("_bytes_per_s", "bytes per second, e.g. 450e9"),
    ("_bytes", 'bytes, e.g. 80e9 or "80GiB"'),
    ("_fraction", "a fraction, e.g. 0.8"),
    ("fraction", "a fraction, e.g. 0.8"),
    ("_s", "seconds, e.g. 3.4e-6"),
    ("_w", "watts"),
    ("year", "a year, e.g. 2022"),
    ("ports", "a whole number from 1"),
    ("racks", "a number of racks, e.g. 0.5"),
    ("kind", "text in quotes"),
    ("nodes", "a whole number from 1"),
    ("devices", "a whole number from 1"),
    ("_count", "a whole number from 1"),
    ("per_node", "a whole number from 1"),
    ("oversubscription", "a number from 1 (1 is none)"),
    ("name", "text in quotes"),
)


@dataclass(frozen=True)
class File:
    """A file's path and text, to find lines in."""

    path: str
    text: str

    def line_of(self, field: str) -> int | None:
        """The line, from 1, where a dotted field is set; else that of the nearest table or inline table around it."""
        best: tuple[int, int] | None = None  # (length of the path found, line)
        table = ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            header = _HEADER.match(line)
            key = _KEY.match(line)
            if header:
                table = _plain(header[1])
                path = table
            elif key:
                path = f"{table}.{_plain(key[1])}" if table else _plain(key[1])
            else:
                continue
            inside = path == field or field.startswith(path + ".")
            if inside and (best is None or len(path) > best[0]):
                best = (len(path), number)
        return best[1] if best else None

    def line_in_message(self, message: str) -> int | None:
        """The line that a parser's message names, "at line 3", or the last one for "at end of document"."""
        found = re.search(r"line (\d+)", message)
        return int(found[1]) if found else len(self.text.splitlines()) or None

    def error(self, field: str, message: str, hint: str, value: Any = None) -> HardwareError:
        """The error for what a field says."""
        return HardwareError(message, hint, file=self.path, line=self.line_of(field), field=field, value=value)


def explain(e: ValidationError, file: File) -> HardwareError:
    """The first of pydantic's complaints, in our words; says how many more there are."""
    errors = e.errors()
    # An unknown name often explains a missing one (a slip of the pen), so it comes first.
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    more = f" ({len(errors) - 1} more to follow.)" if len(errors) > 1 else ""
    value = first["input"]
    if first["type"] == "missing":
        return file.error(field, f"{field} is missing.", _missing_hint(field) + more)
    if first["type"] == "extra_forbidden":
        known = _fields_at(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Known here: {', '.join(known)}."
        return file.error(field, f"{field} = {value!r} is not a field.", hint + more, value)
    what = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if isinstance(value, float) and not math.isfinite(value):
        what = "a finite number"
    what = what if first["type"] == "value_error" else f"it should be {what}"
    return file.error(field, f"{field} = {value!r} cannot be: {what}.", f"Give {_kind(field)}.{more}", value)


def _rates(table: ClusterTable, file: File) -> None:
    chip = table.chip
    peaks = chip.peak_flops.model_dump(exclude_none=True)
    if not peaks:
        raise file.error(
            "chip.peak_flops", "chip.peak_flops has no rate.", "Give at least one, e.g. bfloat16 = 989e12."
        )
    for kind in ("achievable_flops", "calibrated_flops", "vector_flops"):
        for dtype, rate in getattr(chip, kind).model_dump(exclude_none=True).items():
            field = f"chip.{kind}.{dtype}"
            if dtype not in peaks and kind != "vector_flops":  # a dtype may be slow there and fast nowhere
                hint = f"Give chip.peak_flops.{dtype} too, or take {field} away."
                raise file.error(field, f"{field} = {rate:g} has no peak to stand under.", hint, rate)
            if rate > peaks.get(dtype, math.inf):
                hint = "Correct one of them: both are dense FLOP/s, not with sparsity."
                peak = f"chip.peak_flops.{dtype} = {peaks[dtype]:g}"
                raise file.error(field, f"{field} = {rate:g} is above {peak}.", hint, rate)
    calibrated = chip.calibrated_hbm_bytes_per_s
    if calibrated is not None and calibrated > chip.hbm_bytes_per_s:
        field = "chip.calibrated_hbm_bytes_per_s"
        peak = f"chip.hbm_bytes_per_s = {chip.hbm_bytes_per_s:g}"
        raise file.error(field, f"{field} = {calibrated:g} is above {peak}.", "Correct one of them.", calibrated)


def _memory(table: ClusterTable, file: File) -> None:
    chip = table.chip
    if chip.l2_bytes is not None and chip.l2_bytes > chip.hbm_bytes:
        message = f"chip.l2_bytes = {chip.l2_bytes:g} is more than chip.hbm_bytes = {chip.hbm_bytes:g}."
        raise file.error("chip.l2_bytes", message, "Both are in bytes: correct the unit of one of them.", chip.l2_bytes)
    for field in ("sm_bytes", "register_bytes"):
        size, hbm = getattr(chip, field), chip.hbm_bytes
        if size is not None and size * (chip.sm_count or 1) > hbm:
            cores = f" of each of {chip.sm_count} cores" if chip.sm_count else ""
            message = f"chip.{field} = {size:g}{cores} is more than chip.hbm_bytes = {hbm:g}."
            raise file.error(f"chip.{field}", message, "It is of one core, in bytes: correct one of them.", size)


def _count(table: ClusterTable, file: File) -> None:
    n = table.nodes * table.node.devices_per_node
    if table.n_devices is not None and table.n_devices != n:
        message = f"n_devices = {table.n_devices}, but {table.nodes} nodes of {table.node.devices_per_node} make {n}."
        raise file.error("n_devices", message, "Correct one of the three, or take n_devices away.", table.n_devices)


def _switches(table: ClusterTable, file: File) -> None:
    for path, link in (("node.scale_up", table.node.scale_up), ("scale_out", table.scale_out)):
        if (link.in_switch_fraction is None) != (link.in_switch_latency_s is None):
            field = f"{path}.in_switch_" + ("fraction" if link.in_switch_fraction is not None else "latency_s")
            hint = f"Give both {path}.in_switch_fraction and {path}.in_switch_latency_s, or neither."
            raise file.error(field, f"{field} stands alone: a switch that sums needs both numbers.", hint)


def _host_link(table: ClusterTable, file: File) -> None:
    link = table.node.host_link
    if link is not None and (link.calibrated_bytes_per_s or 0) > link.bandwidth_bytes_per_s:
        field = "node.host_link.calibrated_bytes_per_s"
        above = f"node.host_link.bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s:g}"
        message = f"{field} = {link.calibrated_bytes_per_s:g} is above {above}."
        raise file.error(field, message, "Correct one of them: both are of one direction.", link.calibrated_bytes_per_s)


def _levels(table: ClusterTable, file: File) -> None:
    fabric = table.fabric
    if fabric is None:
        return
    sizes = (
        ("node.devices_per_node", table.node.devices_per_node),
        ("fabric.rack_devices", fabric.rack_devices),
        ("fabric.pod_devices", fabric.pod_devices),
    )
    for (below, small), (field, large) in pairwise(sizes):
        if large % small:
            message = f"{field} = {large} is not a multiple of {below} = {small}."
            raise file.error(field, message, "Each level holds a whole number of the level below.", large)


def _shape(table: ClusterTable, file: File) -> None:
    node = table.node
    if node.shape is None:
        return
    try:
        shape = build_shape(node.shape.model_dump())
    except HardwareError as e:
        value = list(e.value) if isinstance(e.value, tuple) else e.value
        raise file.error(f"node.shape.{e.field}", f"node.shape.{e.field}: {e.message}", e.hint, value) from None
    if shape.n_devices != node.devices_per_node:
        message = f"node.shape.sizes = {node.shape.sizes}: {shape} joins {shape.n_devices} devices"
        message += f", but node.devices_per_node = {node.devices_per_node}."
        raise file.error("node.shape.sizes", message, "Correct one of them.", node.shape.sizes)
    if node.ports is not None and node.ports < shape.ports:
        message = f"node.ports = {node.ports}, but a device of {shape} has {shape.ports} lanes."
        raise file.error("node.ports", message, "Give as many at least, or take node.ports away.", node.ports)


def _racks(table: ClusterTable, file: File) -> None:
    node, fabric = table.node, table.fabric
    if node.racks is not None and fabric is not None and fabric.kind == "fat tree":
        racks = node.devices_per_node / fabric.rack_devices
        if not math.isclose(node.racks, racks):
            message = (
                f"node.racks = {node.racks:g}, but fabric.rack_devices = {fabric.rack_devices} make {racks:g} a node."
            )
            raise file.error("node.racks", message, "Correct one of them, or take node.racks away.", node.racks)


def _power(table: ClusterTable, file: File) -> None:
    node, tdp_w = table.node, table.chip.tdp_w
    if node.power_w is not None and tdp_w is not None and node.power_w < tdp_w * node.devices_per_node:
        message = (
            f"node.power_w = {node.power_w:g} is less than its {node.devices_per_node} devices of {tdp_w:g} W draw."
        )
        raise file.error("node.power_w", message, "It is of the whole node: correct it or chip.tdp_w.", node.power_w)


def _storage(table: ClusterTable, file: File) -> None:
    storage = table.storage
    if storage is not None and (storage.peak_bytes_per_s or math.inf) < storage.bytes_per_s:
        field = "storage.peak_bytes_per_s"
        message = f"{field} = {storage.peak_bytes_per_s:g} is below storage.bytes_per_s = {storage.bytes_per_s:g}."
        raise file.error(
            field, message, "Correct one of them: what it sustains it also reaches.", storage.peak_bytes_per_s
        )


CONTRADICTIONS = (_rates, _memory, _count, _switches, _host_link, _levels, _shape, _racks, _power, _storage)


def _missing_hint(field: str) -> str:
    given = f"Give {field.rsplit('.', 1)[-1]} ({_kind(field)})"
    if field.count(".") == 0:
        return f'Describe it in a table [{field}], or start from a preset: chip = "h100".'
    return f'{given}, or start from a preset: chip = "h100", or like = "h100" in [chip].'


def _kind(field: str) -> str:
    name = field.rsplit(".", 1)[-1]
    if ".sizes." in field or ".lanes." in field:
        return "whole numbers from 1, e.g. [4, 4]"
    if "_flops." in field:
        return "dense FLOP/s, e.g. 989e12"
    return next((kind for ending, kind in _KINDS if name.endswith(ending)), "a table with its fields")


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the table at a path."""
    model: Any = ClusterTable
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = next((a for a in (annotation, *get_args(annotation)) if _is_model(a)), model)
    return list(model.model_fields)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _plain(path: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in path.split("."))
