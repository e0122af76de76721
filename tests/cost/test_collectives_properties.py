"""What holds of the prices of all collectives, wherever a group lies."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cost import PricingError, collective_s
from emu.cost.collectives import ALGORITHMS, KINDS, choose, moving_s, place, place_evenly
from emu.cost.collectives.choice import candidates
from emu.cost.collectives.kinds import BY
from emu.hardware import Cluster
from emu.hardware import cluster as preset
from emu.trace.events import Collective

GiB = 2**30
CLUSTERS = {
    name: preset(name, **({"nodes": nodes} if nodes else {}))
    for name, nodes in {
        **{"a100": 4, "h100": 8, "b200": 4, "mi300x": 2, "v100": 2, "gb200": 2},
        **dict.fromkeys(("tpu-v5e-pod", "tpu-v4-cube", "llama3-24576", "h100-rails-1024", "trn2-ultraserver"), 0),
    }.items()
}
groups = st.tuples(st.sampled_from(sorted(CLUSTERS)), st.integers(1, 40), st.integers(1, 8)).map(
    lambda g: (CLUSTERS[g[0]], min(g[1], g[2] * CLUSTERS[g[0]].nodes), g[2])
)
sizes = st.one_of(st.integers(0, 2**16), st.integers(0, 2**36))


def possible(kind: str, at, cluster: Cluster) -> list[str]:
    found = []
    for algorithm in ALGORITHMS:
        try:
            moving_s(kind, 1, at, cluster, algorithm)
        except PricingError:
            continue
        found.append(algorithm)
    return found


@settings(max_examples=300)
@given(groups, st.sampled_from(KINDS), sizes, sizes)
def test_more_bytes_never_take_less_time(group, kind, a, b):
    cluster, n, per_node = group
    at = place_evenly(n, per_node, cluster)
    small, large = sorted((a, b))
    for algorithm in ("", *possible(kind, at, cluster)):
        assert moving_s(kind, small, at, cluster, algorithm) <= moving_s(kind, large, at, cluster, algorithm) * (
            1 + 1e-12
        )
    if n > 1 and kind != "barrier":  # negative control
        assert moving_s(kind, large + 2**38, at, cluster) > moving_s(kind, large, at, cluster)


@given(st.sampled_from(sorted(CLUSTERS)), st.sampled_from(KINDS), sizes, st.sampled_from(("", *ALGORITHMS)))
def test_a_group_of_one_is_free(name, kind, size, algorithm):
    cluster = CLUSTERS[name]
    assert moving_s(kind, size, place_evenly(1, 1, cluster), cluster, algorithm) == 0.0


@settings(max_examples=200)
@given(groups, st.sampled_from(KINDS), sizes)
def test_twice_the_bandwidth_never_takes_longer(toy, group, kind, size):
    cluster, n, per_node = group
    at = place_evenly(n, per_node, cluster)
    up, out = (
        toy.replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)
        for link in (cluster.node.scale_up, cluster.scale_out)
    )
    inside = toy.replace(cluster, node=toy.replace(cluster.node, scale_up=up))
    both = toy.replace(inside, scale_out=out)
    for algorithm in ("", *possible(kind, at, cluster)):
        seconds = moving_s(kind, size, at, cluster, algorithm)
        assert moving_s(kind, size, at, inside, algorithm) <= seconds
        assert moving_s(kind, size, at, both, algorithm) <= seconds
    if n > 1 and kind != "barrier":
        assert moving_s(kind, 2**40, at, both) < 0.51 * moving_s(kind, 2**40, at, cluster)


@settings(max_examples=200)
@given(groups, st.sampled_from(sorted(BY)), sizes)
def test_the_choice_is_the_fastest_that_the_library_has(group, kind, size):
    cluster, n, per_node = group
    at = place_evenly(n, per_node, cluster)
    chosen = choose(kind, size, at, cluster)
    if n > 1 and kind not in ("gather", "scatter"):
        having = [name for name in candidates(kind, at) if name in possible(kind, at, cluster)]
        assert chosen.algorithm in having
        assert chosen.seconds == min(moving_s(kind, size, at, cluster, name) for name in having)


@settings(max_examples=50)
@given(groups, st.sampled_from([kind for kind in KINDS if kind != "all_to_all"]), sizes)
def test_an_event_costs_what_its_numbers_cost(group, kind, size):
    """One price list: of members, and of how many lie in how many nodes."""
    cluster, n, per_node = group
    members = tuple(i // per_node * cluster.node.devices_per_node + i % per_node for i in range(n))
    event = Collective(kind, "dp", members, 0, size, (), "float32", "", "", 0, "s", "s", 0, "")
    assert collective_s(event, cluster) == moving_s(kind, size, place_evenly(n, per_node, cluster), cluster)


def test_a_price_is_worked_out_once_for_a_group():
    """Sixteen thousand members are gone through once, and then no more."""
    cluster = CLUSTERS["llama3-24576"]

    looked = Counter()

    class Members(tuple):
        def __iter__(self):
            looked["all"] += 1
            return super().__iter__()

    members = Members(range(16384))
    at = place(members, cluster)
    once = looked["all"]
    assert once <= 4
    event = Collective("all_reduce", "dp", members, 0, GiB, (), "bfloat16", "", "", -1, "s", "s", 0, "")
    for size in range(100):
        collective_s(event._replace(bytes=size * 2**20), cluster, placement=at)
    assert looked["all"] == once
    assert place_evenly(16384, 8, cluster) == at
