"""Messages that use the same links at one time share them: hand-made traces whose times are known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emu.cost import price
from emu.hardware import Fabric, Topology
from emu.trace.trace import Trace

from .test_contention import MB, copy, ring_s, timeline


def shared_s(sizes, rate, alpha_s):
    """When messages end that start at once on one link, each bound by alpha_s + size / rate alone; equal sizes only."""
    (size,) = set(sizes)
    share = size / rate / (alpha_s + size / rate)
    return (alpha_s + size / rate) * max(1.0, len(sizes) * share)


def test_groups_share_the_ports_of_the_devices_that_they_have_in_common(toy):
    a = toy.collective((0, 1), 0, 100 * MB, 1, group="a", stream="a")
    b = toy.collective((0, 2), 0, 100 * MB, 2, group="b", stream="b")
    done = timeline([[a, b], [a], [b]], toy.cluster())
    alone = ring_s(toy, 2, 100 * MB)
    share = 100 * MB / toy.rate / alone
    assert done.step_time_s == pytest.approx(alone * 2 * share)
    assert done.spans[1][0].stretch_s == pytest.approx(alone * (2 * share - 1))
    apart = b._replace(members=(2, 3))
    assert timeline([[a], [a], [apart], [apart]], toy.cluster()).step_time_s == pytest.approx(alone)


def test_groups_between_nodes_share_the_cards_of_their_members_only(toy):
    there = toy.cluster(nodes=2, per_node=2)  # devices 0 1 | 2 3; cards are ten times slower
    a = toy.collective((0, 2), 0, 10 * MB, 1, group="a", stream="a")
    same = toy.collective((0, 2), 0, 10 * MB, 2, group="b", stream="b")
    other = toy.collective((1, 3), 0, 10 * MB, 2, group="b", stream="b")
    alone = timeline([[a], [], [a]], there).step_time_s
    assert timeline([[a], [other], [a], [other]], there).step_time_s == pytest.approx(alone)
    share = 10 * MB / (toy.rate / 10) / alone
    assert timeline([[a, same], [], [a, same]], there).step_time_s == pytest.approx(alone * 2 * share)


def test_messages_both_ways_share_nothing_and_one_way_they_do(toy):
    def run(*pairs):
        events = {r: [] for r in range(4)}
        for i, (src, dst) in enumerate(pairs):
            for kind, rank in (("send", src), ("recv", dst)):
                events[rank].append(toy.transfer(kind, src, dst, i, 100 * MB, i, stream=f"s{i}", after=f"s{i}"))
        return price(Trace({}, events), toy.cluster()).step_time_s

    alone, two = shared_s([100 * MB], toy.rate, toy.alpha_s), shared_s([100 * MB] * 2, toy.rate, toy.alpha_s)
    assert run((0, 1)) == run((0, 1), (1, 0)) == run((0, 1), (2, 3)) == pytest.approx(alone)
    assert run((0, 1), (0, 2)) == run((0, 2), (1, 2)) == run((0, 1), (0, 1)) == pytest.approx(two)
    assert two == pytest.approx(2 * alone, rel=0.02)


def test_a_message_goes_on_at_full_speed_when_the_other_is_done(toy):
    first = toy.transfer("send", 0, 1, 0, 100 * MB, 1, stream="a", after="a")
    second = toy.transfer("send", 0, 2, 0, 100 * MB, 2, stream="b", after="b")
    late = toy.cluster(launch_s=0.05, alpha_s=0.0)
    done = price(Trace({}, {0: [first, second]}), late)  # ranks 1 and 2 are symbolic
    # 50 ms alone, then half speed for 100 ms, then the rest of the second one alone.
    assert [s.end_s for s in done.spans[0]] == pytest.approx([0.05 + 0.15, 0.05 + 0.2])


def test_a_small_message_keeps_the_little_that_it_needs(toy):
    """Max-min: a flow that takes a tenth of the link alone is not slowed by one that would take all."""
    slow = toy.cluster(alpha_s=0.9e-1)
    small = toy.transfer("send", 0, 1, 0, 10 * MB, 1, stream="a", after="a")  # 90 ms of latency, 10 ms of bytes
    large = toy.transfer("send", 0, 2, 0, 10**12, 2, stream="b", after="b")
    done = price(Trace({}, {0: [small, large]}), slow)
    assert done.spans[0][0].end_s == pytest.approx(0.1)
    assert done.spans[0][1].stretch_s == pytest.approx(0.1 * 0.1, rel=1e-3)


def test_copies_share_the_host_link_by_direction(toy):
    alone = shared_s([100 * MB], toy.rate, toy.alpha_s)
    there = toy.cluster()
    assert timeline([[copy("to_host", 100 * MB, "a"), copy("from_host", 100 * MB, "b")]], there).step_time_s == alone
    both = timeline([[copy("to_host", 100 * MB, "a"), copy("to_host", 100 * MB, "b")]], there)
    assert both.step_time_s == pytest.approx(shared_s([100 * MB] * 2, toy.rate, toy.alpha_s))
    apart = timeline([[copy("to_host", 100 * MB, "a")], [copy("to_host", 100 * MB, "a")]], there)
    assert apart.step_time_s == alone, "every device has a link of its own"


@pytest.mark.parametrize("kind", ["fat tree", "rails"])
def test_groups_share_what_leads_up_from_an_oversubscribed_pod(toy, kind):
    """Four devices a pod whose uplinks carry one card's worth: a group alone has it all, four have a quarter each."""
    flat = toy.cluster(nodes=8, per_node=1, alpha_s=0.0)
    thin = replace(flat, fabric=Fabric(2, 4, 4.0, kind))
    events: list = [[] for _ in range(8)]
    for i in range(4):
        for member in (i, i + 4):
            events[member].append(toy.collective((i, i + 4), 0, MB, 1, group=f"g{i}", stream="g"))
    alone = timeline([events[0], [], [], [], events[4]], thin).step_time_s
    assert timeline(events, thin).step_time_s == pytest.approx(4 * alone)
    assert timeline(events, replace(flat, fabric=Fabric(2, 4, 1.0, kind))).step_time_s == pytest.approx(alone)
    inside = [[toy.collective((i & 6, i | 1), 0, MB, 1, group=f"g{i // 2}", stream="g")] for i in range(8)]
    assert timeline(inside, thin).step_time_s == pytest.approx(alone), "what stays in the pod does not go up"


def test_in_a_node_without_a_switch_messages_meet_on_wires(toy):
    """Along a line of four, 0 to 2 passes over the wire from 1 to 2, on which 1 to 2 goes, too."""
    flat = toy.cluster(per_node=4, alpha_s=0.0)
    line = replace(flat, node=replace(flat.node, shape=Topology("grid", (4,)), ports=2))

    def run(*pairs):
        events: list = [[] for _ in range(4)]
        for i, (src, dst) in enumerate(pairs):
            for kind, rank in (("send", src), ("recv", dst)):
                events[rank].append(toy.transfer(kind, src, dst, i, MB, i, stream=f"s{i}", after=f"s{i}"))
        return timeline(events, line).step_time_s

    assert run((0, 2), (1, 2)) == pytest.approx(2 * run((1, 2)))
    assert run((0, 1), (2, 3)) == pytest.approx(run((0, 1)))
