"""States of optimizers on shards may be looked at and loaded into at any time, and training goes on as if nobody had."""

import pytest
import torch
from torch import optim

import emu
from emu.parallel.optimizer import Optimizer

from .training import Made

MADE = Made((3, 5, 3))
KINDS = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
]
NAMED = [f"{kind.__name__} {' '.join(options)}" for kind, options in KINDS]


def values(rank, kind, options, how, look=False, load_after=None, steps=3):
    """Parameters after some steps. States are looked at before them, or moved to a new optimizer after some of them."""
    dist = emu.DataParallel(MADE.model(), rank, "dp", **how)
    optimizer = dist.optimizer(kind, lr=0.05, **options)
    before = dist.gather_parameters()
    if look:
        optimizer.pieces()
        assert all(torch.equal(value, before[name]) for name, value in dist.gather_parameters().items())
    for step in range(steps):
        if step == load_after:
            new = dist.optimizer(kind, lr=0.05, **options)
            saved, empty = optimizer.pieces(), new.pieces()
            assert saved.keys() == empty.keys()
            for key, pieces in saved.items():
                for old, into in zip(pieces, empty[key], strict=True):
                    assert old[:3] == into[:3]
                    into.tensor.copy_(old.tensor)
            optimizer = new
        optimizer.zero_grad()
        dist.backward(MADE.batch(6, seed=step))
        optimizer.step()
    return dist.gather_parameters()


def same(a, b):
    return all(torch.equal(x[name], y[name]) for x, y in zip(a.results, b.results, strict=True) for name in x)


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 1}, {"zero": 3, "precision": "bf16-mixed"}], ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=NAMED)
def test_looking_at_states_and_moving_them_changes_nothing(kind, options, how):
    mesh = emu.Mesh(dp=4)
    alone = emu.launch(values, mesh, args=(kind, options, how), track=False)
    for look, load_after in ((True, None), (False, 0), (False, 1), (True, 2)):
        other = emu.launch(values, mesh, args=(kind, options, how, look, load_after), track=False)
        assert same(alone, other), (look, load_after)


def test_states_that_begin_with_zeros_where_they_must_not_are_seen(monkeypatch):
    kind, options = KINDS[1]
    mesh, args = emu.Mesh(dp=2), (kind, options, {"zero": 2})
    alone = emu.launch(values, mesh, args=args, track=False)
    monkeypatch.setattr(Optimizer, "_forget_made", lambda self: None)
    assert not same(alone, emu.launch(values, mesh, args=(*args, True), track=False))


def test_states_that_are_dropped_after_they_were_loaded_are_seen(monkeypatch):
    mesh, args = emu.Mesh(dp=2), (optim.AdamW, {}, {"zero": 2})
    alone = emu.launch(values, mesh, args=args, track=False)
    monkeypatch.setattr(Optimizer, "_forget_made", lambda self: self.torch.state.clear())
    assert not same(alone, emu.launch(values, mesh, args=(*args, False, 2), track=False))
