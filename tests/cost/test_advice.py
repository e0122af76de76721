"""Advice: each slip is seen and its gain priced; a run without it is told nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.cost import advise, price
from emu.models import Decoder, config
from emu.models.text import batches
from emu.trace.events import HostWait, Kernel, Wait
from emu.trace.trace import Trace

from .conftest import collective, kernel, toy_cluster


def fast(launch_s: float = 0.0, **rates):
    """The toy with tensor cores: ten times the rate in bfloat16."""
    cluster = toy_cluster(launch_s=launch_s)
    peaks = {"float64": 1e12, "float32": 1e12, "bfloat16": 1e13, **rates}
    return replace(cluster, chip=replace(cluster.chip, peak_flops=peaks, achievable_flops=peaks))


def product(seconds: float, dtype: str = "float32", **fields) -> Kernel:
    return kernel(seconds, name="mm", dtype=dtype, dims=(1, 8, 8, 8), scope="blocks.0", **fields)


def told(trace: dict, cluster, axes=None):
    return {a.kind: a for a in advise(price(Trace(axes or {"dp": len(trace)}, trace), cluster))}


# Products in float32.


def test_float32_products_where_tensor_cores_are_faster():
    advice = told({0: [product(0.8), kernel(0.2)]}, fast())["float32 products"]
    assert advice.gain_s == pytest.approx(0.8 - 0.08) and advice.gain == pytest.approx(0.72)
    assert (
        "80.0 %" in advice.what and advice.where == "blocks.0" and "bf16" in advice.hint and "TF32" not in advice.hint
    )


def test_tf32_is_named_where_the_chip_has_it():
    advice = told({0: [product(0.8), kernel(0.2)]}, fast(tf32=4e12))["float32 products"]
    assert "TF32 600 ms, bfloat16 720 ms less" in advice.what and "set_float32_matmul_precision" in advice.hint


@pytest.mark.parametrize(
    ("events", "cluster"),
    [
        ([product(0.8, "bfloat16")], fast()),
        ([product(0.8, "float64")], fast()),
        ([kernel(0.8)], fast()),  # no product
        ([product(0.8)], toy_cluster()),  # no faster cores
        ([product(0.01), kernel(1.0)], fast()),  # hardly any
        ([collective((0, 1), 0, 10**9, 1), product(0.5)], fast()),  # hidden behind communication of a second
        ([product(1e-6)] * 5, fast(launch_s=0.1)),  # the host's time to launch it is all there is
    ],
)
def test_control_products_that_would_gain_nothing(events, cluster):
    assert "float32 products" not in told({0: events}, cluster)


# Small collectives.


def gradients(n: int, size: int, rank: int, waits: str = "late", ranks: int = 4):
    """Asynchronous all-reduces, each after a kernel, waited for one by one or at the end."""
    events = []
    for i in range(n):
        events += [kernel(1e-4, phase="backward"), collective(range(ranks), i, size, i)]
        events += [Wait(i, "default")] * (waits == "at once")
    events += [Wait(i, "default") for i in range(n)] * (waits == "late")
    return [*events, kernel(1e-4, phase="optimizer")]


def test_small_all_reduces_would_be_one():
    trace = {rank: gradients(8, 100, rank) for rank in range(4)}
    advice = told(trace, toy_cluster())["small collectives"]
    assert "8 all-reduces a rank" in advice.what and "; 1 would do" in advice.what and advice.where == "dp.all_reduce"
    # Eight of 2 (n - 1) steps of latency alone, of which the first overlap the kernels, are one.
    assert advice.gain_s is not None and advice.gain_s == pytest.approx(7 * 6e-3, rel=0.05)


def test_synchronous_ones_with_a_scaling_in_between():
    def events(between: str):
        for i in range(6):
            yield collective(range(4), i, 100, i, stream="default")
            yield kernel(1e-6, name=between)

    assert "small collectives" in told({r: list(events("div_")) for r in range(4)}, toy_cluster())
    assert "small collectives" not in told(
        {r: list(events("mul")) for r in range(4)}, toy_cluster()
    )  # may use the result


@pytest.mark.parametrize(
    "make",
    [
        lambda r: gradients(8, 10**9, r),  # large: bandwidth is what they cost
        lambda r: gradients(8, 10**7, r),  # latency is a third of it
        lambda r: gradients(3, 100, r),  # few
        lambda r: gradients(8, 100, r, waits="at once"),  # each is needed at once
        lambda r: gradients(8, 100, 0, ranks=1),  # alone
        lambda r: [collective(range(4), i, 100, i, kind="all_gather" if i % 2 else "all_reduce") for i in range(8)],
        lambda r: [e for e in gradients(8, 100, r) for e in (e, HostWait("default", "synchronize"))],
    ],
)
def test_control_collectives_that_cannot_be_joined(make):
    assert "small collectives" not in told({rank: make(rank) for rank in range(4)}, toy_cluster())


def test_control_ranks_that_would_join_others():
    """What one rank may join, another needs at once."""
    trace = {rank: gradients(8, 100, rank, waits="late" if rank else "at once") for rank in range(4)}
    assert "small collectives" not in told(trace, toy_cluster())


@given(st.lists(st.integers(1, 10**8), min_size=4, max_size=12), st.integers(2, 4))
def test_joining_moves_the_same_bytes_in_buckets(sizes, ranks):
    from emu.cost.buckets import BUCKET_BYTES, joined
    from emu.trace.events import Collective

    cluster = toy_cluster(alpha_s=10.0)  # latency is all there is
    trace = {
        r: [collective(range(ranks), i, n, i) for i, n in enumerate(sizes)] + [Wait(len(sizes) - 1, "default")]
        for r in range(ranks)
    }
    changed, _ = joined(Trace({"dp": ranks}, trace), cluster)
    for rank in range(ranks):
        after = [e.bytes for e in changed[rank] if isinstance(e, Collective)]
        assert sum(after) == sum(sizes) and all(n <= BUCKET_BYTES or n in sizes for n in after)
        assert all(a + b > BUCKET_BYTES for a, b in pairwise(after))
    price(changed, cluster)


# The host.


def test_values_that_the_host_stops_for():
    events = [e for _ in range(10) for e in (kernel(0.01), HostWait("default", "_local_scalar_dense"))]
    advice = told({0: events}, toy_cluster(launch_s=0.01))["host waits"]
    assert advice.gain_s == pytest.approx(0.09) and "10 times" in advice.what and ".item()" in advice.where


@pytest.mark.parametrize(
    "events",
    [
        [kernel(0.01)] * 10 + [HostWait("default", "_local_scalar_dense")],  # once, at the end
        [e for _ in range(10) for e in (kernel(0.01), HostWait("default", "synchronize"))],  # asked for
        [e for _ in range(10) for e in (kernel(0.01), HostWait("default", "event 3"))],
    ],
)
def test_control_host_waits_that_cost_nothing_or_are_meant(events):
    assert "host waits" not in told({0: events}, toy_cluster(launch_s=0.001))


# Means.


@pytest.mark.parametrize(
    "op, work, axes", [("sum", 2.0, "dp"), ("avg", 1.0, "dp"), ("avg", 2.0, "pp"), ("avg", 2.0, "tp")]
)
def test_control_means_that_are_right(op, work, axes):
    trace = {
        r: [product(0.5 * (work if r else 1)), collective(range(2), 0, 64, 0, op=op, group=axes)] for r in range(2)
    }
    assert "uneven means" not in told(trace, toy_cluster(), {axes: 2})


def test_control_attention_of_uneven_length_is_no_uneven_batch():
    scores = [product(0.1), product(0.1)._replace(dims=(4, 8, 8, 8))]
    trace = {r: [*scores[: 1 + r], collective(range(2), 0, 64, 0, op="avg")] for r in range(2)}
    assert "uneven means" not in told(trace, toy_cluster())


def test_a_mean_over_uneven_batches():
    trace = {r: [product(0.5 * (1 + r)), collective(range(2), 0, 64, 0, op="avg", name="w")] for r in range(2)}
    advice = told(trace, toy_cluster())["uneven means"]
    assert (
        "rank 0 had 50.0 % of the work of rank 1" in advice.what
        and advice.where == "dp.all_reduce 'w'"
        and advice.gain is None
    )


def test_control_a_metric_and_a_rank_that_computes_more_for_itself(monkeypatch):
    metric = {r: [product(0.5 * (1 + r)), collective(range(2), 0, 8, 0, op="avg")] for r in range(2)}
    more = {r: [*[product(0.5)] * (1 + r), collective(range(2), 0, 64, 0, op="avg")] for r in range(2)}
    assert "uneven means" not in told(metric, toy_cluster()) and "uneven means" not in told(more, toy_cluster())
    monkeypatch.setattr("emu.cost.advice.ONE_NUMBER", 0)
    assert "uneven means" in told(metric, toy_cluster())


def test_a_run_of_nothing_needs_no_advice():
    assert emu.launch(lambda rank: None, emu.Mesh(dp=2)).advice() == []


# Whole runs.


def by_hand(rank, steps=2, op="sum", rows=lambda r: 8, optimizer=torch.optim.AdamW):
    """A right data-parallel step with one flat buffer for all gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    adam, dp = optimizer(model.parameters()), rank.group("dp")
    for _ in range(steps):
        model(torch.ones(rows(rank.id), 64)).square().sum().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dp.all_reduce(flat, op)
        for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.grad.copy_(g.view_as(p))
        adam.step()
        adam.zero_grad()


def kinds(run: emu.Run) -> set[str]:
    return {advice.kind for advice in run.advice()}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_clean_run_is_told_nothing():
    assert kinds(emu.launch(lambda rank: by_hand(rank, optimizer=sgd), emu.Mesh(dp=4))) == set()


def test_replicated_optimizer_states():
    run = emu.launch(by_hand, emu.Mesh(dp=4))
    advice = next(a for a in run.advice() if a.kind == "replicated optimizer")
    states = run.memory.at_peak(0)["optimizer"]
    assert advice.gain_bytes == states * 3 // 4 and "zero=1" in advice.hint and "ranks 0 to 3" in advice.where


def with_zero(rank, zero):
    torch.manual_seed(0)
    dist = emu.DataParallel(Decoder(config("gpt-tiny", layers=1), seed=0), rank, "dp", zero=zero)
    optimizer = dist.optimizer(torch.optim.AdamW, lr=1e-3)
    for x, y in batches(seed=0, steps=2, batch=4, seq=8):
        dist.backward(emu.Batch(x, y))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_only_who_shards_nothing_is_told_to_shard(zero):
    run = emu.launch(with_zero, emu.Mesh(dp=2), args=(zero,))
    assert ("replicated optimizer" in kinds(run)) is (zero == 0)


def test_control_ranks_with_models_of_their_own_keep_no_replicas(monkeypatch):
    def program(rank):
        model = torch.nn.Linear(64, 64)
        adam = torch.optim.Adam(model.parameters())
        loss = model(torch.ones(8, 64)).square().sum()
        loss.backward()
        rank.group("dp").all_reduce(loss.detach())
        adam.step()

    assert "replicated optimizer" not in kinds(emu.launch(program, emu.Mesh(dp=2)))
    monkeypatch.setattr("emu.cost.advice.LEAST_REDUCED", 1e9)
    assert "replicated optimizer" in kinds(emu.launch(program, emu.Mesh(dp=2)))


def test_means_of_uneven_batches_in_a_run():
    assert "uneven means" in kinds(emu.launch(lambda r: by_hand(r, 1, "avg", lambda i: 4 + i), emu.Mesh(dp=2)))
    assert "uneven means" not in kinds(emu.launch(lambda r: by_hand(r, 1, "avg"), emu.Mesh(dp=2)))


def test_advice_says_what_and_what_to_do():
    run = emu.launch(by_hand, emu.Mesh(dp=4))
    assert all(a.what in str(a) and f"hint: {a.hint}" in str(a) and a.hint and a.where for a in run.advice())
    assert advise(run.timeline()) == [a for a in run.advice() if a.gain_bytes is None]
    assert emu.launch(by_hand, emu.Mesh(dp=4), track=False).advice() == []
