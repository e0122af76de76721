"""What a checkpoint cannot compute again is told, by the layer's name: never another number."""

import pytest
import torch

from emu.parallel.checkpointing import Policy, checkpointed
from emu.spmd import EmuError

from .models import WIDTH, Mlp, Model, step

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


def test_a_layer_after_a_piece_that_others_follow_already_is_named():
    """Layer 2 begins the next segment and follows layer 0; layer 1 would lengthen the way that layer 2 set out from."""

    class OutOfOrder(Model):
        def forward(self, x):
            h = self.layers[0](self.first(x))
            later = self.layers[2](h)
            return self.head(later * self.layers[1](h))

    for policy in ("repeated:2", "naive"):
        plain, model = made(around=OutOfOrder, policy=None), made(around=OutOfOrder, policy=policy)
        if policy == "naive":  # each layer a piece of its own, and two may follow one
            assert step(model).same(step(plain))
            continue
        with pytest.raises(
            EmuError, match=r"layers\.1 is called with what layers\.0 returned, and so was another layer"
        ):
            step(model)


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
