"""A cluster of round numbers, and short names to write traces by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from emu.hardware import Chip, Cluster, Host, HostLink, Link, Node
from emu.trace.events import Collective, EventRecord, EventWait, HostWait, Kernel, Transfer, Wait

ALPHA_S, RATE = 1e-3, 1e9  # latency of a step and bytes/s of the toy's links; ten times worse between nodes


def toy_cluster(nodes: int = 1, per_node: int = 8, launch_s: float = 0.0, rate: float = RATE, alpha_s: float = ALPHA_S):
    """1e12 FLOP/s, 1e12 bytes/s of memory, kernels as short as one likes, links by alpha and rate."""
    chip = Chip(
        name="toy",
        peak_flops=dict.fromkeys(("float64", "float32", "bfloat16"), 1e12),
        achievable_flops=dict.fromkeys(("float64", "float32", "bfloat16"), 1e12),
        hbm_bytes=10**12,
        hbm_bytes_per_s=1e12,
        hbm_fraction=1.0,
        kernel_s=0.0,
        attention={"flash2": 0.37},
    )
    inside = Link("inside", rate, 1.0, alpha_s, 0.0, alpha_s)
    outside = Link("outside", rate / 10, 1.0, alpha_s * 10, 0.0, alpha_s * 10)
    host = Host(launch_s=launch_s, compiled_launch_s=launch_s / 2, graph_launch_s=launch_s)
    node = Node(per_node, inside, host_link=HostLink("host", rate, 1.0, alpha_s))
    return Cluster("toy", chip, node, nodes, outside, host)


def kernel(seconds: float, stream: str = "default", **fields) -> Kernel:
    """A kernel that lasts so long on the toy."""
    return Kernel("k", "", "forward", round(seconds * 1e12), 0, "float32", (), stream)._replace(**fields)


def collective(members, seq: int, size: int, work: int, kind: str = "all_reduce", **fields) -> Collective:
    """An asynchronous collective on the stream "comm", issued from "default"."""
    root = 0 if kind in ("broadcast", "reduce", "gather", "scatter") else -1
    event = Collective(
        kind, "dp", tuple(members), seq, size, (), "float32", "sum", "", root, "comm", "default", work, ""
    )
    return event._replace(**fields)


def transfer(
    kind: str, src: int, dst: int, seq: int, size: int, work: int, stream="default", after="default"
) -> Transfer:
    return Transfer(kind, "pp", src, dst, seq, size, "float32", stream, after, work, "")


@pytest.fixture(scope="session")  # as hypothesis asks
def toy():
    return SimpleNamespace(
        cluster=toy_cluster,
        kernel=kernel,
        collective=collective,
        transfer=transfer,
        wait=lambda work, stream="default": Wait(work, stream),
        record=lambda event, stream="default": EventRecord(event, stream),
        event_wait=lambda event, stream="default": EventWait(event, stream),
        host_wait=lambda stream="": HostWait(stream, "test"),
        alpha_s=ALPHA_S,
        rate=RATE,
        replace=replace,
    )
