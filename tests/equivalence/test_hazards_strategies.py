"""emu's own strategies are free of hazards; and leave out any wait that they need, and they are not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import emu
from emu.equivalence import Hazards
from emu.equivalence.verify import mesh_of
from emu.models import GPT, Config
from emu.parallel import Plan
from emu.parallel.asynchronous import ParameterServer
from emu.trace.events import Wait
from emu.virtual import works

MODEL = Config(vocab=13, width=8, layers=2, heads=2, seq=8)
ROWS = 4


def step(rank, plan):
    """Two steps of training: in the first, some strategies learn the order of things."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocab, (ROWS, MODEL.seq), generator=g)
    data = emu.Batch(tokens, tokens.roll(-1, 1))
    model = GPT(replace(MODEL, layers=4) if plan.chunks > 1 else MODEL, seed=0)
    dist = emu.parallelize(model, plan, rank)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        dist.backward(data, microbatches=plan.accumulated())
        optimizer.step()
        dist.zero_grad()


PLANS = {
    "buckets": Plan("dp=2", precision="fp32"),
    "ZeRO-2": Plan("dp=2", zero=2, precision="bf16-mixed"),
    "ZeRO-3, two ahead": Plan("dp=2", zero=3, prefetch=2, precision="fp32"),
    "hybrid sharding": Plan("dp=4", zero=3, replicate=2, precision="fp32"),
    "zero bubble": Plan("pp=2", schedule="zb-h1", microbatches=4, precision="fp32"),
    "two ways": Plan("pp=2", schedule="dualpipe-v", chunks=2, microbatches=4, precision="fp32"),
    "ring": Plan("cp=2", context="ring", precision="fp32"),
    "all to all": Plan("cp=2", context="ulysses", precision="fp32"),
    "sequence parallel": Plan("tp=2", sp=True, precision="fp32"),
    "offloading": Plan("dp=2", checkpoint="full", offload=True, precision="fp32"),
    "together": Plan("dp=2,pp=2,tp=2", zero=1, microbatches=2, precision="fp32"),
}


QUICK = ("buckets", "ZeRO-3, two ahead", "zero bubble", "ring", "offloading")


def sampled(cases, quick):
    """All cases; those that are not quick are for the exhaustive run."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def proof(name: str) -> Hazards:
    return emu.hazards(step, mesh_of(PLANS[name]), args=(PLANS[name],))


@pytest.mark.parametrize("name", sampled(PLANS, QUICK))
def test_a_strategy_is_proved(name):
    found = proof(name)
    assert found, str(found)
    assert found.n_ordered > 50 and found.needed and not found.choices


def left_out(monkeypatch, rank, index, events) -> None:
    """A rank waits for its communication, but its stream does not: one of all its waits for works."""
    number = sum(isinstance(event, Wait) for event in events[:index])
    ordered, seen = works._ordered, []

    def all_but_one(device, item, event, point):
        if device.rank == rank and event.stream != device.stream_now.name:
            seen.append(event)
            if len(seen) == number + 1:
                return
        ordered(device, item, event, point)

    monkeypatch.setattr(works, "_ordered", all_but_one)


@pytest.mark.parametrize("name", sampled(PLANS, ("ZeRO-3, two ahead", "zero bubble")))
@pytest.mark.parametrize("part", sampled([0.1, 0.5, 0.9], [0.5]))
def test_without_a_wait_that_it_needs_it_is_not(name, part, monkeypatch):
    found = proof(name)
    for waits, remains in ((found.needed, False), (found.redundant, True)):
        waits = [wait for wait in waits if isinstance(found.trace[wait.rank][wait.event], Wait)]
        if waits:
            wait = waits[int(part * len(waits))]
            with monkeypatch.context() as patch:
                left_out(patch, wait.rank, wait.event, found.trace[wait.rank])
                assert bool(proof(name)) is remains, wait
            with monkeypatch.context() as patch, nullcontext() if remains else pytest.raises(emu.spmd.BufferInFlight):
                left_out(patch, wait.rank, wait.event, found.trace[wait.rank])
                emu.launch(step, mesh_of(PLANS[name]), args=(PLANS[name],))


def asynchronous(rank):
    model = torch.nn.Linear(3, 2)
    server = ParameterServer(model, rank)
    if server.serves:
        server.serve(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    else:
        for _ in range(2):
            server.pull()
            model(torch.ones(2, 3)).sum().backward()
            server.push()
    server.finish()


@pytest.mark.parametrize("order", ["time", "program"])
def test_a_parameter_server_is_proved_as_it_ran_and_told_to_depend_on_time(order):
    # Each order is one of the ways in which gradients may come in.
    found = emu.hazards(asynchronous, emu.Mesh(ranks=3), order=order)
    assert found, str(found)
    assert [what for what, *_ in found.choices] == ["wait_any"] and "depends on time" in str(found)
