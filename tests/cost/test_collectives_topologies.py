"""Where a group lies, and what that makes of its collectives."""

from __future__ import annotations

from collections import defaultdict

import pytest

from emu.cost import PricingError, transfer_s
from emu.cost.collectives import Level, choose, moving_s, place, place_evenly
from emu.cost.collectives.axes import Axis
from emu.hardware import Cluster, Fabric, Node, Protocol, Topology
from emu.hardware import cluster as preset
from emu.trace.events import Transfer

GiB = 2**30
CLUSTERS = {name: preset(name) for name in ("llama3-24576", "h100-rails-1024", "mi300x")} | {
    "h100": preset("h100", nodes=8)
}


def test_what_a_placement_says():
    h100 = CLUSTERS["h100"]
    at = place((0, 1, 2, 8, 9), h100)
    assert (at.n, at.nodes, at.fewest, at.most, at.kind, at.levels) == (5, 2, 2, 3, "switch", ())
    with pytest.raises(PricingError, match="rank 64 has no device"):
        place((0, 64), h100)
    for n, per_node in ((65, 8), (9, 1), (4, 9), (0, 1), (4, 0)):
        with pytest.raises(PricingError, match="have no place on h100"):
            place_evenly(n, per_node, h100)


def test_levels_of_the_llama_3_cluster():
    """Racks of 16, pods of 3072 at full bandwidth, 1:7 above. A ring leaves each pod once; interleaved members, each time."""
    cluster = CLUSTERS["llama3-24576"]
    at = place_evenly(24576, 8, cluster)
    assert at.levels == (Level("rack", 16, 16.0, 1), Level("pod", 3072, 3072 / 7, 1))
    assert place_evenly(16, 8, cluster).levels == ()
    assert place_evenly(24, 8, cluster).levels[0][::2] == ("rack", 16.0)
    there_and_back = place([r + 3072 * p for r in range(0, 80, 8) for p in (0, 1)], cluster)
    assert there_and_back.levels[1] == Level("pod", 10, 3072 / 7, 10)
    assert CLUSTERS["h100"].fabric is None and place_evenly(64, 8, CLUSTERS["h100"]).levels == ()


def test_levels_of_rails():
    cluster = CLUSTERS["h100-rails-1024"]
    assert place_evenly(1024, 8, cluster).levels == (Level("unit", 256, 256.0, 1),)
    assert place_evenly(128, 1, cluster).levels == (Level("unit", 32, 32.0, 1),)


def torus(toy, kind: str, sizes: tuple[int, ...], lanes=()) -> Cluster:
    shape = Topology(kind, sizes, lanes)
    return toy.replace(toy.cluster(), node=Node(shape.n_devices, toy.cluster().node.scale_up, shape=shape))


def test_axes_of_a_group_in_a_torus(toy):
    cluster = torus(toy, "torus", (4, 4, 4), (1, 1, 2))
    whole = place(range(64), cluster)
    assert whole.axes == (Axis(4, 1, True), Axis(4, 1, True), Axis(4, 2, True))
    assert place(range(4), cluster).axes == (Axis(4, 2, True),)
    assert place((0, 1), cluster).axes == (Axis(2, 2, False),)
    assert place((0, 16, 32), cluster).axes == (Axis(3, 1, False),)
    assert place((0, 2), cluster).axes == (Axis(2, 2, False),)
    assert place((5, 0, 4, 1), cluster).axes == (Axis(2, 1, False), Axis(2, 2, False))
    odd = place((0, 1, 4), cluster)  # no regular part: a ring by way of whatever lies between
    assert odd.axes == () and odd.ring_lanes == 1
    assert choose("all_gather", 10**6, odd, cluster).algorithm == "ring"


def test_a_full_mesh_has_one_lane_for_each_pair():
    mi300x = CLUSTERS["mi300x"]
    rate = mi300x.node.scale_up.bytes_per_s
    for n in range(2, 9):
        seconds = moving_s("all_reduce", 64 * GiB, place_evenly(n, n, mi300x), mi300x)
        assert 2 * (n - 1) / n * 64 * GiB / seconds == pytest.approx(rate * (n - 1) / 7, rel=0.01)
    pair = Transfer("send", "pp", 0, 1, 0, GiB, "float32", "s", "s", 0, "")
    assert GiB / transfer_s(pair, mi300x) == pytest.approx(rate / 7, rel=0.02)


def test_rings_of_a_dgx_1_have_the_wires_between_their_members():
    v100 = preset("v100")
    lanes = {members: place(members, v100).ring_lanes for members in ((0, 3), (0, 1), (0, 5), (0, 1, 2, 3))}
    assert lanes == {(0, 3): 2, (0, 1): 1, (0, 5): 1, (0, 1, 2, 3): 4}
    assert place(range(8), v100).ring_lanes == 6


# All-to-all.


def test_all_to_all_grows_with_the_torus_and_not_with_the_fat_tree(toy):
    """A ring of e carries e/8 S on each wire; a switch (n-1)/n S on each device's own link, however many there are."""
    rate = toy.rate
    for e in (4, 8, 16):
        ring = torus(toy, "torus", (e,))
        seconds = moving_s("all_to_all", 10**9, place(range(e), ring), ring)
        assert seconds - -(-(e - 1) // 8) * toy.alpha_s == pytest.approx(e / 8 * 10**9 / (rate / 2))
        line = torus(toy, "grid", (e,))
        assert moving_s("all_to_all", 10**9, place(range(e), line), line) == pytest.approx(
            -(-(e - 1) // 8) * toy.alpha_s + e / 4 * 10**9 / (rate / 2)
        )
    square = torus(toy, "torus", (4, 16))
    assert moving_s("all_to_all", 10**9, place(range(64), square), square) == pytest.approx(
        8 * toy.alpha_s + 2 * 10**9 / (rate / 4)
    )
    switch = toy.cluster(per_node=64)
    assert moving_s("all_to_all", 10**9, place(range(64), switch), switch) == pytest.approx(
        8 * toy.alpha_s + 63 / 64 * 10**9 / rate
    )


@pytest.mark.parametrize("e", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["torus", "grid"])
def test_the_busiest_wire_of_an_all_to_all_is_the_one_counted(toy, kind, e):
    """Every message over its wires, the shortest way; where both ways are as short, half and half."""
    shape = Topology(kind, (e, 3))
    load: dict[tuple[int, int], float] = defaultdict(float)
    n = shape.n_devices
    for source in range(n):
        for target in range(n):
            there = list(shape.path(source, target)) if source != target else []
            back = [wire.back for wire in shape.path(target, source)] if source != target else []
            for wire in (*there, *back):
                load[wire.source, wire.target] += 0.5 / n
    cluster = torus(toy, kind, (e, 3))
    seconds = moving_s("all_to_all", 10**9, place(range(n), cluster), cluster)
    latency_s = -(-(n - 1) // 8) * toy.alpha_s
    assert seconds - latency_s == pytest.approx(max(load.values()) * 10**9 * shape.ports / toy.rate)


def test_all_to_all_over_a_thin_top_takes_as_much_longer(toy):
    """Two pods that share a seventh of their cards' bandwidth: half of all bytes must pass there."""
    flat = toy.cluster(nodes=28, per_node=1)
    thin = toy.replace(flat, fabric=Fabric(rack_devices=1, pod_devices=14, oversubscription=7))
    members = range(28)
    size = 10**9
    latency_s = 4 * 10 * toy.alpha_s
    out = toy.rate / 10
    assert moving_s("all_to_all", size, place(members, flat), flat) == pytest.approx(latency_s + 27 / 28 * size / out)
    assert moving_s("all_to_all", size, place(members, thin), thin) == pytest.approx(
        latency_s + (14 * 14 / 28 * size) / (14 / 7 * out)
    )
    within = place(range(14), thin)
    assert moving_s("all_to_all", size, within, thin) == pytest.approx(2 * 10 * toy.alpha_s + 13 / 14 * size / out)


def test_a_ring_feels_a_thin_top_only_if_it_crosses_it_often(toy):
    flat = toy.cluster(nodes=28, per_node=1)
    thin = toy.replace(flat, fabric=Fabric(rack_devices=1, pod_devices=14, oversubscription=7))
    turns = [i // 2 + 14 * (i % 2) for i in range(28)]
    in_order, to_and_fro = (moving_s("all_gather", 10**9, place(m, thin), thin, "ring") for m in (range(28), turns))
    free = moving_s("all_gather", 10**9, place(turns, flat), flat, "ring")
    assert in_order == free == moving_s("all_gather", 10**9, place(range(28), flat), flat, "ring")
    latency_s = 27 * 10 * toy.alpha_s
    assert to_and_fro - latency_s == pytest.approx(7 * (free - latency_s))


# Tori.


def test_rings_along_all_axes_are_the_scaling_books(toy):
    """An all-gather along one axis of a TPU v5p takes V over 2 x 90 GB/s, along two axes V over twice that, and without
    wrap as long as over half (jax-ml/scaling-book sharding.md)."""
    v5p = preset("tpu-v5p-pod")
    lane = v5p.node.scale_up.bytes_per_s / 6
    size = 2**38
    one, two = place(range(28), v5p), place(range(20 * 28), v5p)
    assert [axis.extent for axis in two.axes] == [20, 28]
    assert moving_s("all_gather", size, one, v5p) == pytest.approx(27 / 28 * size / (2 * lane), rel=1e-3)
    assert moving_s("all_gather", size, two, v5p) == pytest.approx(size / (4 * lane), rel=0.04)
    part = place(range(14), v5p)
    assert moving_s("all_gather", size, part, v5p) == pytest.approx(13 / 14 * size / lane, rel=1e-3)
    cube = preset("tpu-v4-cube")
    lane = cube.node.scale_up.bytes_per_s / 6
    assert moving_s("all_reduce", size, place(range(64), cube), cube) == pytest.approx(
        2 * 63 / 64 * size / (6 * lane), rel=1e-3
    )
    few = moving_s("all_gather", 0, place(range(64), cube), cube)
    assert few == pytest.approx(3 * 2 * 1e-6)  # two hops along each axis


@pytest.mark.parametrize(
    ("kind", "sizes", "lanes"),
    [
        ("torus", (4, 16), ()),
        ("torus", (3, 5, 7), ()),
        ("torus", (8, 8), (1, 3)),
        ("grid", (8, 8), (3, 1)),
        ("torus", (2, 16), ()),
    ],
)
def test_unlike_axes_keep_nearly_all_lanes_busy(toy, kind, sizes, lanes):
    """No gather is faster than all of a device's ports. Rings along all axes lose less than a quarter to turns that wait."""
    cluster = torus(toy, kind, sizes, lanes)
    at = place(range(cluster.node.devices_per_node), cluster)
    ports = sum(axis.ports for axis in at.axes)
    least = (at.n - 1) / at.n * 10**12 / (ports * toy.rate * at.lane)
    assert least <= moving_s("all_gather", 10**12, at, cluster) <= 1.25 * least


def test_a_tree_across_nodes_takes_longer_with_every_byte():
    """Its share of bandwidth rises with size, but never so fast that more would take less."""
    cluster = CLUSTERS["h100"]
    at = place_evenly(64, 8, cluster)
    for k in range(4, 34):
        seconds = [moving_s("all_reduce", 2**k + i, at, cluster, "tree") for i in (-1, 0, 1)]
        assert seconds == sorted(seconds)


def test_more_cards_than_the_wires_inside_carry_do_not_help(toy):
    cluster = toy.cluster(nodes=2, per_node=16)
    at = place(range(32), cluster)
    latency_s = 30 * toy.alpha_s + 10 * toy.alpha_s
    assert moving_s("all_gather", 10**9, at, cluster, "ring") == pytest.approx(latency_s + 31 / 32 * 10**9 / toy.rate)


def test_a_pair_of_trees_between_two_nodes_passes_the_cards_once_each_way():
    """On 2 x 4 V100 with 25 GB/s a node, nccl-tests show 41.55 GB/s bus bandwidth, more than the cards carry; a ring could
    not (NVIDIA/nccl-tests#251). With three nodes there is no such gain."""
    two, three = preset("dgx-1", nodes=2), preset("dgx-1", nodes=3)
    size = 16 * GiB
    busbw = 2 * 7 / 8 * size / choose("all_reduce", size, place_evenly(8, 4, two), two, "tree").seconds
    assert busbw / 1e9 == pytest.approx(41.55, rel=0.1)
    ring = 2 * 7 / 8 * size / choose("all_reduce", size, place_evenly(8, 4, two), two, "ring").seconds
    assert ring / 1e9 < 25
    assert choose("all_reduce", size, place_evenly(8, 4, two), two).algorithm == "tree"
    assert choose("all_reduce", size, place_evenly(12, 4, three), three).algorithm == "ring"


def test_pipes_of_the_network_fill_for_every_kind_that_crosses_it(toy):
    plain = toy.cluster(nodes=2, per_node=4)
    slow = toy.replace(plain, scale_out=toy.replace(plain.scale_out, fill_s=1.0, fill_bytes=10**6))
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        at = place(range(8), plain)
        assert moving_s(kind, 10**6, at, slow) - moving_s(kind, 10**6, at, plain) == pytest.approx(0.5)
        inside = place(range(4), plain)
        assert moving_s(kind, 10**6, inside, slow) == moving_s(kind, 10**6, inside, plain)


def test_links_without_a_protocol_in_common_meet_as_textbooks_have_it(toy):
    plain = toy.cluster(nodes=2, per_node=4)
    only = [Protocol(name, 0.0, toy.alpha_s, toy.alpha_s, 0.5) for name in ("LL", "LL128")]
    up, out = (toy.replace(link, protocols=(p,)) for link, p in zip((plain.node.scale_up, plain.scale_out), only))
    odd = toy.replace(plain, node=toy.replace(plain.node, scale_up=up), scale_out=out)
    at = place(range(8), plain)
    assert choose("all_gather", 10**6, at, odd) == choose("all_gather", 10**6, at, plain)
