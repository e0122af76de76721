"""Collectives: closed forms, rings played step by step, and measured bandwidths."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost import PricingError, collective_s, sent_bytes, transfer_s
from emu.cost.collectives import KINDS
from emu.hardware import cluster as preset
from emu.trace.events import Collective, Transfer

S = 10**8


def call(kind: str, n: int, size: int, sizes=(), algorithm="", root=-1, members=None) -> Collective:
    members = tuple(range(n)) if members is None else tuple(members)
    return Collective(kind, "dp", members, 0, size, tuple(sizes), "float32", "", algorithm, root, "s", "s", 0, "")


@pytest.mark.parametrize("n", [2, 3, 8])
def test_closed_forms_inside_a_node(toy, n):
    a, b, cluster = toy.alpha_s, toy.rate, toy.cluster()
    share = (n - 1) / n * S / b
    log2 = {2: 1, 3: 2, 8: 3}[n]
    expected = {
        ("all_reduce", ""): 2 * (n - 1) * a + 2 * share,
        ("all_gather", ""): (n - 1) * a + share,
        ("reduce_scatter", ""): (n - 1) * a + share,
        ("all_to_all", ""): a + share,  # up to eight messages at once
        ("broadcast", ""): (n - 1) * a + S / b,
        ("reduce", ""): (n - 1) * a + S / b,
        ("gather", ""): a + share,
        ("scatter", ""): a + share,
        ("ring_shift", ""): a + S / b,
        ("barrier", ""): 2 * (n - 1) * a,
        ("all_reduce", "tree"): 2 * log2 * a + 2 * S / b,
        ("broadcast", "tree"): log2 * a + S / b,
        ("all_gather", "tree"): log2 * a + share,
        ("all_reduce", "direct"): 2 * a + 2 * share,
    }
    for (kind, algorithm), seconds in expected.items():
        root = 0 if kind in ("broadcast", "reduce", "gather", "scatter") else -1
        assert collective_s(call(kind, n, S, (), algorithm, root), cluster) == pytest.approx(seconds), (kind, algorithm)


def test_a_ring_crosses_the_network_once_a_node_and_uses_every_card(toy):
    cluster = toy.cluster(nodes=2, per_node=4)  # outside: ten times the latency, a tenth of the bandwidth, a card each
    a, b = toy.alpha_s, toy.rate
    seconds = collective_s(call("all_gather", 8, S), cluster)
    assert seconds == pytest.approx(6 * a + 10 * a + 7 / 8 * S / (4 * b / 10))
    one_a_node = collective_s(call("all_gather", 2, S, members=(0, 4)), cluster)
    assert one_a_node == pytest.approx(10 * a + S / 2 / (b / 10))


def test_the_largest_piece_paces_an_uneven_ring(toy):
    even = collective_s(call("all_gather", 4, 400), toy.cluster())
    uneven = collective_s(call("all_gather", 4, 400, (250, 50, 100, 0)), toy.cluster())
    assert uneven - even == pytest.approx(3 * 150 / toy.rate)
    assert collective_s(call("all_gather", 4, 400, (100,) * 4), toy.cluster()) == pytest.approx(even)


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=4, max_size=4), min_size=4, max_size=4), st.booleans())
def test_all_to_all_ends_with_its_busiest_device(toy, matrix, spread):
    cluster = toy.cluster(nodes=2, per_node=2) if spread else toy.cluster()
    parts = {r: call("all_to_all", 4, sum(row), row) for r, row in enumerate(matrix)}
    longest = 0.0
    for i in range(4):
        for j in range(4):
            near = cluster.node_of(i) == cluster.node_of(j)
            rate = toy.rate if near else toy.rate / 10
            peers = [k for k in range(4) if k != i and (cluster.node_of(k) == cluster.node_of(i)) == near]
            longest = max(longest, sum(matrix[i][k] for k in peers) / rate, sum(matrix[k][i] for k in peers) / rate)
    latency_s = 10 * toy.alpha_s if spread else toy.alpha_s
    assert collective_s(parts[0], cluster, parts) == pytest.approx(latency_s + longest)


def test_even_all_to_all_agrees_with_its_sizes(toy):
    for cluster in (toy.cluster(), toy.cluster(nodes=2, per_node=4)):
        even, given_sizes = call("all_to_all", 8, 800), call("all_to_all", 8, 800, (100,) * 8)
        assert collective_s(even, cluster) == pytest.approx(collective_s(given_sizes, cluster))


def test_groups_of_one_are_free_and_others_last_as_long_as_a_kernel():
    h100 = preset("h100")
    for kind in KINDS:
        assert collective_s(call(kind, 1, S, root=0), h100) == 0.0
        assert collective_s(call(kind, 2, 0, root=0), h100) >= h100.chip.kernel_s > 0


def test_a_ring_shift_is_as_slow_as_its_slowest_link_and_largest_message(toy):
    far = toy.cluster(nodes=2, per_node=2)
    assert collective_s(call("ring_shift", 2, S), far) == pytest.approx(toy.alpha_s + S / toy.rate)
    assert collective_s(call("ring_shift", 4, S), far) == pytest.approx(10 * (toy.alpha_s + S / toy.rate))
    assert collective_s(call("ring_shift", 2, 7, (S, 7)), far) == pytest.approx(toy.alpha_s + S / toy.rate)


def test_unknown_collectives_and_algorithms_are_errors(toy):
    with pytest.raises(PricingError, match="'all_scatter'"):
        collective_s(call("all_scatter", 2, 1), toy.cluster())
    with pytest.raises(PricingError, match="algorithm 'butterfly'") as caught:
        collective_s(call("all_reduce", 2, 1, algorithm="butterfly"), toy.cluster())
    assert "ring, tree, halving_doubling" in caught.value.hint
    with pytest.raises(PricingError, match="'in_switch' is not possible for 2 ranks in 1 node of toy") as caught:
        collective_s(call("all_reduce", 2, 1, algorithm="in_switch"), toy.cluster())
    assert "a switch that sums" in caught.value.hint and "'ring' here" in caught.value.hint


@given(st.sampled_from(sorted(KINDS)), st.integers(2, 16), st.integers(0, 10**9), st.sampled_from(["", "tree"]))
def test_more_bandwidth_and_less_latency_never_cost_more(toy, kind, n, size, algorithm):
    event = call(kind, n, size, (), algorithm, 0)
    for shape in ({"per_node": 16}, {"nodes": 4, "per_node": 4}):
        slow = collective_s(event, toy.cluster(**shape))
        assert collective_s(event, toy.cluster(**shape, rate=2e9)) <= slow
        assert collective_s(event, toy.cluster(**shape, alpha_s=5e-4)) < slow  # strictly: every kind has latency
        if size and kind != "barrier":  # negative control: bandwidth counts
            assert collective_s(event, toy.cluster(**shape, rate=1e9 / 2)) > slow


# Volumes: play the algorithms and count what each rank sends.


def ring_all_gather(pieces):
    n, sent = len(pieces), [0] * len(pieces)
    have = [{r} for r in range(n)]
    for step in range(n - 1):
        moves = [(r, (r - step) % n) for r in range(n)]
        for r, piece in moves:
            assert piece in have[r]
            have[(r + 1) % n].add(piece)
            sent[r] += pieces[piece]
    assert all(len(h) == n for h in have)
    return sent


def ring_reduce_scatter(pieces):
    n, sent = len(pieces), [0] * len(pieces)
    summed = [[{r} for _ in range(n)] for r in range(n)]  # whose shares of each piece a rank has summed
    for step in range(n - 1):
        for r in range(n):
            piece = (r - 1 - step) % n
            sent[r] += pieces[piece]
            summed[(r + 1) % n][piece] = summed[(r + 1) % n][piece] | summed[r][piece]
    assert all(len(summed[r][r]) == n for r in range(n))
    return sent


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_uneven_rings_send_the_exact_pieces(pieces):
    n, size = len(pieces), sum(pieces)
    for kind, played in (("all_gather", ring_all_gather), ("reduce_scatter", ring_reduce_scatter)):
        assert [sent_bytes(call(kind, n, size, pieces), r) for r in range(n)] == (played(pieces) if n > 1 else [0])


@given(st.integers(2, 12), st.integers(0, 10**6), st.data())
def test_volumes_of_the_formulas(n, size, data):
    """Ring volumes as in formulas that every text gives: all-gather X(n-1)/n, all-reduce twice that."""
    r = data.draw(st.integers(0, n - 1))
    share = Fraction(size * (n - 1), n)
    assert sent_bytes(call("all_gather", n, size), r) == share
    assert sent_bytes(call("reduce_scatter", n, size), r) == share
    assert sent_bytes(call("all_to_all", n, size), r) == share
    assert sent_bytes(call("all_reduce", n, size), r) == 2 * share
    assert sent_bytes(call("barrier", n, 0), r) == 0
    assert sent_bytes(call("ring_shift", n, size), r) == size
    assert sent_bytes(call("ring_shift", n, size, range(n)), r) == r
    for kind in ("all_reduce", "all_gather"):
        value = sent_bytes(call(kind, n, size), r)
        assert isinstance(value, int) == (Fraction(value).denominator == 1)


@given(st.integers(2, 8), st.integers(0, 1000), st.data())
def test_rooted_volumes_add_up(n, size, data):
    root = data.draw(st.integers(0, n - 1))
    for kind in ("broadcast", "reduce"):  # a chain has n - 1 hops
        assert sum(sent_bytes(call(kind, n, size, root=root), r) for r in range(n)) == (n - 1) * size
    for kind in ("gather", "scatter"):
        assert sum(sent_bytes(call(kind, n, size, root=root), r) for r in range(n)) == Fraction(size * (n - 1), n)
    assert sent_bytes(call("reduce", n, size, root=root), root) == 0
    assert sent_bytes(call("broadcast", n, size, root=root), root) == size


def test_a_transfer_is_sent_by_its_sender():
    halves = [Transfer(kind, "pp", 0, 1, 0, 64, "float32", "s", "s", 0, "") for kind in ("send", "recv")]
    assert [sent_bytes(half, 0) for half in halves] == [64, 0]


def test_a_transfer_takes_the_link_between_its_ranks(toy):
    cluster = toy.cluster(nodes=2, per_node=2)
    near, far = (Transfer("send", "pp", 0, dst, 0, S, "float32", "s", "s", 0, "") for dst in (1, 2))
    assert transfer_s(near, cluster) == pytest.approx(toy.alpha_s + S / toy.rate)
    assert transfer_s(far, cluster) == pytest.approx(10 * transfer_s(near, cluster))
