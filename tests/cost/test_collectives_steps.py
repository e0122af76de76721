"""Steps of collectives: carried out on numbers, played on alpha-beta links, and counted."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cost import PricingError, collective_s, sent_bytes
from emu.cost.collectives import choose, moving_s, place, steps
from emu.cost.collectives.schedules import schedule
from emu.hardware import Node, Topology
from emu.hardware import cluster as preset
from emu.trace.events import Collective


def shaped(toy, kind: str, sizes: tuple[int, ...], lanes=(), nodes: int = 1):
    """The toy with wires of some kind inside its nodes: each lane carries the toy's rate over the ports of a device."""
    cluster = toy.cluster(nodes=nodes)
    shape = Topology(kind, sizes, lanes)
    return toy.replace(cluster, node=Node(shape.n_devices, cluster.node.scale_up, shape=shape))


def switched(toy, per_node: int, nodes: int = 1):
    """The toy with switches that sum."""
    cluster = toy.cluster(nodes=nodes, per_node=per_node)
    up = toy.replace(cluster.node.scale_up, in_switch_fraction=1.2, in_switch_latency_s=4e-3)
    out = toy.replace(cluster.scale_out, in_switch_fraction=0.8, in_switch_latency_s=5e-2)
    return toy.replace(cluster, node=toy.replace(cluster.node, scale_up=up), scale_out=out)


CASES = {  # name: cluster of the toy, members, kinds by algorithm
    "ring": (lambda t: t.cluster(per_node=16), range(5), "ring"),
    "ring of 2": (lambda t: t.cluster(), (3, 1), "ring"),
    "ring over nodes": (lambda t: t.cluster(nodes=3, per_node=4), range(12), "ring"),
    "ring that returns to a node": (lambda t: t.cluster(nodes=2, per_node=4), (0, 4, 1, 5), "ring"),
    "tree of 2": (lambda t: t.cluster(), range(2), "tree"),
    "tree": (lambda t: t.cluster(per_node=16), range(8), "tree"),
    "tree of 11": (lambda t: t.cluster(per_node=16), range(11), "tree"),
    "tree over nodes": (lambda t: t.cluster(nodes=5, per_node=3), range(15), "tree"),
    "halving": (lambda t: t.cluster(per_node=16), range(8), "halving_doubling"),
    "halving of 11": (lambda t: t.cluster(per_node=16), range(11), "halving_doubling"),
    "halving over nodes": (lambda t: t.cluster(nodes=4, per_node=4), range(16), "halving_doubling"),
    "direct": (lambda t: t.cluster(), range(6), "direct"),
    "mesh, direct": (lambda t: shaped(t, "full mesh", (8,)), range(8), "direct"),
    "part of a mesh, direct": (lambda t: shaped(t, "full mesh", (8,)), (5, 2, 3), "direct"),
    "hierarchical": (lambda t: t.cluster(nodes=3, per_node=4), range(12), "hierarchical"),
    "hierarchical, in turns": (lambda t: t.cluster(nodes=2, per_node=4), (0, 4, 1, 5), "hierarchical"),
    "in-switch": (lambda t: switched(t, 8), range(8), "in_switch"),
    "in-switch of 3": (lambda t: switched(t, 8), range(3), "in_switch"),
    "in-switch over nodes": (lambda t: switched(t, 4, 3), range(12), "in_switch"),
    "torus of one axis": (lambda t: shaped(t, "torus", (5,)), range(5), "torus"),
    "torus, square": (lambda t: shaped(t, "torus", (4, 4)), range(16), "torus"),
    "torus, cube": (lambda t: shaped(t, "torus", (3, 3, 3)), range(27), "torus"),
    "torus, unequal": (lambda t: shaped(t, "torus", (3, 5)), range(15), "torus"),
    "part of a torus": (lambda t: shaped(t, "torus", (4, 4)), (0, 1, 2, 4, 5, 6), "torus"),
    "every other of a torus": (lambda t: shaped(t, "torus", (4, 8)), (0, 2, 4, 6, 16, 18, 20, 22), "torus"),
    "grid": (lambda t: shaped(t, "grid", (3, 4)), range(12), "torus"),
    "hypercube": (lambda t: shaped(t, "hypercube", (3,)), range(8), "torus"),
    "unlike lanes": (lambda t: shaped(t, "torus", (4, 4), (1, 2)), range(16), "torus"),
}
KINDS = {
    "in_switch": ("all_reduce",),
    "tree": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    "ring": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
}
ALL = [(name, kind) for name, (_, _, algorithm) in CASES.items() for kind in KINDS.get(algorithm, KINDS["tree"][:3])]
S = 10**8


def carried_out(kind: str, cluster, members, algorithm: str, root: int = 0) -> tuple[dict, list[Fraction]]:
    """What each member has of each chunk in the end: how often it holds whose contribution."""
    members = tuple(members)
    plan = schedule(kind, algorithm, members, place(members, cluster), cluster, root)
    n, chunks = len(members), range(len(plan.chunks))
    per = len(chunks) // n
    have: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for r in range(n):
        for c in chunks:
            other = (kind == "broadcast" and r != root) or (kind == "all_gather" and c // per != r)
            if not other:
                have[r, c] = {r: 1}
    at = 0
    moves = sorted(plan.moves, key=lambda m: m.step)
    while at < len(moves):
        end = at
        while end < len(moves) and moves[end].step == moves[at].step:
            end += 1
        arriving = [(m, dict(have[m.src, m.chunk])) for m in moves[at:end]]
        for m, value in arriving:
            assert value, f"{m.src} has nothing of chunk {m.chunk} to send in step {m.step}"
            mine = have[m.dst, m.chunk]
            if m.adds:
                for who, times in value.items():
                    mine[who] = mine.get(who, 0) + times
            else:
                have[m.dst, m.chunk] = value
        at = end
    return have, plan.chunks


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_the_steps_compute_the_collective(toy, name, kind):
    """Every contribution is in every sum exactly once: sums of numbers of any kind come out right."""
    build, members, algorithm = CASES[name]
    n = len(members)
    for root in range(n) if kind in ("broadcast", "reduce") else (0,):
        have, chunks = carried_out(kind, build(toy), members, algorithm, root)
        everyone, per = dict.fromkeys(range(n), 1), len(chunks) // n
        assert sum(chunks) == 1
        for c in range(len(chunks)):
            if kind == "all_reduce":
                assert all(have[r, c] == everyone for r in range(n))
            elif kind == "reduce_scatter":
                assert have[c // per, c] == everyone
            elif kind == "reduce":
                assert have[root, c] == everyone
            else:
                owner = root if kind == "broadcast" else c // per
                assert all(have[r, c] == {owner: 1} for r in range(n))
        if kind in ("all_gather", "reduce_scatter"):  # members' pieces are alike
            assert len({sum(chunks[r * per : (r + 1) * per]) for r in range(n)}) == 1


def played(kind: str, cluster, members, algorithm: str) -> float:
    """Seconds until all is there if a wire carries one chunk after another.

    Steps wait for each other, but in a torus only turns do. What is passed on in pieces takes its latencies one by one, and
    the bytes of the busiest wire once for sums and once for copies.
    """
    found = steps(kind, S, tuple(members), cluster, algorithm)
    up, out, shape = cluster.node.scale_up, cluster.scale_out, cluster.node.shape
    size = cluster.node.devices_per_node
    piped = algorithm in ("tree", "in_switch") and kind not in ("all_gather", "reduce_scatter")
    piped = piped or kind in ("broadcast", "reduce")
    turn = max(axis.hops for axis in place(members, cluster).axes) if algorithm == "torus" else 1
    latencies: dict[int, float] = defaultdict(float)
    busy: dict = defaultdict(lambda: defaultdict(float))
    for one in found:
        near = min(one.src, one.dst) < 0 or one.src // size == one.dst // size
        link = up if near else out
        latencies[one.step] = max(latencies[one.step], link.latency_s)
        together = busy[one.adds if piped else one.step // turn]
        if near and shape is not None:
            for wire in shape.path(one.src % size, one.dst % size):
                lane = up.bytes_per_s / shape.ports * wire.lanes
                together[wire.source, wire.target] += float(one.bytes) / lane
        else:
            together[one.src, "out", near] += float(one.bytes) / link.bytes_per_s
            together[one.dst, "in", near] += float(one.bytes) / link.bytes_per_s
    return sum(latencies.values()) + sum(max(wires.values()) for wires in busy.values())


EXACT = [  # where the closed form leaves nothing out
    *("ring", "ring of 2", "tree of 2", "tree", "tree of 11", "halving", "halving of 11", "halving over nodes"),
    *("direct", "mesh, direct", "part of a mesh, direct", "hierarchical", "hierarchical, in turns"),
    *("torus of one axis", "torus, square", "torus, cube", "torus, unequal", "part of a torus", "hypercube"),
    *("every other of a torus", "grid", "unlike lanes"),
]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in ALL if name in EXACT])
def test_the_steps_played_on_links_take_the_closed_form(toy, name, kind):
    build, members, algorithm = CASES[name]
    cluster = build(toy)
    members = tuple(members)
    seconds = moving_s(kind, S, place(members, cluster), cluster, algorithm)
    assert played(kind, cluster, members, algorithm) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_the_last_step_ends_with_the_price(toy, name, kind):
    build, members, algorithm = CASES[name]
    cluster, members = build(toy), tuple(members)
    found = steps(kind, S, members, cluster, algorithm)
    assert max(one.end_s for one in found) == pytest.approx(
        moving_s(kind, S, place(members, cluster), cluster, algorithm)
    )
    assert min(one.start_s for one in found) >= 0
    for one in found:
        assert one.end_s > one.start_s
        assert one.src != one.dst
    starts = {one.step: one.start_s for one in found}
    assert all(starts[step] < starts[step + 1] for step in range(len(starts) - 1))
    arrived: dict[tuple[int, int], float] = {}
    for one in sorted(found, key=lambda s: s.step):  # nothing is sent before its first piece is there
        assert arrived.get((one.src, one.chunk), 0.0) <= one.start_s + 1e-9
        arrived[one.dst, one.chunk] = max(arrived.get((one.dst, one.chunk), 0.0), one.start_s)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in ALL if "in-switch" not in name])
def test_the_chunks_add_up_to_the_volumes(toy, name, kind):
    """What all members send together; in the ring each of them sends just its share."""
    build, members, algorithm = CASES[name]
    if name == "halving of 11" and kind == "all_reduce":
        pytest.skip("folding sends more: see the next test")
    cluster, members = build(toy), tuple(members)
    event = Collective(kind, "dp", members, 0, S, (), "float32", "", algorithm, 0, "s", "s", 0, "")
    found = steps(kind, S, members, cluster, algorithm)
    sent: dict[int, Fraction] = defaultdict(Fraction)
    for one in found:
        sent[one.src] += Fraction(one.bytes)
    assert sum(sent.values()) == sum(Fraction(sent_bytes(event, r)) for r in members)
    if algorithm == "ring" and kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert all(sent[r] == sent_bytes(event, r) for r in members)


def test_members_beyond_a_power_of_two_send_all_they_have(toy):
    cluster = toy.cluster(per_node=16)
    total = sum(Fraction(one.bytes) for one in steps("all_reduce", S, range(11), cluster, "halving_doubling"))
    assert total == S * (2 * 7 + 2 * 3)


def test_a_switch_that_sums_receives_the_message_and_sends_it_once(toy):
    n = 8
    sent: dict[tuple[bool, int], Fraction] = defaultdict(Fraction)
    for one in steps("all_reduce", S, range(n), switched(toy, n), "in_switch"):
        sent[one.src >= 0, one.src if one.src >= 0 else one.dst] += Fraction(one.bytes)
    assert set(sent.values()) == {S * Fraction(n + 1, n)}
    assert len(sent) == 2 * n


def test_other_kinds_have_steps_too(toy):
    cluster = toy.cluster()
    for kind in ("all_to_all", "gather", "scatter", "ring_shift"):
        event = Collective(kind, "dp", tuple(range(5)), 0, 500, (), "float32", "", "", 2, "s", "s", 0, "")
        found = steps(kind, 500, range(5), cluster, root=2)
        for r in range(5):
            assert sum(one.bytes for one in found if one.src == r) == sent_bytes(event, r)
        assert found[-1].end_s == pytest.approx(collective_s(event, cluster))
    up_the_tree = steps("gather", 500, range(5), cluster, "tree", root=3)
    assert sum(one.bytes for one in up_the_tree if one.dst == 3) == 400
    assert max(one.end_s for one in up_the_tree) == pytest.approx(
        moving_s("gather", 500, place(range(5), cluster), cluster, "tree")
    )
    assert steps("barrier", 0, range(5), cluster) == ()
    assert steps("all_reduce", 500, (3,), cluster) == ()


def test_steps_of_many_members_are_refused():
    cluster = preset("h100", nodes=128)
    with pytest.raises(PricingError, match="1024 members"):
        steps("all_reduce", S, range(1024), cluster)
    assert choose("all_reduce", S, place(range(1024), cluster), cluster).seconds > 0


@settings(max_examples=30)
@given(st.integers(2, 24), st.integers(0, 2**34), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_steps_on_real_links_end_with_the_price(n, size, kind):
    for cluster in (preset("h100", nodes=3), preset("mi300x", nodes=3), preset("tpu-v5e-pod")):
        members = tuple(range(n))
        found = steps(kind, size, members, cluster)
        seconds = moving_s(kind, size, place(members, cluster), cluster)
        assert max(one.end_s for one in found) == pytest.approx(seconds)
