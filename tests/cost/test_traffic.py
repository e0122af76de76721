"""What links carry in a trace: closed forms, sums, and the loads that the engine works contention out from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.cost import price, sent_bytes
from emu.cost.routes import ABOVE, HOST, OUT, UP, WIRE, bytes_per_s, lane_bytes_per_s
from emu.cost.traffic import carried
from emu.hardware import Fabric, Topology, cluster
from emu.trace.events import HostCopy, Wait
from emu.trace.trace import Trace

from .conftest import collective, toy_cluster, transfer

EVEN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_shift")


def trace_of(members, size, kind="all_reduce", times=1, ranks=8):
    own = [collective(members, seq, size, seq, kind) for seq in range(times)]
    return Trace({"dp": ranks}, {r: [*own, *(Wait(e.work, "default") for e in own)] for r in members})


def by_link(timeline):
    return {(one.level, one.place, one.way): one.bytes for one in carried(timeline)}


@given(st.integers(2, 8), st.integers(1, 10**9), st.integers(1, 3))
def test_a_ring_sends_its_share_over_every_devices_link(n, size, times):
    found = by_link(price(trace_of(range(n), size, times=times, ranks=n), toy_cluster()))
    each = pytest.approx(times * 2 * (n - 1) / n * size)
    assert found == {(UP, device, way): each for device in range(n) for way in ("out", "in")}


@pytest.mark.parametrize("size", [1, 16 * 10**6])
def test_two_nodes_of_eight_pass_the_ring_over_the_network_by_all_their_cards(size):
    found = by_link(price(trace_of(range(16), size, ranks=16), toy_cluster(2)))
    whole = 2 * 15 / 16 * size
    out = [found[OUT, device, "out"] for device in range(16)]
    assert sum(out[:8]) == sum(out[8:]) == pytest.approx(whole)  # once out of each node, by eight cards
    assert found[UP, 3, "out"] == pytest.approx(whole * 7 / 8)


@given(st.sampled_from(EVEN), st.integers(0, 10**6), st.lists(st.integers(0, 15), min_size=2, max_size=12, unique=True))
def test_all_links_carry_together_what_ranks_send(kind, each, members):
    size = each * len(members)
    (event,) = [e for e in trace_of(members, size, kind)[members[0]] if hasattr(e, "members")]
    found = by_link(price(trace_of(members, size, kind, ranks=len(members)), toy_cluster(4, 4)))
    sent = sum(sent_bytes(event, rank) for rank in members)
    for way in ("out", "in"):
        assert sum(size for (_, _, went), size in found.items() if went == way) == pytest.approx(float(sent))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(EVEN), st.integers(1, 10**7)), min_size=1, max_size=4), st.booleans())
def test_links_carry_what_the_engine_took_of_them(calls, thin):
    there = toy_cluster(4, 4)
    if thin:
        node = replace(there.node, shape=Topology("switch", (4,)))
        there = replace(there, node=node, fabric=Fabric(4, 8, 4.0))
    own = [collective(range(16), seq, size * 16, seq, kind) for seq, (kind, size) in enumerate(calls)]
    trace = Trace({"dp": 16}, {r: [*own, *(Wait(e.work, "default") for e in own)] for r in range(16)})
    timeline = price(trace, there)
    taken = defaultdict(float)
    for i in range(len(own)):
        load = timeline._costs[0][i]
        for link, share in load.shares:
            assert share < 1  # the rates leave latency some time
            taken[link] += share * load.seconds * bytes_per_s(there)[link[1]]
    found = {
        (
            (one.place[0], ABOVE, one.place[1], one.way) if one.level == ABOVE else (one.place, one.level, one.way)
        ): one.bytes
        for one in carried(timeline)
    }
    assert found == pytest.approx(dict(taken))
    assert thin == any(one.level == ABOVE for one in carried(timeline))


def test_a_message_counts_once_though_both_ranks_record_it():
    events = {0: [transfer("send", 0, 9, 0, 1000, 0)], 9: [transfer("recv", 0, 9, 0, 1000, 0)]}
    found = by_link(price(Trace({"pp": 2}, events), toy_cluster(2)))
    assert found == {(OUT, 0, "out"): 1000, (OUT, 9, "in"): 1000}


def test_copies_to_the_host_are_on_the_hosts_link():
    events = [HostCopy("to_host", i, 500, "float32", "default", "") for i in range(3)]
    (one,) = carried(price(Trace({}, {2: events}), toy_cluster()))
    assert (one.level, one.place, one.way, one.bytes, one.bytes_per_s) == (HOST, 2, "to_host", 1500, 1e9)
    assert one.utilisation(3e-6) == pytest.approx(0.5) and one.utilisation(0.0) == 0.0


def test_links_of_ranks_without_a_record_are_left_out():
    whole = trace_of(range(8), 800)
    part = Trace(whole.axes, {rank: whole[rank] for rank in (0, 5)})
    full, some = (by_link(price(trace, toy_cluster())) for trace in (whole, part))
    assert some == {link: size for link, size in full.items() if link[1] in (0, 5)}


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("name", ["mi300x-8", "v100-8", "tpu-v4-cube", "trn2"])
def test_wires_carry_at_least_what_devices_send(name, kind):
    """A message takes one wire or more, each of which is one of its shape's, with that wire's rate."""
    there = cluster(name)
    n = min(there.node.devices_per_node, 16)
    found = carried(price(trace_of(range(n), 10**6 * n, kind, ranks=n), there))
    wires = [one for one in found if one.level == WIRE]
    lanes = {(w.source, w.target): w.lanes for w in there.node.shape.wires}
    for one in wires:
        _, a, b = one.place
        assert one.bytes_per_s == pytest.approx(lane_bytes_per_s(there) * lanes[min(a, b), max(a, b)])
    sent = sum(one.bytes for one in found if (one.level, one.way) == (UP, "out"))
    assert sum(one.bytes for one in wires) >= sent * (1 - 1e-9)
    if name == "mi300x-8" and kind == "all_to_all":
        assert [one.bytes for one in wires] == pytest.approx([10**6] * 56)


def test_the_links_of_a_run_carry_what_its_metrics_say_it_sent():
    def program(rank):
        dp, tp = rank.group("dp"), rank.group("tp")
        x = torch.ones(1000, device=rank.device)
        dp.all_reduce(x)
        tp.all_gather(x)
        if rank.id < 2:
            pair = rank.group(members=[0, 1])
            pair.send(x, 1) if rank.id == 0 else pair.recv(x, 0)

    run = emu.launch(program, emu.Mesh(dp=2, tp=4))
    out = {one.place: one.bytes for one in carried(run.timeline()) if one.way == "out"}
    dp, tp, one_message = 4000, 3 * 4000, 4000
    assert out == pytest.approx({rank: dp + tp + (one_message if rank == 0 else 0) for rank in range(8)})
    assert max(out.values()) == sum(run.metrics.comm_bytes.values())
