"""Results of operators that are kept and then written in place are told, however they are written."""

import pytest
import torch

import emu
from emu.parallel.checkpointing import checkpointed, offloaded
from emu.spmd import EmuError

from .models import WIDTH, Model, step


def _no_grad(y):
    with torch.no_grad():
        y.mul_(2)
    return y


def _in_a_view(y):
    y.view(-1)[:3].mul_(2)
    return y


WRITES = {
    "in place": lambda y: y.mul_(2),
    "in a view": _in_a_view,
    "without gradients": _no_grad,
    "dropout": lambda y: torch.nn.functional.dropout(y, 0.5, True, inplace=True),
}


class Writes(torch.nn.Module):
    def __init__(self, write):
        super().__init__()
        self.map, self.write = torch.nn.Linear(WIDTH, WIDTH), write

    def forward(self, x, scale=None):
        return torch.tanh(self.write(self.map(x)))


def made(write, policy="full", operators=("addmm",)):
    model = Model([])
    torch.manual_seed(3)
    model.layers.extend(Writes(write) for _ in range(3))
    if policy is not None:
        checkpointed(model, policy, operators=operators, layers="layers")
    return model


@pytest.mark.parametrize("policy", ["full", "every:2", "naive"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_kept_result_that_is_written_is_named(write, policy):
    with pytest.raises(
        EmuError, match=r"a result of aten::addmm in layers\.\d was overwritten in place.*\n.*x = x \+ y"
    ):
        step(made(write, policy))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_so_is_one_that_travels_where_it_was_written_before_it_left(write):
    def program(rank):
        model = made(write)
        offloaded(model, rank)
        step(model)

    with pytest.raises(EmuError, match=r"layers\.\d needs was overwritten in place"):
        emu.launch(program, emu.Mesh(dp=1))


@pytest.mark.parametrize("write", [lambda y: y * 2, lambda y: y.clone().mul_(2)])
def test_writes_elsewhere_are_right(write):
    assert step(made(write)).same(step(made(write, policy=None)))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_results_that_are_not_kept_may_be_written(write):
    assert step(made(write, operators=("bmm",))).same(step(made(write, policy=None)))
