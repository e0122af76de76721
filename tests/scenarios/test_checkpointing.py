"""Faults that activation checkpoints really had elsewhere, of which nothing may be left here.

Numbers and inputs are ours; the reports are linked.
"""

import pytest
import torch
from torch import nn

import emu
from emu.parallel import Pipeline
from emu.parallel.checkpointing import checkpointed, surroundings
from emu.spmd import EmuError

SAME = 1e-9  # float64 against the same sums by hand
POLICIES = ("full", "every:2", "repeated:2", "naive", "nested:2,1", "halving")

pytestmark = pytest.mark.usefixtures("float64")


class Drops(nn.Module):
    """tanh(x W1), half of it dropped."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w.clone())
        self.mask = None

    def forward(self, x):
        hidden = torch.tanh(x @ self.w)
        out = torch.dropout(hidden, 0.5, self.training)
        self.seen.append(((out != 0) * 2.0).detach())
        return out


class Model(nn.Module):
    """A layer that drops, and one that adds up. x: [6, 4]; loss: the mean square."""

    def __init__(self, w1, w2):
        super().__init__()
        self.layers = nn.ModuleList([Drops(w1)])
        self.w2 = nn.Parameter(w2.clone())
        self.seen = self.layers[0].seen = []

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return ((x @ self.w2) ** 2).mean()


def inputs():
    g = torch.Generator().manual_seed(58)
    return [torch.randn(*shape, generator=g) for shape in ((6, 4), (4, 8), (8, 1))]


def by_hand(x, w1, w2, forward, backward):
    """Loss and gradients of tanh(x w1) m w2, with the mask of forward, and one in backward that should be the same."""
    hidden = torch.tanh(x @ w1)
    y = (hidden * forward) @ w2
    dy = 2 * y / 6
    return (y**2).mean(), x.T @ ((dy @ w2.T) * backward * (1 - hidden**2)), (hidden * backward).T @ dy


def close(found, right):
    return all(torch.allclose(a, b, rtol=SAME, atol=SAME) for a, b in zip(found, right, strict=True))


def run(policy):
    """Loss and gradients, the masks of forward and recomputation, and where random numbers go on."""
    x, w1, w2 = inputs()
    model = Model(w1, w2)
    if policy is not None:
        checkpointed(model, policy)
    torch.manual_seed(5)
    loss = model.loss_sum(x, None)
    loss.backward()
    return [loss.detach(), model.layers[0].w.grad, model.w2.grad], model.seen, torch.rand(3)


@pytest.mark.parametrize("policy", POLICIES)
def test_scenario_58_the_mask_of_backward_is_that_of_forward(policy):
    """https://github.com/openai/guided-diffusion/issues/167"""
    x, w1, w2 = inputs()
    plain, (mask,), following = run(None)
    found, masks, after = run(policy)
    assert close(plain, by_hand(x, w1, w2, mask, mask))  # the oracle itself
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert all(torch.equal(one, mask) for one in masks)
    assert torch.equal(after, following)


def test_scenario_58_the_fault_is_another_gradient(monkeypatch):
    monkeypatch.setattr(surroundings.RandomState, "set", lambda self: None)
    x, w1, w2 = inputs()
    plain, (mask,), _ = run(None)
    found, (first, second), _ = run("full")
    assert torch.equal(first, mask)
    assert not torch.equal(second, mask)
    assert close(found[:2], by_hand(x, w1, w2, mask, second)[:2])
    assert torch.equal(found[0], plain[0])
    assert not close(found[1:2], plain[1:2])


class Deep(nn.Module):
    """Four dropping layers with random numbers of the model's own in between. x: [rows, 4]."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(58)
        self.layers = nn.ModuleList(Drops(torch.randn(4, 4, generator=g)) for _ in range(4))
        self.seen = []
        for layer in self.layers:
            layer.seen = self.seen

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (x**2).sum()


def batch():
    return emu.Batch(torch.randn(6, 4, generator=torch.Generator().manual_seed(6)), torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_scenario_58_two_microbatches_under_way(policy, schedule):
    """The second one's forward draws between the first one's forward and its recomputation."""

    def program(rank, policy):
        model = Deep()
        if policy is not None:
            checkpointed(model, policy, rank)
        torch.manual_seed(9)
        pipe = Pipeline(model, rank, schedule=schedule, microbatches=3)
        loss = pipe.backward(batch())
        return [loss, *pipe.gather_gradients().values(), torch.rand(3)]

    right, found = (emu.launch(program, emu.Mesh(pp=2), args=(name,)).results for name in (None, policy))
    for a, b in zip(right, found, strict=True):
        assert all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_scenario_58_checkpoints_in_checkpoints(policy):
    """https://github.com/openai/guided-diffusion/issues/167, of segments, and within torch's own."""
    found = []
    for name in (None, policy):
        model = Deep()
        if name is not None:
            checkpointed(model, name)
        for around in (False, True):
            model.zero_grad()
            torch.manual_seed(5)
            x = batch().x
            if around:
                loss = torch.utils.checkpoint.checkpoint(model.loss_sum, x, None, use_reentrant=False)
            else:
                loss = model.loss_sum(x, None)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)])
    assert all(torch.equal(u, v) for other in found[1:] for u, v in zip(found[0], other, strict=True))


# Of its kind.


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.map(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, kind, n=4):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(kind() for _ in range(n))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (x**2).sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_running_statistics_are_taken_once(policy):
    """Every recomputation moved them again. https://github.com/pytorch/pytorch/issues/96136"""
    plain, changed = Stack(Normed), Stack(Normed)
    checkpointed(changed, policy)
    for model in (plain, changed):
        model.loss_sum(batch().x, None).backward()
    for a, b in zip((*plain.buffers(), *plain.parameters()), (*changed.buffers(), *changed.parameters()), strict=True):
        assert torch.equal(a if a.grad is None else a.grad, b if b.grad is None else b.grad)
    assert int(changed.layers[0].norm.num_batches_tracked) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_learn_though_their_input_has_no_gradient(policy):
    """Of a first layer whose input needs none, reentrant checkpoints gave none: only a warning.
    https://github.com/pytorch/pytorch/issues/7617
    """
    model = Stack(lambda: nn.Linear(4, 4))
    checkpointed(model, policy)
    model.loss_sum(batch().x, None).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_that_end_with_an_activation_in_place_pass_gradients_on(policy):
    """Through what a checkpoint returned, a view written in place, none came. https://github.com/pytorch/pytorch/issues/26546"""

    def gradient(policy):
        model = Stack(lambda: nn.Sequential(nn.InstanceNorm1d(2), nn.ReLU(inplace=True)), n=3)
        if policy is not None:
            checkpointed(model, policy)
        x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model.loss_sum(x, None).backward()
        return x.grad

    assert gradient(None).abs().sum() > 0
    assert torch.equal(gradient(policy), gradient(None))


@pytest.mark.parametrize("policy", ["full", "every:2"])
def test_a_layer_that_begins_with_an_activation_in_place_is_named(policy):
    """It would overwrite the input that is kept, and the recomputation would begin from the result."""

    class Inplace(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(4, 4)

        def forward(self, x):
            return self.map(nn.functional.relu(x, inplace=True))

    class Model(Stack):
        def loss_sum(self, x, y):
            return super().loss_sum(x * 1.0, y)

    model = Model(Inplace)
    checkpointed(model, policy)
    with pytest.raises(EmuError, match=r"layers\.0 writes into its input in place"):
        model.loss_sum(batch().x, None)


def test_parameters_that_move_before_backward_are_named():
    """Recomputed with new weights, gradients were of neither the old loss nor the new one."""
    model = Stack(lambda: nn.Linear(4, 4))
    checkpointed(model, "full")
    loss = model.loss_sum(batch().x, None)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    with pytest.raises(EmuError, match="changed between its forward and its backward"):
        loss.backward()


def test_autocast_is_what_it_was_in_forward():
    """Backward runs outside of it, and recomputed in another dtype.
    https://github.com/pytorch/pytorch/issues/71124
    """
    found = []
    for policy in (None, *POLICIES):
        model = Stack(lambda: nn.Linear(4, 4)).float()
        if policy is not None:
            checkpointed(model, policy)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss_sum(batch().x.float(), None)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(u, v) for other in found[1:] for u, v in zip(found[0], other, strict=True))
