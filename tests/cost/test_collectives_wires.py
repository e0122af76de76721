"""The wires that collectives take in meshes and tori, and what follows from them."""

from __future__ import annotations

import pytest

from emu.cost import collective_s, price
from emu.cost.collectives import moving_s, place, wire_bytes
from emu.hardware import Cluster, Node, Topology
from emu.hardware import cluster as preset
from emu.trace.events import Collective
from emu.trace.trace import Trace

CLUSTERS = {name: preset(name) for name in ("h100", "tpu-v4-cube", "tpu-v5e-pod")} | {
    "mi300x": preset("mi300x", nodes=2)
}


def torus(toy, kind: str, sizes: tuple[int, ...], lanes=()) -> Cluster:
    shape = Topology(kind, sizes, lanes)
    return toy.replace(toy.cluster(), node=Node(shape.n_devices, toy.cluster().node.scale_up, shape=shape))


def call(kind: str, members, size: int, algorithm: str = "") -> Collective:
    return Collective(kind, "dp", tuple(members), 0, size, (), "float32", "", algorithm, 0, "s", "s", 0, "")


def test_a_full_mesh_carries_an_all_reduce_on_all_its_wires_alike():
    found = wire_bytes(call("all_reduce", range(8), 8000), CLUSTERS["mi300x"])
    assert found == {(0, a, b): 2 * 8000 / 8 for a in range(8) for b in range(8) if a != b}
    part = wire_bytes(call("all_reduce", (9, 10, 12), 9000), CLUSTERS["mi300x"])
    assert set(part) == {(1, a, b) for a in (1, 2, 4) for b in (1, 2, 4) if a != b}


def test_groups_on_other_axes_of_a_torus_take_other_wires():
    cube = CLUSTERS["tpu-v4-cube"]
    along, across = (set(wire_bytes(call("all_gather", m, 10**6), cube)) for m in (range(4), range(0, 64, 16)))
    assert along and across and not along & across
    every_other, between = (set(wire_bytes(call("all_gather", m, 10**6), cube)) for m in ((0, 2), (1, 3)))
    assert every_other & between  # they pass through each other


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_the_busiest_wire_is_what_a_large_collective_waits_for(toy, kind):
    shapes = [("torus", (4, 4), ()), ("torus", (4,), (2,)), ("torus", (5,), ()), ("full mesh", (6,), ())]
    for shape, sizes, lanes in (*shapes, ("hypercube", (3,), ()), ("grid", (4,), ())):
        cluster = torus(toy, shape, sizes, lanes)
        n = cluster.node.devices_per_node
        size = 10**12
        event = call(kind, range(n), size)
        at = place(event.members, cluster)
        busiest = max(wire_bytes(event, cluster).values()) / (toy.rate * at.lane)
        assert 0.999 * busiest <= moving_s(kind, size, at, cluster) <= 1.01 * busiest


def test_where_a_switch_or_nothing_is_known_there_are_no_wires(toy):
    assert wire_bytes(call("all_reduce", range(8), 8000), CLUSTERS["h100"]) == {}
    assert wire_bytes(call("all_reduce", range(8), 8000), toy.cluster()) == {}
    assert wire_bytes(call("all_reduce", range(256), 8000), CLUSTERS["tpu-v5e-pod"]) == {}
    assert wire_bytes(call("barrier", range(8), 0), CLUSTERS["mi300x"]) == {}


def test_groups_that_pass_through_each_other_share_the_wires_between(toy):
    """On a line of four, 0 and 2 meet by way of 1, and 1 and 3 by way of 2: both use the wire in the middle."""
    cluster = torus(toy, "grid", (4,))

    def ends(*groups) -> list[float]:
        events = {m: [toy.collective(g, 0, 10**8, 0, "all_gather", group=str(g))] for g in groups for m in g}
        timeline = price(Trace({"dp": 4}, events), cluster)
        return [timeline.spans[group[0]][0].end_s for group in groups]

    (alone,) = ends((0, 2))
    crossed = ends((0, 2), (1, 3))
    assert crossed == pytest.approx([2 * alone - toy.alpha_s] * 2, rel=0.02)
    assert ends((0, 1), (2, 3)) == pytest.approx(ends((0, 1)) * 2)  # side by side: nothing is shared


def test_an_all_to_all_on_a_full_mesh_ends_with_its_largest_message(toy):
    mesh = torus(toy, "full mesh", (8,))
    lane = toy.rate / 7
    for n in (2, 5, 8):
        at = place(range(n), mesh)
        assert moving_s("all_to_all", 8 * 10**8, at, mesh) == pytest.approx(toy.alpha_s + 8 * 10**8 / n / lane)
    parts = {
        r: call("all_to_all", range(3), 60)._replace(sizes=row)
        for r, row in enumerate([(9, 3, 1), (2, 9, 5), (4, 0, 9)])
    }
    assert collective_s(parts[0], mesh, parts) == pytest.approx(toy.alpha_s + 5 / lane)


def test_what_a_root_keeps_does_not_move(toy):
    event = call("gather", range(3), 120)._replace(sizes=(100, 12, 8))
    assert collective_s(event, toy.cluster()) == pytest.approx(toy.alpha_s + 20 / toy.rate)
    assert collective_s(event._replace(root=2, kind="scatter"), toy.cluster()) == pytest.approx(
        toy.alpha_s + 112 / toy.rate
    )
