"""Layers that return something else than a tensor."""

import pytest
import torch
from torch import nn

from emu.parallel.checkpointing import checkpointed
from emu.spmd import EmuError


class Named(nn.Module):
    """A layer that returns its activations by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return {"out": self.linear(x).tanh()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Named() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)["out"]
        return x


def gradients(policy):
    model = Model()
    checkpointed(model, policy)
    model(torch.ones(2, 3)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_layers_that_return_a_dict_are_computed_again_each_by_itself():
    assert all(torch.equal(a, b) for a, b in zip(gradients("full"), gradients("none"), strict=True))


@pytest.mark.parametrize("policy", ["every:2", "naive"])
def test_nothing_can_be_computed_from_what_is_no_tensor(policy):
    with pytest.raises(EmuError, match="is not called with what"):
        gradients(policy)
