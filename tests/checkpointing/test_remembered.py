"""Layers that read what they write: computed again, they find what their first call found, and leave what is there."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from emu.parallel.checkpointing import checkpointed, remembered
from emu.spmd import EmuError

from .models import WIDTH, Model, step

POLICIES = ["full", "every:2", "repeated:2", "naive", "nested:4,2"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)


class Spectral(Layer):
    def __init__(self):
        super().__init__()
        self.map = spectral_norm(self.map)

    def forward(self, x, scale=None):
        return torch.tanh(self.map(x))


class Average(Layer):
    """Takes off a running average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x, scale=None):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(self.map(x - self.mean.clone()))


class Replaced(Average):
    def forward(self, x, scale=None):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.map(x - self.mean))


class Attribute(Layer):
    """Adds up what it sees in no buffer."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(WIDTH)

    def forward(self, x, scale=None):
        self.seen.add_(x.detach().sum(0))
        return torch.tanh(self.map(x) + self.seen)


class Last(Layer):
    """Reads what it returned the last time, through which gradients flow."""

    last = None

    def forward(self, x, scale=None):
        self.last = torch.tanh(self.map(x) if self.last is None else self.map(x) * self.last)
        return self.last


class Counter(Layer):
    calls = 0

    def forward(self, x, scale=None):
        self.calls += 1
        return torch.tanh(self.map(x)) * self.calls


class Generator(Layer):
    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x, scale=None):
        return torch.tanh(self.map(x)) * torch.rand(x.shape, generator=self.draws)


class Instances(Layer):
    """Its statistics are written without torch's counting it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x, scale=None):
        y = self.norm(self.map(x).t()[None])[0].t()
        return torch.tanh(y + self.norm.running_mean.clone())


class Batches(Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, scale=None):
        return self.norm(self.map(x))


KINDS = [Spectral, Average, Replaced, Attribute, Counter, Generator, Instances, Batches]


def made(kind, policy):
    model = Model([])
    torch.manual_seed(4)
    model.layers.extend(kind() for _ in range(4))
    if policy is not None:
        checkpointed(model, policy, layers="layers")
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_what_is_remembered_are_as_without(kind, policy):
    for order in (["F0", "B0"], ["F0", "B0", "F1", "B1"]):
        plain, changed = made(kind, None), made(kind, policy)
        assert step(changed, order).same(step(plain, order))
        for one, other in zip(plain.layers, changed.layers):
            assert {n: v for n, v in vars(one).items() if isinstance(v, int)}.items() <= vars(other).items()
            if kind is Attribute:
                assert torch.equal(one.seen, other.seen)
            if kind is Generator:
                assert torch.equal(one.draws.get_state(), other.draws.get_state())


@pytest.mark.parametrize("kind", [Average, Replaced, Attribute, Counter, Generator, Instances])
def test_microbatches_may_be_under_way_together(kind):
    order = ["F0", "F1", "B0", "F2", "B2", "B1"]
    for policy in ("full", "naive"):
        assert step(made(kind, policy), order).same(step(made(kind, None), order))


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not Batches])
def test_without_what_was_remembered_gradients_would_differ(kind, monkeypatch):
    monkeypatch.setattr(remembered.Memory, "back", lambda _: nullcontext())
    assert not step(made(kind, "naive")).same(step(made(kind, None)))


class Pair(Last):
    """The same, within a tuple."""

    def forward(self, x, scale=None):
        self.last = (torch.tanh(self.map(x) if self.last is None else self.map(x) * self.last[0]), 1)
        return self.last[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Last, Pair])
def test_what_is_remembered_may_have_a_gradient(kind, policy):
    def gradients(policy):
        model = made(kind, policy)
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        (model.loss_sum(x, 1.0) + model.loss_sum(x * 2, 1.0)).backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(policy), gradients(None)))


# Buffers that others write.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_is_written_before_backward_is_named(policy):
    x = torch.randn(4, WIDTH)
    for kind in (None, policy):
        model = made(Batches, kind).eval()
        loss = model.loss_sum(x, 1.0)
        with torch.no_grad():
            for layer in model.layers:
                layer.norm.running_var.mul_(4)
        with pytest.raises(RuntimeError if kind is None else EmuError) as error:
            loss.backward()
        if kind is not None:
            assert "buffer running_var of layers." in str(error.value)
            assert "changed between its forward and its backward" in str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_is_replaced_before_backward_is_read_as_it_was(policy):
    x, found = torch.randn(4, WIDTH), []
    for kind in (None, policy):
        model = made(Batches, kind).eval()
        loss = model.loss_sum(x, 1.0)
        for layer in model.layers:
            layer.norm.running_var = layer.norm.running_var * 4
        loss.backward()
        assert all(torch.equal(layer.norm.running_var, torch.full((WIDTH,), 4.0)) for layer in model.layers)
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


# Autocast.


@pytest.mark.parametrize("policy", ["full", "every:2", "repeated:2", "naive", "nested:4,2", "halving"])
@pytest.mark.parametrize("odd", [0, 1])
def test_autocast_may_differ_by_layer(policy, odd):
    class Mixed(Model):
        def forward(self, x):
            x, scale = self.first(x), x.mean()
            for i, layer in enumerate(self.layers):
                with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == odd):
                    x = layer(x, scale)
            return self.head(x)

    def run(policy, around):
        model = around(["mlp"] * 4)
        if policy is not None:
            checkpointed(model, policy)
        return step(model)

    assert run(policy, Mixed).same(run(None, Mixed))
    assert not run(policy, Mixed).same(run(None, Model))  # bfloat16 shows


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_may_return_lists(policy):
    class Listed(Layer):
        def forward(self, x, scale=None):
            return [torch.tanh(self.map(x))]

    class First(Model):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)[0]
            return self.head(x)

    def run(policy):
        model = made(Listed, policy)
        model.__class__ = First
        return step(model)

    assert run(policy).same(run(None))


@pytest.mark.parametrize("kind", [Last, Pair])
def test_what_is_remembered_keeps_no_graph(kind):
    model, graphs = made(kind, "full"), []
    for _ in range(4):
        loss = model.loss_sum(torch.ones(4, WIDTH), 1.0)
        graphs.append(weakref.ref(model.layers[3].last if kind is Last else model.layers[3].last[0]))
        for layer in model.layers:  # as one does who trains through no more than one step
            layer.last = layer.last.detach() if kind is Last else (layer.last[0].detach(), 1)
        loss.backward()
    del loss
    gc.collect()
    assert not any(one() is not None for one in graphs)
