"""What a checkpoint cannot compute again is told, by the layer's name: never another number."""

import pytest
import torch
from torch import nn

import emu
from emu.models import GPT, Config
from emu.parallel.checkpointing import Policy, Segment, checkpointed, checkpointed_modules
from emu.spmd import EmuError, PlanError

from .models import WIDTH, Mlp, Model, both, step

MIXED = ["full", "every:2", "every:3", "repeated:2", "naive", "nested:4,2"]
LONG = [p for p in MIXED if p != "full"]  # segments of several layers, or from an earlier layer


def made(kind=Mlp, around=Model, n=5, policy="full", at=None):
    """A checkpointed model, of which layer `at` (or all) is of another kind."""
    model = around(["mlp"] * n)
    for i, layer in enumerate(model.layers):
        if at is None or i == at:
            layer.__class__ = kind
    if policy is not None:
        checkpointed(model, policy)
    return model


# In place.


class WritesInput(Mlp):
    def forward(self, x, scale=None):
        x += super().forward(x, scale)
        return x


class WritesFirst(Mlp):
    """As nets do whose blocks begin with an activation in place."""

    def forward(self, x, scale=None):
        return super().forward(x.mul_(2), scale)


class Between(Model):
    """Writes between layers into what a layer returned."""

    def forward(self, x):
        x, scale = self.first(x), x.mean()
        for i, layer in enumerate(self.layers):
            x = layer(x, scale)
            if i == 2:
                x.mul_(2)
        return self.head(x)


class Late(Model):
    """Writes into a layer's input after the layer."""

    def forward(self, x):
        x, scale = self.first(x), x.mean()
        for i, layer in enumerate(self.layers):
            before, x = x, layer(x, scale)
            if i == 3:
                before.mul_(2)
        return self.head(x)


@pytest.mark.parametrize("policy", MIXED)
def test_a_layer_that_writes_into_its_input_is_right_or_named(policy):
    """Without checkpointing autograd takes it. Within a segment its input is computed anew, and it may write."""
    right = step(made(WritesFirst, policy=None, at=3))
    begins = any(s.start == 3 for s in Policy.named(policy, 5).segments)
    model = made(WritesFirst, policy=policy, at=3)
    if begins:
        with pytest.raises(EmuError, match=r"layers\.3 writes into its input in place.*\n.*x = x \+ y"):
            step(model)
    else:
        assert step(model).same(right)


@pytest.mark.parametrize("policy", MIXED)
def test_what_autograd_refuses_is_refused(policy):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(made(WritesInput, policy=None))
    with pytest.raises((EmuError, RuntimeError), match=r"layers\.\d (writes into its input|: a tensor)|in.?place"):
        step(made(WritesInput, policy=policy))


@pytest.mark.parametrize("policy", MIXED)
def test_a_write_between_layers_is_right_or_named(policy):
    right = step(made(around=Between, policy=None))
    model = made(around=Between, policy=policy)
    begins = any(s.start == s.source == 3 for s in Policy.named(policy, 5).segments)
    if begins:
        assert step(model).same(right)
    else:
        with pytest.raises(EmuError, match=r"what layers\.2 returned was overwritten in place before layers\.3"):
            step(model)


@pytest.mark.parametrize("policy", ["full", "every:3"])
def test_a_write_into_what_was_kept_is_named(policy):
    """Autograd tells it, too, where a layer's backward reads its input."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(made(around=Late, policy=None))
    with pytest.raises(EmuError, match=r"the input of layers\.3 was overwritten in place after it was kept"):
        step(made(around=Late, policy=policy))


def test_a_write_into_an_argument_that_layers_share_is_named():
    class Sharing(Model):
        def forward(self, x):
            mask = torch.ones(())
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, mask)
            mask.mul_(2)
            return self.head(x)

    with pytest.raises(EmuError, match=r"an argument of layers\.4 was overwritten"):
        step(made(around=Sharing))


# Chains that are none.


class Apart(Model):
    def forward(self, x):
        x, scale = self.first(x), x.mean()
        for layer in self.layers:
            x = torch.tanh(layer(x, scale))
        return self.head(x)


class Backwards(Model):
    def forward(self, x):
        x, scale = self.first(x), x.mean()
        x = self.layers[0](x, scale)
        for layer in list(self.layers)[:0:-1]:
            x = layer(x, scale)
        return self.head(x)


class Twice(Model):
    """Two layers read what one returned."""

    def forward(self, x):
        x, scale = self.first(x), x.mean()
        x = self.layers[0](x, scale)
        x = self.layers[1](x, scale) + self.layers[2](x, scale)
        return self.head(x)


@pytest.mark.parametrize("around", [Apart, Backwards, Twice])
def test_layers_of_any_order_can_be_checkpointed_one_by_one(around):
    assert step(made(around=around, policy="full")).same(step(made(around=around, policy=None)))


@pytest.mark.parametrize("policy", LONG)
@pytest.mark.parametrize(
    ("around", "says"),
    [
        (Apart, r"computes layers\.\d again from layers before it, but it is not called with what layers\.\d returned"),
        (Backwards, r"layers\.\d is called after layers\.\d, which comes after it|not called with what"),
    ],
)
def test_layers_that_are_no_chain_are_named(around, says, policy):
    with pytest.raises(EmuError, match=says) as error:
        step(made(around=around, policy=policy))
    assert "checkpoint=full" in str(error.value)


def test_two_ways_through_one_segment_are_named():
    with pytest.raises(EmuError, match=r"layers\.2 is called with what layers\.0 returned, and so was another layer"):
        step(made(around=Twice, policy="every:3"))
    for policy in ("naive", "repeated:2"):
        model, plain = made(around=Twice, policy=policy), made(around=Twice, policy=None)
        try:
            assert step(model).same(step(plain))
        except EmuError as error:
            assert "so was another layer" in str(error)


def test_what_layers_could_write_into_is_refused():
    class Caching(Model):
        def forward(self, x):
            cache = []
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, cache)
            return self.head(x)

    with pytest.raises(EmuError, match=r"layers\.0 is given a list, into which it may write"):
        step(made(around=Caching))


def test_activations_must_come_first():
    class Listed(Model):
        def forward(self, x):
            return self.layers[0]([self.first(x)])

    with pytest.raises(EmuError, match=r"layers\.0 is called with a list first"):
        step(made(around=Listed))


# What a second forward must find as it was.


def test_a_change_of_mode_or_parameters_before_backward_is_named():
    model = made(policy="every:2")
    loss = model.loss_sum(torch.randn(4, WIDTH), 1.0)
    model.eval()
    with pytest.raises(EmuError, match=r"layers\.4 was in training when it was called, and is not now"):
        loss.backward()
    model = made(policy="every:2")
    loss = model.loss_sum(torch.randn(4, WIDTH), 1.0)
    with torch.no_grad():
        model.layers[4].up.weight.mul_(2)
    with pytest.raises(EmuError, match=r"parameters of layers\.4 changed between its forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("policy", ["full", "every:3", "naive"])
def test_a_layer_that_counts_its_calls_is_named(policy):
    class Counting(Mlp):
        calls = 0

        def forward(self, x, scale=None):
            Counting.calls += 1
            out = super().forward(x, scale)
            return out * out if Counting.calls == 5 else torch.cat([out, out])[: len(out)]

    with pytest.raises(EmuError, match=r"layers\.\d computes something else the second time"):
        step(made(Counting, policy=policy))


# Calls.


def test_what_is_no_policy_is_named():
    for name, says in [
        ("some", "no checkpointing policy 'some'"),
        ("every", "lacks number of layers|lacks"),
        ("full:3", "takes no"),
        ("every:0", "no number of layers"),
        ("every:x", "no number of layers"),
        ("every:2,2", "no number of layers"),
        ("nested:2,4", "no smaller"),
        ("nested:", "no number"),
        (3, "is a int"),
    ]:
        with pytest.raises(PlanError, match=says) as error:
            checkpointed(Model(["mlp"] * 4), name)
        assert error.value.field == "checkpoint"
        assert error.value.hint


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([Segment(0, 2, 0), Segment(1, 3, 1)], "overlaps"),
        ([Segment(2, 2, 2)], "is empty"),
        ([Segment(2, 9, 2)], "leaves the 4 layers"),
        ([Segment(0, 2, 0), Segment(2, 4, 1)], "is not kept"),
        ([Segment(0, 1, 0), Segment(2, 4, 0)], "belong to no segment"),
        ([Segment(0, 1, 0), Segment(1, 2, 0), Segment(2, 4, 1)], "is not kept"),
        ([Segment(0, 2, 0), Segment(2, 4, 0, (2,))], "keeps"),
        ([Segment(0, 2, 0), Segment(2, 4, 0, (1,))], "keeps"),
    ],
)
def test_segments_that_cannot_be_are_named(segments, says):
    with pytest.raises(PlanError, match=says):
        Policy("mine", 4, tuple(segments))


def test_models_that_cannot_be_checkpointed_are_named():
    with pytest.raises(EmuError, match="Linear has no list of layers"):
        checkpointed(nn.Linear(2, 2), "full")
    with pytest.raises(EmuError, match="no module"):
        checkpointed([nn.Linear(2, 2)], "full")
    with pytest.raises(EmuError, match=r"'blocks' is no list.*\n.*its lists are: layers"):
        checkpointed(Model(["mlp"]), "full", layers="blocks")
    with pytest.raises(EmuError, match="a Linear is no module of Model"):
        checkpointed(Model(["mlp"]), "full", layers=[nn.Linear(2, 2)])
    with pytest.raises(PlanError, match="is for 3 layers, and Model has 4"):
        checkpointed(Model(["mlp"] * 4), Policy.named("full", 3))
    with pytest.raises(PlanError, match="is a list"):
        checkpointed(Model(["mlp"] * 4), [Segment(0, 4, 0)])
    with pytest.raises(EmuError, match=r"layers\.0 is checkpointed already"):
        checkpointed(made(), "naive")
    with pytest.raises(EmuError, match="the rank is a int"):
        checkpointed(Model(["mlp"]), "full", 3)
    shared = Mlp(0.1)
    twice = nn.ModuleList([shared, shared])
    model = Model(["mlp"])
    model.layers = twice
    with pytest.raises(EmuError, match=r"twice|already"):
        checkpointed(model, "full", layers=[shared, shared])
    with pytest.raises(PlanError, match=r"has no module '\*\.attention\.core'"):
        checkpointed_modules(Model(["mlp"]))
    with pytest.raises(PlanError, match="lies inside"):
        checkpointed_modules(Model(["mlp"]), "layers*")
    with pytest.raises(PlanError, match="no operator 'matmull'"):
        checkpointed(Model(["mlp"]), "full", operators=["matmull"])
    for view in ("view", "add_", "transpose"):
        with pytest.raises(PlanError, match="nothing new that could be kept"):
            checkpointed(Model(["mlp"]), "full", operators=[view])


def test_a_model_that_lies_on_stages_already_is_named():
    def program(rank):
        model = GPT(Config(layers=2, width=8, heads=1, vocab=8, seq=4), seed=0)
        emu.parallel.Pipeline(model, rank)
        checkpointed(model, "full", rank)

    with pytest.raises(EmuError, match=r"blocks\.0 lies on a stage of a pipeline.*\n.*before Pipeline"):
        emu.launch(program, emu.Mesh(pp=2))


def test_the_helpers_see_a_difference():
    plain, changed = both(["mlp"] * 3, "full", p=0.5)
    other = both(["mlp"] * 3, "full", p=0.4)[1]
    assert changed.same(plain)
    assert not other.same(plain)
