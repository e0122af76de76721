"""What cannot be true at once in a cluster file: each check compares fields that are right one by one."""

from __future__ import annotations

import math
from itertools import pairwise

from .build import build_shape
from .errors import HardwareError
from .places import File
from .plausible import MOST_DEVICES
from .priced_by import check_caps, check_fill, check_kernels, check_sustained
from .schema import ClusterTable, LinkTable
from .switched import KINDS as SWITCHED

# Peak FLOP for each byte of memory bandwidth: a vector computer has 2, a K40 15, a B200 560.
LEAST_INTENSITY, MOST_INTENSITY = 1, 10_000
PROTOCOLS = ("LL", "LL128", "Simple")


def _rates(table: ClusterTable, file: File) -> None:
    chip = table.chip
    peaks = chip.peak_flops.model_dump(exclude_none=True)
    if not peaks:
        raise file.error(
            "chip.peak_flops", "chip.peak_flops has no rate.", "Give at least one, e.g. bfloat16 = 989e12."
        )
    for dtype, share in chip.sustained.model_dump(exclude_none=True).items():
        field = f"chip.sustained.{dtype}"
        if dtype not in peaks and file.sets(field):
            hint = f"Give chip.peak_flops.{dtype} too, or take {field} away."
            raise file.error(field, f"{field} = {share:g} is a share of no peak.", hint, share)
    for kind in ("achievable_flops", "calibrated_flops", "vector_flops"):
        for dtype, rate in getattr(chip, kind).model_dump(exclude_none=True).items():
            field = f"chip.{kind}.{dtype}"
            if dtype not in peaks and kind != "vector_flops":  # a dtype may be slow there and fast nowhere
                hint = f"Give chip.peak_flops.{dtype} too, or take {field} away."
                raise file.error(field, f"{field} = {rate:g} has no peak to stand under.", hint, rate)
            if rate > peaks.get(dtype, math.inf):
                hint = "Correct one of them: both are dense FLOP/s, not with sparsity."
                raise file.clash((field, rate), "is above", (f"chip.peak_flops.{dtype}", peaks[dtype]), hint)


def _narrow_formats(table: ClusterTable, file: File) -> None:
    """Where a narrower format is no faster, hardware leaves it to the wider one; tf32 passes through the same unit."""
    peaks = table.chip.peak_flops.model_dump(exclude_none=True)
    for wide, narrow in (("tf32", "bfloat16"), ("tf32", "float16"), ("bfloat16", "float8"), ("float16", "float8")):
        if wide in peaks and narrow in peaks and peaks[narrow] < peaks[wide]:
            hint = f"{narrow} is at least as fast on the units of {wide}: correct one of them, or leave {narrow} out."
            first, second = ((f"chip.peak_flops.{d}", peaks[d]) for d in (narrow, wide))
            raise file.clash(first, "is below", second, hint)


def _memory(table: ClusterTable, file: File) -> None:
    chip = table.chip
    hbm = ("chip.hbm_bytes", chip.hbm_bytes)
    if chip.l2_bytes is not None and chip.l2_bytes > chip.hbm_bytes:
        hint = "Both are in bytes: correct the unit of one of them."
        raise file.clash(("chip.l2_bytes", chip.l2_bytes), "is more than", hbm, hint)
    for field in ("sm_bytes", "register_bytes"):
        size, cores = getattr(chip, field), chip.sm_count or 1
        if size is not None and size * cores > chip.hbm_bytes:
            each = (
                f"of each of {file.said('chip.sm_count', cores)} cores is more than"
                if chip.sm_count
                else "is more than"
            )
            hint = f"chip.{field} is of one core, in bytes: correct one of them."
            raise file.clash((f"chip.{field}", size), each, hbm, hint, also=("chip.sm_count",))
    calibrated = chip.calibrated_hbm_bytes_per_s
    if calibrated is not None and calibrated > chip.hbm_bytes_per_s:
        peak = ("chip.hbm_bytes_per_s", chip.hbm_bytes_per_s)
        raise file.clash(("chip.calibrated_hbm_bytes_per_s", calibrated), "is above", peak, "Correct one of them.")


def _balance(table: ClusterTable, file: File) -> None:
    peaks = table.chip.peak_flops.model_dump(exclude_none=True)
    dtype = max(peaks, key=lambda d: peaks[d])
    intensity = peaks[dtype] / table.chip.hbm_bytes_per_s
    if not LEAST_INTENSITY <= intensity <= MOST_INTENSITY:
        memory = ("chip.hbm_bytes_per_s", table.chip.hbm_bytes_per_s)
        relation = f"gives a byte to each {intensity:.3g} FLOP of"
        hint = (
            f"Chips have {LEAST_INTENSITY:g} to {MOST_INTENSITY:,} (an H100 590 in float8): one of them lost a factor."
        )
        raise file.clash(memory, relation, (f"chip.peak_flops.{dtype}", peaks[dtype]), hint)


def _launches(table: ClusterTable, file: File) -> None:
    host = table.host
    if host.compiled_launch_s is not None and host.compiled_launch_s > host.launch_s:
        hint = "Generated code launches a kernel at least as fast as eager PyTorch: correct one of them."
        eager = ("host.launch_s", host.launch_s)
        raise file.clash(("host.compiled_launch_s", host.compiled_launch_s), "is above", eager, hint)


def _count(table: ClusterTable, file: File) -> None:
    per_node = table.node.devices_per_node
    n = table.nodes * per_node
    if table.n_devices is not None and table.n_devices != n:
        hint = "Correct one of the three, or take n_devices away."
        if not file.sets("nodes") and table.n_devices % per_node == 0:
            hint = f"Give nodes = {table.n_devices // per_node}."
        nodes, devices = file.said("nodes", table.nodes), file.said("node.devices_per_node", per_node)
        message = f"n_devices = {table.n_devices}, but {nodes} of {devices} make {n}."
        raise file.error("n_devices", message, hint, table.n_devices)
    if n > MOST_DEVICES:
        relation = f"is too many (more than {MOST_DEVICES:g} devices in all) for"
        devices = ("node.devices_per_node", per_node)
        raise file.clash(("nodes", table.nodes), relation, devices, "Correct one of them.")


def _links(table: ClusterTable, file: File) -> None:
    up, out, host = table.node.scale_up, table.scale_out, table.node.host_link
    memory = ("chip.hbm_bytes_per_s", table.chip.hbm_bytes_per_s)
    for path, link in (("node.scale_up", up), ("node.host_link", host), ("scale_out", out)):
        if link is None:
            continue
        field = f"{path}.bandwidth_bytes_per_s"
        bandwidth, calibrated = link.bandwidth_bytes_per_s, link.calibrated_bytes_per_s
        if calibrated is not None and calibrated > bandwidth:
            hint = "Correct one of them: both are of one direction."
            raise file.clash((f"{path}.calibrated_bytes_per_s", calibrated), "is above", (field, bandwidth), hint)
        if bandwidth > memory[1]:
            hint = "What travels must be read from memory first: correct one of them."
            raise file.clash((field, bandwidth), "is above", memory, hint)
    fast, slow = up.bandwidth_bytes_per_s, out.bandwidth_bytes_per_s
    if slow > fast and table.node.devices_per_node > 1:
        hint = "Devices of one node share the fast links: correct one of them (both are of one device and direction)."
        one, other = ("scale_out.bandwidth_bytes_per_s", slow), ("node.scale_up.bandwidth_bytes_per_s", fast)
        raise file.clash(one, "is above", other, hint)


def _switches(table: ClusterTable, file: File) -> None:
    for path, link in (("node.scale_up", table.node.scale_up), ("scale_out", table.scale_out)):
        if (link.in_switch_fraction is None) != (link.in_switch_latency_s is None):
            field = f"{path}.in_switch_" + ("fraction" if link.in_switch_fraction is not None else "latency_s")
            hint = f"Give both {path}.in_switch_fraction and {path}.in_switch_latency_s, or neither."
            raise file.error(field, f"{field} stands alone: a switch that sums needs both numbers.", hint)
    up, shape = table.node.scale_up, table.node.shape
    if up.in_switch_fraction is not None and shape is not None and shape.kind not in SWITCHED:
        sums = ("node.scale_up.in_switch_fraction", up.in_switch_fraction)
        hint = 'Only a switch sums: take in_switch_fraction and in_switch_latency_s away, or give kind = "switch".'
        raise file.clash(sums, "does not go with", ("node.shape.kind", shape.kind), hint)


def _protocols(table: ClusterTable, file: File) -> None:
    for path, link in (("node.scale_up", table.node.scale_up), ("scale_out", table.scale_out)):
        if link.protocols:
            _protocols_of(path, link, file)


def _protocols_of(path: str, link: LinkTable, file: File) -> None:
    names = [protocol.name for protocol in link.protocols]
    for i, name in enumerate(names):
        field = f"{path}.protocols.{i}.name"
        if name not in PROTOCOLS or name in names[:i]:
            what = "stands twice" if name in PROTOCOLS else "is none of NCCL's protocols"
            raise file.error(field, f"{field} = {name!r} {what}.", f"There are {', '.join(PROTOCOLS)}, one each.", name)
    if "Simple" not in names:
        message = f"{path}.protocols has no protocol Simple, which large messages use."
        raise file.error(f"{path}.protocols", message, "Add it, or take protocols away: then it is the only one.")
    simple = names.index("Simple")
    for name in ("base_s", "latency_s", "tree_latency_s"):
        own, of_link = getattr(link.protocols[simple], name), getattr(link, name)
        if own != of_link:
            hint = f"{path}.{name} is that of Simple: give both alike, or no protocols."
            raise file.clash((f"{path}.protocols.{simple}.{name}", own), "is not", (f"{path}.{name}", of_link), hint)


def _levels(table: ClusterTable, file: File) -> None:
    fabric = table.fabric
    if fabric is None:
        return
    sizes = (
        ("node.devices_per_node", table.node.devices_per_node),
        ("fabric.rack_devices", fabric.rack_devices),
        ("fabric.pod_devices", fabric.pod_devices),
    )
    for below, level in pairwise(sizes):
        if level[1] % below[1]:
            hint = "Each level holds a whole number of the level below."
            raise file.clash(level, "is not a multiple of", below, hint)
    if fabric.oversubscription > fabric.pod_devices:
        hint = "Then a whole pod would share less than one device's link: 7 means that each gets a seventh."
        pod = ("fabric.pod_devices", fabric.pod_devices)
        raise file.clash(("fabric.oversubscription", fabric.oversubscription), "is more than", pod, hint)


def _shape(table: ClusterTable, file: File) -> None:
    node = table.node
    if node.shape is None:
        if node.ports is not None:
            hint = "Give [node.shape] with kind and sizes, or take node.ports away."
            raise file.error("node.ports", f"node.ports = {node.ports}, but node.shape is not said.", hint, node.ports)
        return
    try:
        shape = build_shape(node.shape.model_dump())
    except HardwareError as e:
        value = list(e.value) if isinstance(e.value, tuple) else e.value
        raise file.error(f"node.shape.{e.field}", f"node.shape.{e.field}: {e.message}", e.hint, value) from None
    if shape.n_devices != node.devices_per_node:
        relation = f"({shape}) joins {shape.n_devices} devices, not"
        devices = ("node.devices_per_node", node.devices_per_node)
        raise file.clash(("node.shape.sizes", node.shape.sizes), relation, devices, "Correct one of them.")
    if node.ports is not None and node.ports < shape.ports:
        hint = f"A device of {shape} has {shape.ports} lanes: give as many at least, or take node.ports away."
        blamed = next((f for f in ("node.shape.lanes", "node.shape.sizes") if file.sets(f)), "node.shape")
        value = node.shape.lanes if blamed.endswith("lanes") else node.shape.sizes
        raise file.clash(("node.ports", node.ports), "is too few for", (blamed, value), hint)


def _racks(table: ClusterTable, file: File) -> None:
    node, fabric = table.node, table.fabric
    if node.racks is not None and fabric is not None and fabric.kind == "fat tree":
        racks = node.devices_per_node / fabric.rack_devices
        if not math.isclose(node.racks, racks):
            rack = ("fabric.rack_devices", fabric.rack_devices)
            relation = f"of {node.devices_per_node} devices contradicts"
            hint = f"Such racks make {racks:g} a node: correct one of them, or take node.racks away."
            raise file.clash(("node.racks", node.racks), relation, rack, hint)


def _power(table: ClusterTable, file: File) -> None:
    node, tdp_w = table.node, table.chip.tdp_w
    if node.power_w is not None and tdp_w is not None and node.power_w < tdp_w * node.devices_per_node:
        hint = "node.power_w is of the whole node: correct it or chip.tdp_w."
        relation = f"is less than {node.devices_per_node} times"
        raise file.clash(("node.power_w", node.power_w), relation, ("chip.tdp_w", tdp_w), hint)


def _storage(table: ClusterTable, file: File) -> None:
    storage = table.storage
    if storage is not None and (storage.peak_bytes_per_s or math.inf) < storage.bytes_per_s:
        peak = ("storage.peak_bytes_per_s", storage.peak_bytes_per_s)
        sustained = ("storage.bytes_per_s", storage.bytes_per_s)
        raise file.clash(peak, "is below", sustained, "Correct one of them: what it sustains it also reaches.")


CONTRADICTIONS = (
    _rates,
    _narrow_formats,
    _balance,
    _memory,
    check_sustained,
    check_kernels,
    _launches,
    _count,
    _links,
    _switches,
    _protocols,
    check_caps,
    check_fill,
    _levels,
    _shape,
    _racks,
    _power,
    _storage,
)
