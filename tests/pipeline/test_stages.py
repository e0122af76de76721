"""What a stage lacks is told: plain models that would compute something else in stages are refused, not trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu
from emu.models import Config, Decoder
from emu.parallel import shard_model
from emu.parallel.pipeline.running.stages import Stages

WIDTH = 6
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 1])


class Chain(nn.Module):
    """Layers, with a norm before and a head after; a subclass says what is done with them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LayerNorm(WIDTH)
        self.first.register_buffer("mask", torch.rand(WIDTH))
        with torch.no_grad():
            self.first.weight.uniform_(0.5, 2)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def layer(self):
        return nn.Linear(WIDTH, WIDTH)

    def through(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def loss_sum(self, x, y):
        return F.cross_entropy(self.head(self.through(x)), y, reduction="sum")


class ReadsWeight(Chain):
    def through(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(F.layer_norm(x, (WIDTH,), self.first.weight, self.first.bias)))
        return self.first(x)


class ReadsWeightLate(Chain):
    def loss_sum(self, x, y):
        return F.cross_entropy(self.head(self.through(x) * self.first.weight), y, reduction="sum")


class ReadsBuffer(Chain):
    def loss_sum(self, x, y):
        h = self.through(x)
        return F.cross_entropy(self.head(h if self.first.mask is None else h * self.first.mask), y, reduction="sum")


class SumsParameters(Chain):
    def loss_sum(self, x, y):
        return super().loss_sum(x, y) + sum(p.pow(2).sum() for p in self.parameters())


class KeepsLosses(Chain):
    class Layer(nn.Linear):
        aux: torch.Tensor | float = 0.0

        def forward(self, x):
            self.aux = x.pow(2).sum()
            return super().forward(x)

    def layer(self):
        return self.Layer(WIDTH, WIDTH)

    def loss_sum(self, x, y):
        loss = super().loss_sum(x, y)
        return loss + sum(layer.aux for layer in self.layers)


class WritesIntoLists(Chain):
    class Layer(nn.Linear):
        def forward(self, x, seen):
            seen.append(x)
            return super().forward(sum(seen))

    def layer(self):
        return self.Layer(WIDTH, WIDTH)

    def through(self, x):
        seen: list[torch.Tensor] = []
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, seen)
        return x


class Tuples(Chain):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    def layer(self):
        return self.Layer(WIDTH, WIDTH)

    def through(self, x):
        x = self.first(x)
        for layer in self.layers:
            x, _ = layer(x)
        return x


class InPlace(Chain):
    def layer(self):
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


class Reentrant(Chain):
    def through(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def trained(rank, model, how):
    pipe = emu.Pipeline(model(), rank, microbatches=2, find_unused=True, **how)
    return pipe.backward((X, Y)), pipe.gather_gradients()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ReadsWeight, r"'weight' of first \(stage 0\) is read outside of that module"),
        (ReadsWeightLate, r"'weight' of first \(stage 0\) is read outside of that module"),
        (ReadsBuffer, r"'mask' of first \(stage 0\) is read outside of that module"),
        (SumsParameters, "loss_sum reads all parameters of SumsParameters"),
        (KeepsLosses, "layers.0 keeps 'aux', a tensor with a gradient, on stage 0"),
        (WritesIntoLists, "layers.0 is given a list, a dict or a set"),
        (Tuples, "layers.0 returns no single tensor"),
        (InPlace, "the first module of stage 1 writes into its input in place"),
        (Reentrant, "layers.2 is called without gradients, as within a reentrant checkpoint"),
    ],
)
def test_what_would_compute_something_else_is_told(model, says):
    with pytest.raises(emu.EmuError, match=says):
        emu.launch(trained, emu.Mesh(pp=2), args=(model, {}))


class Checkpointed(Chain):
    def through(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class OtherWidths(nn.Module):
    """Code between modules that looks at the width of what an earlier one returned, which is not what comes later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((8, 8), (8, 4), (4, 8), (8, 8)))
        self.head = nn.Linear(8, 3)

    def loss_sum(self, x, y):
        h = self.enter(x)
        scale = h.shape[-1] ** -0.5
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.cross_entropy(self.head(h) * scale, y, reduction="sum")


class Shared(Chain):
    """One module in two lists: it lies where it comes first."""

    def __init__(self):
        super().__init__()
        self.again = nn.ModuleList([self.layers[3]])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("model", [Chain, Checkpointed, OtherWidths, Shared])
def test_what_computes_the_same_is_trained(model, schedule):
    mesh = emu.Mesh(pp=2)
    alone = model()
    loss = alone.loss_sum(X, Y)
    loss.backward()
    results = emu.launch(trained, mesh, args=(model, {"schedule": schedule})).results
    for got, gradients in results:
        assert torch.allclose(got.float(), loss.detach() / 4, rtol=1e-5)  # float32, in another order of sums
        for name, grad in gradients.items():
            assert torch.allclose(grad, alone.get_parameter(name).grad / 4, rtol=1e-4, atol=1e-6), name
    assert {name for _, gradients in results for name in gradients} == {name for name, _ in alone.named_parameters()}


def test_without_the_shapes_of_earlier_modules_the_loss_is_another(monkeypatch):
    """The control: shapes of what was received, in place of what each module returned."""
    form_of = Stages.form_of

    def alike(self, output, before):
        form = form_of(self, output, before)
        return form._replace(units=tuple((form.shape, form.dtype) for _ in form.units))

    monkeypatch.setattr(Stages, "form_of", alike)
    wrong = emu.launch(trained, emu.Mesh(pp=2), args=(OtherWidths, {"stages": ["layers.2"]})).results[0][0]
    assert abs(float(wrong) - float(OtherWidths().loss_sum(X, Y).detach()) / 4) > 1e-3


@pytest.mark.parametrize("what", ["batch", "microbatches", "schedule"])
def test_ranks_of_a_pipeline_must_mean_the_same(what):
    def program(rank):
        other = int(rank) == 1
        schedule = "zb-h1" if other and what == "schedule" else "1f1b"
        pipe = emu.Pipeline(Chain(), rank, schedule=schedule, microbatches=2)
        x = X + 1 if other and what == "batch" else X
        pipe.backward((x, Y), microbatches=[1, 3] if other and what == "microbatches" else [2, 2])

    says = {"batch": "inputs", "microbatches": "rows in their microbatches", "schedule": "schedules"}[what]
    with pytest.raises(emu.EmuError, match=f"ranks 0 and 1 .* were given different {says}"):
        emu.launch(program, emu.Mesh(pp=2))


class Skips(Chain):
    """A skip that is passed by name."""

    class Layer(nn.Linear):
        def forward(self, x, skip):
            return super().forward(x + skip)

    def layer(self):
        return self.Layer(WIDTH, WIDTH)

    def through(self, x):
        x = first = self.first(x)
        for layer in self.layers:
            x = layer(x, skip=first)
        return x


class CalledAgain(Chain):
    def through(self, x):
        return self.layers[0](super().through(x))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Skips, "layers.2 needs the output of first, which lies before stage 1"),
        (CalledAgain, "stage 0. is called after modules of stage 1"),
    ],
)
def test_what_stages_cannot_do_is_told(model, says):
    with pytest.raises(emu.EmuError, match=says):
        emu.launch(trained, emu.Mesh(pp=2), args=(model, {}))


def test_every_sequence_has_its_own_length_under_sp():
    """Stages are told how long a sequence is whose tokens they have some of: 5 and 4 of 2 ranks are 3, 2 and 2, 2 each."""
    config = Config(layers=4, width=8, heads=2, vocab=16, seq=6)
    drawn = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(0, 16, (2, n), generator=drawn) for _ in range(2)) for n in (5, 4, 3, 6, 5)]

    def program(rank):
        model = Decoder(config)
        sharding = shard_model(model, rank, sp=True)
        pipe = emu.Pipeline(model, rank, schedule="zb-v", microbatches=2, sharding=sharding)
        return torch.stack([pipe.evaluate(batch) for batch in batches] + [pipe.backward(batch) for batch in batches])

    losses = emu.launch(program, emu.Mesh(pp=2, tp=2)).results[0]
    alone = torch.stack([Decoder(config).loss_sum(x, y) / y.numel() for x, y in batches]).double()
    assert torch.allclose(losses, torch.cat([alone, alone]), rtol=1e-6)  # float32, in another order of sums
