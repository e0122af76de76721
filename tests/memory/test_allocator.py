"""At every op boundary the categories add up to what torch's own allocator says is alive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from emu.trace.memory import Memory
from emu.virtual.hbm import Block
from emu.virtual.tracker import Tracker

from .allocator import disagreements, watched
from .programs import interpreted, programs


def train(rank):
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dp = rank.group("dp")
    for _ in range(2):
        loss = (model(torch.randn(4, 10)) * 2 + 1).pow(2).mean()
        loss.backward()
        works = [dp.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        gathered = dp.all_gather(torch.ones(3))
        optimizer.step()
        optimizer.zero_grad()
        del gathered


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs)
def test_categories_add_up_to_what_the_allocator_says(program):
    boundaries, _ = watched(interpreted(program))
    assert len(boundaries) > 1 and not disagreements(boundaries)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs)
def test_the_trace_tells_the_same_at_every_boundary(program):
    boundaries, run = watched(interpreted(program))
    memory = Memory(run.trace)
    indices, series = memory.series(0)
    at = dict.fromkeys(series, 0)
    k = 0
    for boundary in boundaries:
        if boundary.position > len(run.trace[0]):
            break  # what dies with the program's last frame is no part of the record
        while k < len(indices) and indices[k] < boundary.position:
            at = {category: line[k] for category, line in series.items()}
            k += 1
        assert at == boundary.by_category
    assert memory.peak_bytes(0) == run.peak_bytes[0]
    assert sum(memory.at_peak(0).values()) == run.peak_bytes[0]


@pytest.mark.parametrize("watch", [0, 1, 2])
def test_a_rank_among_others_is_counted_alone(watch):
    boundaries, run = watched(train, ranks=3, watch=watch)
    assert len(boundaries) > 100 and not disagreements(boundaries)
    assert len(set(run.peak_bytes)) == 1


@pytest.mark.parametrize("missed", ["gelu", "mm", "native_layer_norm", "resize_", "_to_copy"])
def test_an_op_that_the_ledger_misses_is_found_out(missed, monkeypatch):
    """The negative control: the count is worth nothing unless it can fail."""

    def program(rank):
        x = torch.randn(8, 8)
        with torch.no_grad():
            kept = [
                x.mm(x),
                nn.functional.gelu(x),
                nn.functional.layer_norm(x, (8,)),
                x.double(),
                torch.empty(4).resize_(16),
            ]
            return len(kept), x + 1

    good, _ = watched(program)
    assert not disagreements(good)
    dispatch = Tracker.__torch_dispatch__

    def deaf(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == missed:
            return func(*args, **(kwargs or {}))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Tracker, "__torch_dispatch__", deaf)
    bad, _ = watched(program)
    assert disagreements(bad)


def test_a_death_that_the_ledger_misses_is_found_out(monkeypatch):
    free, count = Block.__del__, []

    def forgetful(block):
        count.append(None)
        if len(count) != 3:
            free(block)

    monkeypatch.setattr(Block, "__del__", forgetful)
    boundaries, _ = watched(train)
    assert disagreements(boundaries)
