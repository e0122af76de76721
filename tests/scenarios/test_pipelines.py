"""Faults that pipelines really had elsewhere: the right numbers here, and each fault seen.

Right values come from plain torch in float64, or a closed form. Numbers and inputs are ours; the reports are linked.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import emu
from emu.parallel import Pipeline, Sharding
from emu.parallel.gradients import Gradients
from emu.parallel.pipeline import Times, timed
from emu.parallel.pipeline.schedules import make

SAME = 1e-9  # float64 against float64, in another order of sums: far above rounding, far below the faults (1e-2)

pytestmark = pytest.mark.usefixtures("float64")


def near(a, b):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=SAME, atol=SAME)


# 25. 1F1B hangs when microbatches are fewer than stages. https://github.com/pytorch/torchtitan/issues/775


class Stack(nn.Module):
    """Four layers, squared errors."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(25)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - y) ** 2).sum()


def few():
    g = torch.Generator().manual_seed(26)
    return emu.Batch(torch.randn(7, 3, generator=g), torch.randn(7, 3, generator=g), tokens=21)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_microbatches_than_stages(schedule, microbatches):
    data = few()
    model = Stack()
    (model.loss_sum(data.x, data.y) / data.tokens).backward()

    def program(rank):
        pipe = Pipeline(Stack(), rank, schedule=schedule, microbatches=microbatches)
        return pipe.backward(data), pipe.gather_gradients()

    run = emu.launch(program, emu.Mesh(pp=4))
    for stage, (loss, gradients) in enumerate(run.results):
        assert near(loss, model.loss_sum(data.x, data.y) / data.tokens)
        assert list(gradients) == [f"layers.{stage}.weight", f"layers.{stage}.bias"]
        assert all(near(g, model.get_parameter(name).grad) for name, g in gradients.items())
    # The closed form, of a forward that takes 1 and a backward that takes 2.
    found = timed(make(schedule, 4, microbatches), Times())
    assert found.makespan == (microbatches + 3) * 3
    assert found.bubble_fraction == pytest.approx(3 / (microbatches + 3))


def test_a_last_microbatch_that_is_lost_is_seen():
    """Negative control: fewer microbatches than there are, as one that stops early."""
    data = few()
    model = Stack()
    (model.loss_sum(data.x[:-1], data.y[:-1]) / data.tokens).backward()

    def program(rank):
        pipe = Pipeline(Stack(), rank, microbatches=3)
        pipe.backward(data)
        return pipe.gather_gradients()

    for gradients in emu.launch(program, emu.Mesh(pp=4)).results:
        assert not any(near(g, model.get_parameter(name).grad) for name, g in gradients.items())


# 28. Accumulated gradients divided at every accumulation step. https://github.com/pytorch/torchtitan/issues/1733


class Two(nn.Module):
    """tanh(x @ W1) @ W2, squared errors."""

    def __init__(self, w1, w2):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False)])
        with torch.no_grad():
            self.layers[0].weight.copy_(w1.T)
            self.layers[1].weight.copy_(w2.T)

    def loss_sum(self, x, y):
        return ((self.layers[1](torch.tanh(self.layers[0](x))) - y) ** 2).sum()


def twelve():
    g = torch.Generator().manual_seed(28)
    x, y = torch.randn(12, 4, generator=g), torch.randn(12, 1, generator=g)
    return x, y, torch.randn(4, 3, generator=g), torch.randn(3, 1, generator=g)


def mean_gradients():
    x, y, *weights = twelve()
    model = Two(*weights)
    (model.loss_sum(x, y) / 12).backward()
    return [layer.weight.grad for layer in model.layers]


def accumulates(rank, schedule, wrong=""):
    """Three batches of two microbatches, and one step."""
    x, y, *weights = twelve()
    pipe = Pipeline(Two(*weights), rank, schedule=schedule, microbatches=2)
    total = 0
    for a, b in zip(x.split(4), y.split(4)):
        total = total + pipe.add_gradients(emu.Batch(a, b, tokens=4))
        if wrong == "divided at every step":
            for p in pipe.model.parameters():
                p.grad.div_(2)
    pipe.finish({"": 12, "never divided": 1}.get(wrong, 12))
    return total, pipe.gather_gradients()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_accumulation_over_batches_is_the_mean_over_all_of_them(schedule):
    results = emu.launch(accumulates, emu.Mesh(pp=2), args=(schedule,)).results
    x, y, *weights = twelve()
    assert near(sum(total for total, _ in results), Two(*weights).loss_sum(x, y))
    for stage, ((_, gradients), right) in enumerate(zip(results, mean_gradients(), strict=True)):
        assert near(gradients[f"layers.{stage}.weight"], right)


@pytest.mark.parametrize("wrong", ["divided at every step", "never divided"])
def test_accumulation_as_it_was_is_seen(wrong):
    results = emu.launch(accumulates, emu.Mesh(pp=2), args=("1f1b", wrong)).results
    for stage, ((_, gradients), right) in enumerate(zip(results, mean_gradients(), strict=True)):
        assert (gradients[f"layers.{stage}.weight"] - right).abs().max() > 0.1


def test_the_oracles_fault_is_of_the_oracles_size():
    """Of each step's two microbatches' mean gradients, halved with all before them: off by 0.52 at most, on this input."""
    x, y, *weights = twelve()
    wrong = None
    for a, b in zip(x.split(4), y.split(4)):
        both = []
        for c, d in zip(a.split(2), b.split(2)):
            model = Two(*weights)
            (model.loss_sum(c, d) / 2).backward()
            both.append(torch.cat([layer.weight.grad.T.reshape(-1) for layer in model.layers]))
        wrong = (both[0] + both[1] + (0 if wrong is None else wrong)) / 2
    right = torch.cat([g.T.reshape(-1) for g in mean_gradients()])
    assert float((wrong / 3 - right).abs().max()) == pytest.approx(0.52, abs=0.005)


# 31. Copies of a tied table drift apart. https://github.com/uw-syfi/piper/issues/13

LR = {"lr": 0.05, "weight_decay": 0.1}
STEPS = 3


class Tied(nn.Module):
    """logits = tanh(E[ids] @ A ...) @ E.T, with as many maps between the two uses of E as stages need."""

    def __init__(self, maps):
        super().__init__()
        g = torch.Generator().manual_seed(31)
        self.embedding = nn.Embedding(6, 3)
        self.maps = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(maps))
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g))

    def loss_sum(self, ids, y):
        x = self.embedding(ids)
        for a in self.maps:
            x = torch.tanh(a(x))
        return F.cross_entropy(self.head(x), y, reduction="sum")


IDS = emu.Batch(torch.tensor([0, 1, 5, 3]), torch.tensor([1, 5, 3, 2]))
PLACED = [
    (2, "1f1b", 2),
    (4, "1f1b", 4),
    (2, "zb-h1", 2),
    (4, "gpipe", 4),
    (1, "zb-v", 2),
    (2, "zb-v", 4),
    (2, "dualpipe", 2),
]


def on_one_device(maps):
    """Table after every step, and the first gradient."""
    model = Tied(maps)
    optimizer = torch.optim.AdamW(model.parameters(), **LR)
    tables, first = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model.loss_sum(IDS.x, IDS.y) / 4).backward()
        first = model.embedding.weight.grad.clone() if first is None else first
        optimizer.step()
        tables.append(model.embedding.weight.detach().clone())
    return tables, first


def on_stages(rank, maps, schedule, how):
    axes = [axis for axis in rank.mesh.axes if axis == "dp"]
    pipe = Pipeline(Tied(maps), rank, *axes, schedule=schedule, microbatches=2, **how)
    optimizer = pipe.optimizer(torch.optim.AdamW, **LR)
    tables, first = [], None
    for _ in range(STEPS):
        pipe.backward(IDS)
        first = pipe.gather_gradients().get("embedding.weight") if first is None else first
        optimizer.step()
        tables.append(pipe.gather_parameters().get("embedding.weight"))
        tables[-1] = None if tables[-1] is None else tables[-1].detach().clone()
    return first, tables


def drift(pp, schedule, maps, how=None, axes=None):
    """How many ranks have the table, and the worst difference of a copy after any step, and of the first gradient."""
    right, gradient = on_one_device(maps)
    mesh = emu.Mesh(pp=pp, **(axes or {}))
    found = emu.launch(on_stages, mesh, args=(maps, schedule, dict(how or {}))).results
    found = [(first, tables) for first, tables in found if first is not None]
    errors = [float((a - b).abs().max()) for _, tables in found for a, b in zip(tables, right, strict=True)]
    return len(found), max(errors), max(float((first - gradient).abs().max()) for first, _ in found)


@pytest.mark.parametrize(("pp", "schedule", "maps"), PLACED)
def test_copies_of_a_tied_table_stay_the_same(pp, schedule, maps):
    copies, off, gradient_off = drift(pp, schedule, maps)
    assert copies == (1 if schedule == "zb-v" else 2)  # in a V both uses are of one rank
    assert off < SAME and gradient_off < SAME


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_so_they_do_where_they_are_sharded(zero):
    copies, off, gradient_off = drift(2, "1f1b", 2, {"zero": zero}, {"dp": 2})
    assert copies == 4 and off < SAME and gradient_off < SAME


@pytest.mark.parametrize(("pp", "schedule", "maps"), PLACED[:2])
def test_a_mean_of_the_two_uses_is_seen(monkeypatch, pp, schedule, maps):
    finish = Gradients.finish

    def halves(self, divisor):
        return finish(self, divisor * (2 if "embedding.weight" in self.shards.flat.names else 1))

    monkeypatch.setattr(Gradients, "finish", halves)
    _, _, gradient_off = drift(pp, schedule, maps)
    assert gradient_off > 1e-2


@pytest.mark.parametrize(("pp", "schedule", "maps"), PLACED[:2])
def test_copies_whose_gradients_are_not_summed_are_seen(monkeypatch, pp, schedule, maps):
    def alone(self, name):
        return (self.rank.coords["pp"],)

    monkeypatch.setattr(Sharding, "copies", alone)
    _, off, gradient_off = drift(pp, schedule, maps)
    assert off > 1e-2 and gradient_off > 1e-2
