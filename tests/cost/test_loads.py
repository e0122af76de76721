"""What communication takes of links: counted message by message over the wires of the network, and in closed form."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost.loads import collective_load, transfer_load
from emu.cost.routes import ABOVE, OUT, UP
from emu.hardware import Fabric, Topology

from .conftest import RATE, collective, toy_cluster, transfer

SECONDS = 1e3  # long enough that no share is cut off at the whole link


def thin(kind: str, per_node: int = 2, nodes: int = 8, pod: int = 4):
    there = toy_cluster(nodes, per_node)
    node = replace(there.node, shape=Topology("switch", (per_node,)))
    return replace(there, node=node, fabric=Fabric(per_node, pod, 4.0, kind))


GROUPS = st.lists(st.integers(0, 15), min_size=2, max_size=10, unique=True).map(tuple)
KINDS = st.sampled_from(("fat tree", "rails"))


def above(load) -> Counter:
    """How often each share of a link above a pod occurs."""
    return Counter(round(share, 15) for link, share in load.shares if link[1] == ABOVE)


@given(GROUPS, KINDS, st.data())
def test_what_leads_up_from_pods_carries_what_goes_over_such_wires(members, kind, data):
    """Of an uneven all_to_all: every message along Cluster.path, on wires thinner than what is below them."""
    there = thin(kind)
    sizes = {m: tuple(data.draw(st.integers(1, 10**6)) for _ in members) for m in members}
    parts = {m: collective(members, 0, sum(sizes[m]), 1, "all_to_all", sizes=sizes[m]) for m in members}
    load = collective_load(parts[members[0]], there, SECONDS, parts)
    wires: Counter = Counter()
    for source in members:
        for target, size in zip(members, sizes[source]):
            if there.node_of(source) != there.node_of(target):
                for _, wire in there.path(source, target):
                    if min(wire.source, wire.target) >= there.n_devices and wire.lanes < 2:  # from a pod to the top
                        wires[wire] += size
    expected = Counter(round(size / (SECONDS * RATE / 10 * wire.lanes), 15) for wire, size in wires.items())
    assert above(load) == expected


@given(GROUPS, KINDS)
def test_an_even_all_to_all_is_counted_as_its_messages_are(members, kind):
    there = thin(kind)
    even = collective(members, 0, 1000 * len(members), 1, "all_to_all")
    one_by_one = even._replace(sizes=(1000,) * len(members))
    found, expected = (collective_load(e, there, SECONDS) for e in (even, one_by_one))
    assert dict(found.shares) == pytest.approx(dict(expected.shares))
    assert found.memory == pytest.approx(expected.memory)


@pytest.mark.parametrize(("kind", "ways"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_a_ring_leaves_a_node_by_all_its_members_cards(kind, ways, per_node):
    there = toy_cluster(nodes=3, per_node=4)
    members = tuple(node * 4 + i for node in range(3) for i in range(per_node))
    n, size = len(members), 10**9
    load = dict(collective_load(collective(members, 0, size, 1, kind), there, SECONDS).shares)
    passed = ways * (n - 1) / n * size  # by every member, to the next
    for member in members:
        for way in ("out", "in"):
            assert load[member, OUT, way] == pytest.approx(passed / per_node / (SECONDS * RATE / 10))
            inside = passed * (per_node - 1) / per_node / (SECONDS * RATE)
            assert load.get((member, UP, way), 0.0) == pytest.approx(inside)


def test_of_devices_without_a_record_no_link_is_kept_but_those_above_pods_are():
    there = thin("fat tree")
    group = collective(range(16), 0, 10**6, 1)
    found = collective_load(group, there, SECONDS, present={3}).shares
    assert {link[0] for link, _ in found if link[1] != ABOVE} == {3}
    assert {link[0] for link, _ in found if link[1] == ABOVE} == {0, 1, 2, 3}


@given(GROUPS, st.sampled_from(("all_reduce", "broadcast", "ring_shift", "gather", "scatter", "barrier", "all_to_all")))
def test_a_share_is_at_most_the_whole_link_and_more_than_nothing(members, kind):
    load = collective_load(collective(members, 0, 10**9, 1, kind), thin("rails"), 1e-3)
    assert all(0 < share <= 1 for _, share in load.shares)
    assert (load.shares == ()) == (kind == "barrier")
    assert 0 <= load.memory <= 0.5


def test_a_copy_on_a_device_itself_takes_no_link():
    load = transfer_load(transfer("send", 1, 1, 0, 10**9, 1), toy_cluster(), 0)
    assert load.shares == () and load.compute == load.held == 0 and load.memory == 0.5
