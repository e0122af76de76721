"""Prices of collectives beside published benchmarks, and the fit of what NCCL's own model leaves out."""

from __future__ import annotations

from importlib.resources import files
from statistics import median

import pytest

from emu.cost.collectives import choose, place_evenly
from emu.hardware import cluster as preset
from emu.validate import fit_links

MiB, GiB = 2**20, 2**30


def errors() -> list[tuple[fit_links.Benchmark, float]]:
    found = []
    for one in fit_links.benchmarks():
        at = place_evenly(one.n, one.per_node, one.cluster)
        seconds = choose(one.kind, one.bytes_, at, one.cluster, one.algorithm).seconds
        found.append((one, seconds / one.measured_s - 1))
    return found


def test_large_collectives_are_priced_within_the_goals():
    """Median at most 10 %, worst 25 %, from 1 MB up; of what was fitted to these rows, ten numbers, and of what was not."""
    large = [error for one, error in errors() if one.bytes_ >= MiB]
    print(f"{len(large)} from 1 MiB: median {median(map(abs, large)):.1%}, worst {max(map(abs, large)):.1%}")
    assert len(large) >= 60
    assert median(map(abs, large)) <= 0.10
    assert max(map(abs, large)) <= 0.25
    small = [error for one, error in errors() if one.bytes_ < MiB]
    print(f"{len(small)} below: median {median(map(abs, small)):.1%}, worst {max(map(abs, small)):.1%}")
    assert len(small) >= 10
    assert median(map(abs, small)) <= 0.10


@pytest.mark.parametrize("of", ["all_gather", "reduce_scatter", "mi300x", "b200 nodes"])
def test_rows_that_stand_for_a_topology_are_within_the_goals(of):
    """Gathers by ring; a full mesh by direct exchange; four nodes over EFA."""
    belongs = {
        "all_gather": lambda b: b.kind == "all_gather",
        "reduce_scatter": lambda b: b.kind == "reduce_scatter",
        "mi300x": lambda b: b.cluster.name.startswith("mi300x"),
        "b200 nodes": lambda b: b.n == 32,
    }[of]
    found = [error for one, error in errors() if belongs(one)]
    assert found
    assert max(map(abs, found)) < 0.16


def test_without_what_was_fitted_small_messages_are_far_too_fast():
    """Negative control: launches and filling pipes are what makes the goals."""
    nothing = {one.name: 1e-12 if one.field in ("launch_s", "fill_s") else one.prior for one in fit_links.FREE}
    found = []
    for one in fit_links.benchmarks():
        cluster = fit_links.with_values(one.cluster, nothing)
        at = place_evenly(one.n, one.per_node, cluster)
        seconds = choose(one.kind, one.bytes_, at, cluster, one.algorithm).seconds
        if one.bytes_ >= MiB:
            found.append(seconds / one.measured_s - 1)
    assert min(found) < -0.5


def test_the_fit_gives_the_numbers_of_the_file():
    path = files("emu.hardware") / "data" / "links.toml"
    text = path.read_text(encoding="utf-8")
    found = fit_links.fit(fit_links.benchmarks())
    assert fit_links.written(text, found.values) == text
    priors = {one.name: one.prior for one in fit_links.FREE}
    assert found.loss < fit_links.loss(priors, fit_links.benchmarks()) / 3
    assert fit_links.written(text, priors) != text
    for one in fit_links.FREE:  # none is further from its prior than it may be
        assert abs(fit_links.distance(one, found.values)) < 2.5


@pytest.mark.parametrize(
    ("value", "short"),
    [(2.514e-5, "2.51e-5"), (0.8579, "0.858"), (1.5599e7, "1.56e7"), (30.0, "30"), (2.5e10, "2.5e10")],
)
def test_numbers_are_written_as_toml_has_them(value, short):
    assert fit_links.rounded(value) == short
    assert float(short) == pytest.approx(value, rel=5e-3)


def test_nvls_gains_with_every_device():
    """The switch hands each device S once and its own piece once more: (n+1)/n S, so bus bandwidth grows as
    2(n-1)/(n+1). Measured on H200, 8 GiB: 5: 414, 6: 436, 7: 460, 8: 473 GB/s; 4: 363, as the ring."""
    h200 = preset("h200")
    measured = {4: 363.3, 5: 414.2, 6: 435.6, 7: 460.0, 8: 473.1}
    for n, busbw in measured.items():
        seconds = choose("all_reduce", 8 * GiB, place_evenly(n, n, h200), h200).seconds
        assert 2 * (n - 1) / n * 8 * GiB / seconds / 1e9 == pytest.approx(busbw, rel=0.025)


def test_the_library_changes_its_mind_with_size_as_nccl_does():
    """Small messages go by LL, large ones by Simple; trees first across nodes, rings then; NVLS in a node of Hopper."""
    h100, four, a100 = preset("h100"), preset("h100", nodes=4), preset("a100")
    node, nodes = place_evenly(8, 8, h100), place_evenly(32, 8, four)
    assert choose("all_reduce", 1024, node, h100)[:2] == ("ring", "LL")
    assert choose("all_reduce", GiB, node, h100)[:2] == ("in_switch", "Simple")
    assert choose("all_gather", GiB, node, h100)[:2] == ("ring", "Simple")
    assert choose("all_reduce", GiB, place_evenly(8, 8, a100), a100)[:2] == ("ring", "Simple")
    assert choose("all_reduce", 1024, nodes, four)[:2] == ("tree", "LL")
    assert choose("all_reduce", 4 * GiB, nodes, four)[:2] == ("ring", "Simple")
    protocols = [choose("all_gather", 2**k, nodes, four).protocol for k in range(34)]
    assert [p for i, p in enumerate(protocols) if protocols[i - 1] != p or not i] == ["LL", "LL128", "Simple"]


def test_four_nodes_of_b200_lie_between_a_flat_ring_and_nodes_in_turn():
    """4 GiB on 4 x P6-B200: measured 22.05 ms; by hand, a flat ring over 8 cards 20.8, and one level after the other 26.25."""
    b200 = preset("b200", nodes=4)
    at = place_evenly(32, 8, b200)
    ring, turns = (choose("all_reduce", 4 * GiB, at, b200, how).seconds for how in ("ring", "hierarchical"))
    assert ring == pytest.approx(20.8e-3, rel=0.1)
    assert turns == pytest.approx(26.25e-3, rel=0.1)
