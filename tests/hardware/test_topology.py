"""Topologies against closed forms: wires, degree, diameter and bisection, found from the wires alone by brute force."""

from __future__ import annotations

from collections import Counter, deque
from itertools import combinations, product
from math import comb, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.hardware import HardwareError, Topology, Wire

axes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple).filter(lambda sizes: prod(sizes) <= 64)


@st.composite
def topologies(draw, most=64):
    kind = draw(
        st.sampled_from(("switch", "full mesh", "hypercube", "hybrid cube mesh", "torus", "grid", "fat tree", "rails"))
    )
    small = axes.filter(lambda sizes: prod(sizes) <= most)
    if kind in ("switch", "full mesh"):
        return Topology(kind, (draw(st.integers(1, min(most, 20))),))
    if kind == "hypercube":
        return Topology(kind, (draw(st.integers(1, min(5, most.bit_length() - 1))),))
    if kind == "hybrid cube mesh":
        sizes = draw(st.sampled_from((8, 8, *range(1, 8)))) if most >= 8 else draw(st.integers(1, most))
        return Topology(kind, (sizes,), lanes=draw(st.sampled_from(((), (1,)))))
    if kind == "rails":
        sizes = draw(st.tuples(*[st.integers(1, 3)] * 3).filter(lambda sizes: prod(sizes) <= most))
        return Topology(kind, sizes, oversubscription=draw(st.sampled_from(((), (1,), (2,), (4.0,)))))
    sizes = draw(small)
    per_axis = st.tuples(*[st.integers(1, 3)] * len(sizes))
    if kind == "fat tree":
        thin = st.tuples(*[st.sampled_from((1, 2, 7))] * (len(sizes) - 1))
        return Topology(kind, sizes, oversubscription=draw(st.just(()) | thin))
    return Topology(kind, sizes, lanes=draw(st.just(()) | per_axis))


def neighbours(topology):
    found = {v: [] for v in range(topology.n_vertices)}
    for wire in topology.wires:
        found[wire.source].append(wire.target)
        found[wire.target].append(wire.source)
    return found


def distances(topology, source):
    """Wires from a device to every vertex, by breadth-first search: knows nothing of kinds."""
    near, far, queue = neighbours(topology), {source: 0}, deque([source])
    while queue:
        here = queue.popleft()
        for there in near[here]:
            if there not in far:
                far[there] = far[here] + 1
                queue.append(there)
    return far


def thinnest_halving(topology):
    """The least lanes over all ways to halve the devices and to put each switch on either side."""
    n, switches = topology.n_devices, range(topology.n_devices, topology.n_vertices)
    best = float("inf")
    for half in combinations(range(n), n // 2):
        for sides in product((False, True), repeat=len(switches)):
            inside = set(half) | {s for s, side in zip(switches, sides, strict=True) if side}
            best = min(best, sum(w.lanes for w in topology.wires if (w.source in inside) != (w.target in inside)))
    return best


@given(topologies())
def test_wires_join_all_devices_and_no_pair_twice(topology):
    pairs = [(w.source, w.target) for w in topology.wires]
    assert len(set(pairs)) == len(pairs) and all(a < b < topology.n_vertices for a, b in pairs)
    assert all(w.lanes > 0 for w in topology.wires)
    assert set(range(topology.n_devices)) <= set(distances(topology, 0))


@given(topologies(), st.data())
def test_a_path_is_a_shortest_chain_of_wires(topology, data):
    device = st.integers(0, topology.n_devices - 1)
    source, target = data.draw(device), data.draw(device)
    path = topology.path(source, target)
    stops = [source, *(wire.target for wire in path)]
    assert [wire.source for wire in path] == stops[:-1] and stops[-1] == target
    known = {*topology.wires, *(wire.back for wire in topology.wires)}
    assert set(path) <= known
    assert len(path) == distances(topology, source)[target]


@given(topologies(most=27))
def test_the_diameter_is_the_longest_of_the_shortest_paths(topology):
    devices = range(topology.n_devices)
    assert topology.diameter == max(distances(topology, a)[b] for a in devices for b in devices)


@given(topologies())
def test_lanes_at_a_device_are_its_ports(topology):
    degrees = {topology.degree(device) for device in range(topology.n_devices)}
    if topology.kind == "grid" or (topology.kind == "hybrid cube mesh" and topology.n_devices < 8):
        assert max(degrees) == topology.ports or topology.n_devices == 1
    else:
        assert degrees == (
            {0} if topology.n_devices == 1 and topology.ports == 1 and not topology.wires else {topology.ports}
        )


@settings(max_examples=40)
@given(
    topologies(most=8).filter(
        lambda t: t.n_vertices <= 14 and (t.kind not in ("torus", "grid") or all(s % 2 == 0 or s == 1 for s in t.sizes))
    )
)
def test_the_bisection_is_the_thinnest_of_all_halvings(topology):
    assert topology.bisection_lanes == pytest.approx(thinnest_halving(topology), rel=1e-12)


def test_a_cut_that_is_not_the_thinnest_is_seen():
    # The negative control of the test above: a torus cut across its shorter axis needs more lanes.
    torus = Topology("torus", (4, 2))
    assert thinnest_halving(torus) == torus.bisection_lanes == 4 != 2 * 4


@given(st.lists(st.integers(3, 8), min_size=1, max_size=3).map(tuple))
def test_a_torus_has_as_many_wires_as_axes_for_each_device(sizes):
    torus, grid, n = Topology("torus", sizes), Topology("grid", sizes), prod(sizes)
    assert len(torus.wires) == len(sizes) * n
    assert torus.ports == 2 * len(sizes)
    assert torus.diameter == sum(size // 2 for size in sizes)
    assert torus.bisection_lanes == 2 * n // max(sizes) == 2 * grid.bisection_lanes
    assert len(grid.wires) == sum(n - n // size for size in sizes)
    assert grid.diameter == sum(sizes) - len(sizes)


@given(st.integers(1, 7))
def test_a_torus_of_twos_is_a_hypercube(d):
    cube, torus = Topology("hypercube", (d,)), Topology("torus", (2,) * d)
    assert set(cube.wires) == set(torus.wires)
    assert len(cube.wires) == d * 2**d // 2
    assert (cube.diameter, cube.ports, cube.bisection_lanes) == (d, d, 2**d / 2)
    assert (torus.diameter, torus.ports, torus.bisection_lanes) == (d, d, 2**d / 2)


@given(st.integers(2, 60))
def test_a_full_mesh_has_a_wire_for_each_pair_and_a_switch_one_for_each_device(n):
    mesh, switch = Topology("full mesh", (n,)), Topology("switch", (n,))
    assert (len(mesh.wires), mesh.ports, mesh.diameter) == (comb(n, 2), n - 1, 1)
    assert mesh.bisection_lanes == (n // 2) * ((n + 1) // 2)
    assert (len(switch.wires), switch.ports, switch.diameter, switch.bisection_lanes) == (n, 1, 2, n // 2)


@given(st.integers(1, 4).map(lambda k: 2 * k), st.integers(1, 6), st.integers(1, 6), st.sampled_from((1, 2, 7)))
def test_a_fat_tree_has_full_bisection_over_its_oversubscription(pods, racks, devices, thin):
    tree = Topology("fat tree", (pods, racks, devices), oversubscription=(1, thin))
    assert tree.n_devices == pods * racks * devices
    assert len(tree.wires) == tree.n_devices + pods * racks + pods
    assert tree.bisection_lanes == pytest.approx(tree.n_devices / 2 / thin, rel=1e-12)
    assert len(tree.path(0, tree.n_devices - 1)) == 6


def test_rails_join_the_same_place_of_every_node_by_one_switch():
    rails = Topology("rails", (2, 4, 8))
    assert rails.n_vertices - rails.n_devices == 2 * 8 + 1
    same_rail, other_rail, other_unit = rails.path(0, 8), rails.path(0, 9), rails.path(0, 32)
    assert [len(same_rail), len(other_rail), len(other_unit)] == [2, 4, 4]
    assert rails.path(3, 11)[0].target == rails.path(19, 3)[0].target  # device 3 of every node
    # In a fat tree of the same leaves it is the neighbours that share a switch.
    tree = Topology("fat tree", (16, 4))
    assert (len(tree.path(0, 1)), len(tree.path(0, 8))) == (2, 4)


def test_the_dgx_1_is_a_cube_with_two_diagonals_and_six_lanes_a_device():
    dgx = Topology("hybrid cube mesh", (8,))
    assert (len(dgx.wires), sum(w.lanes for w in dgx.wires)) == (12 + 4, 8 * 6 / 2)
    inside = [w for w in dgx.wires if (w.source < 4) == (w.target < 4)]
    assert len(inside) == 2 * comb(4, 2)  # both boards are full meshes: four edges and two diagonals each
    assert [len(dgx.path(0, b)) for b in (3, 4, 5, 7)] == [1, 1, 2, 2]


def test_shared_wires_can_be_counted_from_paths():
    # All pairs at once on a ring of 8: the busiest wire carries 1/8 of n^2/... = 10 messages, as everybody's does.
    ring = Topology("torus", (8,))
    load = Counter(wire for a in range(8) for b in range(8) for wire in ring.path(a, b))
    assert (
        sum(load.values())
        == sum(len(ring.path(a, b)) for a in range(8) for b in range(8))
        == 8 * (1 + 1 + 2 + 2 + 3 + 3 + 4)
    )
    assert max(load.values()) == 10  # upwards: 1 + 2 + 3, and the ties of 4
    assert load[Wire(1, 0)] == 6


@pytest.mark.parametrize(
    "field, kind, more",
    [
        ("kind", "ring", {"sizes": (4,)}),
        ("sizes", "torus", {"sizes": ()}),
        ("sizes", "torus", {"sizes": (4, 0)}),
        ("sizes", "torus", {"sizes": (4, -4)}),
        ("sizes", "torus", {"sizes": (4, 2.5)}),
        ("sizes", "switch", {"sizes": (4, 2)}),
        ("sizes", "rails", {"sizes": (4, 8)}),
        ("sizes", "hybrid cube mesh", {"sizes": (16,)}),
        ("lanes", "torus", {"sizes": (4, 4), "lanes": (2,)}),
        ("lanes", "torus", {"sizes": (4, 4), "lanes": (2, 0)}),
        ("lanes", "hybrid cube mesh", {"sizes": (8,), "lanes": (3,)}),
        ("lanes", "full mesh", {"sizes": (4,), "lanes": (1,)}),
        ("oversubscription", "fat tree", {"sizes": (4, 4), "oversubscription": (1, 7)}),
        ("oversubscription", "fat tree", {"sizes": (4, 4), "oversubscription": (0.5,)}),
        ("oversubscription", "torus", {"sizes": (4, 4), "oversubscription": (2,)}),
    ],
)
def test_a_topology_that_cannot_be_is_refused_by_field(field, kind, more):
    with pytest.raises(HardwareError) as caught:
        Topology(kind, **more)
    assert caught.value.field == field and caught.value.hint


@pytest.mark.parametrize("device", [-1, 8])
def test_a_path_to_nowhere_is_refused(device):
    with pytest.raises(HardwareError, match=f"no device {device}"):
        Topology("hypercube", (3,)).path(0, device)
