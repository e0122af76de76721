"""Whatever the policy: the same loss, gradients, statistics and random numbers as without checkpointing, to the last bit."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from emu.parallel.checkpointing import Policy, checkpointed, remembered, surroundings

from .models import KINDS, NAMED, WIDTH, Mlp, Model, both, orders, policies, step

kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=7)


@given(st.data(), kinds)
def test_any_policy_changes_nothing(data, layers):
    policy = data.draw(policies(len(layers)))
    plain, changed = both(layers, policy, p=data.draw(st.sampled_from([0.0, 0.5])))
    assert changed.same(plain)


@pytest.mark.parametrize("policy", NAMED)
@pytest.mark.parametrize("autocast", [False, True])
def test_named_policies_change_nothing(policy, autocast):
    plain, changed = both(["mlp", "statistics", "mlp", "product", "mlp", "mlp", "product"], policy, autocast=autocast)
    assert changed.same(plain)


@given(st.data(), kinds, st.integers(2, 4))
def test_any_number_of_microbatches_may_be_under_way(data, layers, microbatches):
    order = data.draw(orders(microbatches))
    plain, changed = both(layers, data.draw(policies(len(layers))), order=order)
    assert changed.same(plain)


@pytest.mark.parametrize("policy", NAMED)
def test_it_is_what_torchs_own_checkpoint_computes(policy):
    class Torchs(Model):
        def forward(self, x):
            x, scale = self.first(x), x.mean()
            for layer in self.layers:
                x = checkpoint(layer, x, scale, use_reentrant=False)
            return self.head(x)

    layers = ["mlp", "product"] * 3
    assert both(layers, policy)[1].same(step(Torchs(layers)))


@pytest.mark.parametrize("policy", NAMED)
def test_within_torchs_own_checkpoint_and_around_it(policy):
    class Inside(Mlp):
        def forward(self, x, scale=None):
            return checkpoint(super().forward, x, scale, use_reentrant=False)

    class Around(Model):
        def loss_sum(self, x, y):
            return checkpoint(super().loss_sum, x, y, use_reentrant=False)

    plain = Model(["mlp"] * 5)
    changed = Around(["mlp"] * 5)
    for layer in list(changed.layers)[::2]:
        layer.__class__ = Inside
    checkpointed(changed, policy)
    order = ["F0", "F1", "B0", "B1"]
    assert step(changed, order).same(step(plain, order))


@pytest.mark.parametrize("policy", NAMED)
def test_a_graph_that_is_kept_can_be_walked_again_and_in_part(policy):
    def walked(model):
        torch.manual_seed(1)
        x = torch.randn(4, WIDTH, requires_grad=True)
        loss = model.loss_sum(x, 1.0)
        found = list(torch.autograd.grad(loss, [x], retain_graph=True))
        found += torch.autograd.grad(loss, list(model.layers[2].parameters()), retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return found + [x.grad] + [p.grad for p in model.parameters()]

    changed = Model(["mlp"] * 5)
    checkpointed(changed, policy)
    assert all(map(torch.equal, walked(changed), walked(Model(["mlp"] * 5))))


@pytest.mark.parametrize("policy", NAMED)
def test_gradients_of_gradients(policy):
    def second(model):
        torch.manual_seed(1)
        x = torch.randn(4, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(model.loss_sum(x, 1.0), [x], create_graph=True)
        (slope**2).sum().backward()
        return [x.grad] + [p.grad for p in model.parameters() if p.grad is not None]

    changed = Model(["product"] * 5)
    checkpointed(changed, policy)
    assert all(map(torch.equal, second(changed), second(Model(["product"] * 5))))


def test_layers_may_be_left_out_and_frozen_and_draw_in_between():
    """LayerDrop, https://arxiv.org/abs/1909.11556: the random numbers that decide it are drawn between layers."""

    class Dropping(Model):
        def forward(self, x):
            x, scale = self.first(x), x.mean()
            for i, layer in enumerate(self.layers):
                if not i or torch.rand(()) > 0.4:
                    x = layer(x, scale)
            return self.head(x)

    for policy in NAMED:
        for seed in range(5):
            plain = Dropping(["mlp"] * 7)
            plain.layers[0].requires_grad_(False)
            plain.first.requires_grad_(False)
            changed = copy.deepcopy(plain)
            checkpointed(changed, policy)
            assert step(changed, seed=seed).same(step(plain, seed=seed))


@pytest.mark.parametrize("policy", NAMED)
def test_layers_that_keep_nothing_or_change_nothing(policy):
    """Some save no tensor, some return their input or a view of it, and one has no gradient at all."""

    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    class View(nn.Module):
        def forward(self, x):
            return x.view(-1).view_as(x)

    def made():
        torch.manual_seed(0)
        kinds = [nn.Identity(), nn.Linear(WIDTH, WIDTH), View(), nn.Dropout(0.5), nn.Identity(), nn.Tanh(), Constant()]
        kinds += [View(), nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.ReLU(), View()]
        return nn.Sequential(*kinds)

    def gradients(model):
        torch.manual_seed(1)
        x = torch.randn(3, WIDTH, requires_grad=True)
        (model(x) ** 2).sum().backward()
        return [x.grad] + [p.grad for p in model.parameters()] + [torch.rand(2)]

    changed = made()
    checkpointed(changed, policy)
    for a, b in zip(gradients(changed), gradients(made()), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_the_activations_may_be_passed_by_name_and_come_back_in_a_tuple():
    class Layer(Mlp):
        def forward(self, hidden, *, scale):
            return (super().forward(hidden, scale), None)

    class Named(Model):
        def forward(self, x):
            x, scale = self.first(x), x.mean()
            for layer in self.layers:
                x = layer(hidden=x, scale=scale)[0]
            return self.head(x)

    def made():
        model = Named(["mlp"] * 5)
        for layer in model.layers:
            layer.__class__ = Layer
        return model

    for policy in NAMED:
        changed = made()
        checkpointed(changed, policy)
        assert step(changed).same(step(made()))


@pytest.mark.parametrize("policy", ["full", "every:2", "naive"])
def test_a_second_tensor_with_a_gradient_gets_it(policy):
    class Two(Model):
        def forward(self, x):
            x, other = self.first(x), torch.tanh(self.first(x))
            for layer in self.layers:
                x = layer(x, other)
            return self.head(x)

    changed = Two(["mlp"] * 4)
    checkpointed(changed, policy)
    assert step(changed).same(step(Two(["mlp"] * 4)))


def test_a_copy_of_a_checkpointed_model_is_one_of_its_own():
    model = Model(["mlp"] * 4)
    checkpointed(model, "naive")
    other = copy.deepcopy(model)
    for order in (["F0", "B0"], ["F0", "F1", "B1", "B0"]):
        assert step(other, order).same(step(model, order))
        model.zero_grad(), other.zero_grad()
    assert type(model.layers[0]).__name__ == "Mlp"
    assert list(model.state_dict()) == list(Model(["mlp"] * 4).state_dict())


def test_evaluation_in_between_keeps_nothing_and_changes_nothing():
    plain, changed = Model(["mlp"] * 4), Model(["mlp"] * 4)
    checkpointed(changed, "repeated:2")

    def steps(model):
        torch.manual_seed(2)
        x = torch.randn(4, WIDTH)
        loss = model.loss_sum(x, 1.0)
        with torch.no_grad():
            seen = model(x)
        loss.backward()
        return [seen, loss.detach()] + [p.grad for p in model.parameters()]

    assert all(map(torch.equal, steps(plain), steps(changed)))


# What would be seen.


@pytest.mark.parametrize("policy", [n for n in NAMED if n != "none"])
def test_without_the_random_numbers_gradients_are_others(policy, monkeypatch):
    monkeypatch.setattr(surroundings.RandomState, "set", lambda self: None)
    plain, changed = both(["mlp"] * 5, policy)
    assert changed.losses[0].equal(plain.losses[0])
    assert not changed.same(plain)


def test_statistics_counted_twice_are_seen(monkeypatch):
    monkeypatch.setattr(remembered.Memory, "back", lambda _: nullcontext())
    plain, changed = both(["statistics"] * 3, "full")
    assert not changed.same(plain)
    assert changed._replace(buffers=plain.buffers).same(plain)


def test_attributes_of_modules_are_those_of_the_forward():
    for policy in ("full", "naive"):
        model = Model(["statistics"] * 3)
        checkpointed(model, policy)
        loss = model.loss_sum(torch.randn(4, WIDTH), 1.0)
        before = [layer.last for layer in model.layers]
        loss.backward()
        assert all(layer.last is one for layer, one in zip(model.layers, before))


def storages_after(policy, forget):
    """How many of the layers' outputs live after forward, and after backward."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
    checkpointed(model, policy)
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out.untyped_storage())))
    out = model(torch.randn(3, WIDTH, requires_grad=True)).sum()
    before = sum(s() is not None for s in seen)
    out.backward(retain_graph=not forget)
    return before, sum(s() is not None for s in seen)


@pytest.mark.parametrize("policy", NAMED)
def test_no_tensor_outlives_its_backward_or_what_its_policy_keeps(policy):
    gc.disable()  # nothing waits for garbage to be collected
    try:
        before, after = storages_after(policy, forget=True)
        assert after == 0
        kept = [i for i in Policy.named(policy, 5).kept if i]  # the first layer's input is none of its outputs
        assert before == (5 if policy == "none" else len(kept))
        assert storages_after(policy, forget=False)[1] == before  # a graph that is kept keeps as much as before
    finally:
        gc.enable()
