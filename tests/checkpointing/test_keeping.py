"""The one point through which kept tensors pass: every one of them, once when it is kept, and gone when nothing needs it."""

import copy
import weakref

import pytest
import torch

from emu.parallel.checkpointing import Policy, checkpointed, checkpointed_modules
from emu.spmd import EmuError

from .models import NAMED, WIDTH, Model, step


class Elsewhere:
    """Keeps copies of bytes, and no tensor."""

    def __init__(self):
        self.kept = self.asked = 0
        self.alive: list[weakref.ref] = []

    def __call__(self, x):
        self.kept += 1
        values, shape, dtype = x.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), x.shape, x.dtype

        def again():
            self.asked += 1
            return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)

        self.alive.append(weakref.ref(again))
        return again


@pytest.mark.parametrize("policy", NAMED)
def test_every_kept_input_passes_and_nothing_else(policy):
    plain = Model(["mlp", "product"] * 3)
    changed, keep = copy.deepcopy(plain), Elsewhere()
    checkpointed(changed, policy, layers="layers", keep=keep)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        changed(x)
    assert keep.kept == 0
    loss = changed.loss_sum(x, 1.0)
    made = Policy.named(policy, 6)
    assert keep.kept == len(made.kept)  # the other argument, the scale, has no gradient
    assert keep.asked == 0
    loss.backward()
    assert keep.asked == sum(one.begins in made.kept for one in made.again())
    assert not any(one() for one in keep.alive)
    plain.zero_grad(), changed.zero_grad()
    assert step(changed, ["F0", "F1", "B0", "B1"]).same(step(plain, ["F0", "F1", "B0", "B1"]))


def test_of_modules_all_arguments_with_a_gradient_pass():
    class Core(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return (q * k + v) * mask

    class Wrapped(Model):
        def __init__(self, kinds):
            super().__init__(kinds)
            self.core = Core()

        def forward(self, x):
            x = self.first(x)
            return self.head(self.core(x, torch.tanh(x), torch.sigmoid(x), torch.ones(())))

    keep = Elsewhere()
    model, plain = Wrapped(["mlp"]), Wrapped(["mlp"])
    checkpointed_modules(model, "core", keep=keep)
    assert step(model).same(step(plain))
    assert (keep.kept, keep.asked) == (3, 3)


def test_results_of_operators_pass_too():
    keep = Elsewhere()
    model = Model(["mlp"] * 4)
    checkpointed(model, "every:2", keep=keep, operators=["addmm"])
    assert step(model).same(step(Model(["mlp"] * 4)))
    assert (
        keep.kept == 2 + 4 * 2 + 4
    )  # inputs, results of two maps a layer, and each call's scale, which has a gradient here


def test_a_copy_elsewhere_may_be_written_over_where_the_tensor_was():
    """What stays in place may not: see test_refused.py."""

    class Writes(Model):
        def forward(self, x):
            x, scale = self.first(x), x.mean()
            for i, layer in enumerate(self.layers):
                before, x = x, layer(x, scale)
                if i == 1:
                    before.mul_(2)
            return self.head(x)

    model = Writes(["mlp"] * 4)
    checkpointed(model, "full", keep=Elsewhere())
    assert step(model).same(step(Model(["mlp"] * 4)))
    model = Writes(["mlp"] * 4)
    checkpointed(model, "full")
    with pytest.raises(EmuError, match=r"the input of layers\.1 was overwritten"):
        step(model)


def test_a_keep_that_gives_something_else_back_is_seen():
    model, plain = Model(["mlp"] * 4), Model(["mlp"] * 4)
    checkpointed(model, "full", keep=lambda x: lambda: x.detach() * 2)
    assert not step(model).same(step(plain))
