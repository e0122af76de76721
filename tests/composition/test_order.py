"""The order of a mesh's axes decides which links are used, and so the time; it does not change a bit of the gradients."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import emu
from emu.models import Config, Decoder, config
from emu.parallel import Plan, mesh_of
from emu.trace.events import Collective, Transfer

TWO_NODES = emu.cluster("h100", nodes=2)
AXES = ("dp", "pp", "cp", "tp")
OPTIONS = st.fixed_dictionaries(
    {
        "zero": st.sampled_from([0, 1, 3]),
        "schedule": st.sampled_from(["1f1b", "zb-h1", "dualpipe"]),
        "context": st.sampled_from(["zigzag", "ring", "ulysses"]),
        "checkpoint": st.sampled_from(["none", "full"]),
    }
)
SMALL = Config(layers=4, width=8, heads=4, ffn=8, vocab=11, seq=8, norm="rms", positions="rotary")


def step(rank: emu.Rank, plan: Plan, shape: Config, seq: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dist = emu.parallelize(Decoder(shape, seed=0), plan, rank)
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randint(shape.vocab, (plan.global_batch, seq), generator=g) for _ in "xy")
    dist.backward(emu.Batch(x, y, tokens=y.numel()), microbatches=plan.accumulated())
    return dist.gather_gradients()


def run_of(axes: tuple[str, ...], options: dict[str, Any]) -> emu.Run:
    mesh = ",".join(f"{axis}=2" for axis in axes)
    plan = Plan(mesh, precision="fp32", microbatches=2, global_batch=4, seq=8, **options)
    return emu.launch(step, mesh_of(plan, TWO_NODES), args=(plan, SMALL, 8), track=False)


def bytes_by_link(run: emu.Run) -> dict[str, int]:
    """What all ranks together give to messages within a node (NVLink), and between nodes (network)."""
    found = {"NVLink": 0, "network": 0}
    for events in run.trace.events.values():
        for event in events:
            if type(event) is Collective and len(event.members) > 1:
                ranks = event.members
            elif type(event) is Transfer and event.kind == "send":
                ranks = (event.src, event.dst)
            else:
                continue
            found["NVLink" if len(set(map(run.cluster.node_of, ranks))) == 1 else "network"] += event.bytes
    return found


def same_bits(one: emu.Run, other: emu.Run) -> bool:
    a, b = one.results[0], other.results[0]
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


ORDERS = [axes for axes in permutations(AXES) if axes.index("dp") < axes.index("cp")]


@lru_cache
def first(options: tuple[tuple[str, Any], ...]) -> emu.Run:
    return run_of(AXES, dict(options))


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])  # a run is dear: no shrinking
@given(st.sampled_from(ORDERS[1:]), OPTIONS)
def test_another_order_of_axes_has_the_same_bits_in_plain_float32(axes: tuple[str, ...], options: dict) -> None:
    """What is summed over dp and cp together is summed in the mesh's order, so these two stay as they are."""
    one, other = first(tuple(options.items())), run_of(axes, options)
    assert len(one.results[0]) > 20 and same_bits(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", ORDERS)
def test_every_order_has_the_same_bits(axes: tuple[str, ...]) -> None:
    for zero in (0, 1, 2, 3):
        assert same_bits(first((("zero", zero),)), run_of(axes, {"zero": zero}))


def test_where_sums_change_their_order_only_their_last_bits_do() -> None:
    """dp and cp change places; tier exact, in which sums are exact, is the same for every order (see test_plans.py)."""
    one, other = first((("zero", 1),)), run_of(("cp", "dp", "pp", "tp"), {"zero": 1})
    assert not same_bits(one, other)  # so that bits are seen at all
    a, b = one.results[0], other.results[0]
    assert all((a[name] - b[name]).abs().max() <= 1e-5 * a[name].abs().max() for name in a)


def test_time_and_traffic_of_each_link_follow_the_order() -> None:
    """The outermost axis alone crosses two nodes of eight devices: pipelines say little, tensor parallelism much."""
    runs = {axes[0]: run_of(axes, {"zero": 1}) for axes in (("pp", *["dp", "cp", "tp"]), ("tp", *["dp", "cp", "pp"]))}
    assert same_bits(*runs.values())
    links = {outermost: bytes_by_link(run) for outermost, run in runs.items()}
    assert sum(links["pp"].values()) == sum(links["tp"].values())  # the same messages, elsewhere
    assert 0 < links["pp"]["network"] < links["tp"]["network"] / 10
    assert runs["pp"].metrics.step_time_s < runs["tp"].metrics.step_time_s


README = (Path(__file__).parents[2] / "README.md").read_text()
ROWS = re.findall(r"^\| `mesh=\"([a-z0-9=,]+)\"` \| ([0-9.]+) ms \| ([0-9.]+) GB \| ([0-9.]+) GB \|$", README, re.M)


@lru_cache
def large(mesh: str) -> tuple[str, str, str]:
    """Two layers of gpt-small with 16 heads and 1,024 tokens, of shapes alone: its step time, and what is given to each link."""
    plan = Plan(mesh, sp=True, global_batch=64, seq=1024)
    shape = replace(config("gpt-small"), heads=16, kv_heads=16, head_dim=48, layers=2, vocab=1024)
    run = emu.launch(step, mesh_of(plan, TWO_NODES), args=(plan, shape, 1024), backend="shape")
    links = bytes_by_link(run)
    return f"{run.metrics.step_time_s * 1e3:.0f}", f"{links['NVLink'] / 1e9:.1f}", f"{links['network'] / 1e9:.1f}"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_readme_says_what_an_order_costs(row: tuple[str, str, str, str]) -> None:
    assert large(row[0]) == row[1:]


def test_readme_compares_two_orders() -> None:
    assert {row[0] for row in ROWS} == {"dp=2,tp=8", "tp=8,dp=2"}
