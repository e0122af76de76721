"""Three batches of two microbatches each go through two stages, and their gradients are accumulated for one step."""

import torch
from torch import nn

import emu
from emu.clinic.examined import Case


def data():
    g = torch.Generator().manual_seed(28)
    return [torch.randn(*shape, generator=g) for shape in ((12, 4), (12, 1), (4, 3), (3, 1))]


class Two(nn.Module):
    def __init__(self, *weights):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*w.shape, bias=False) for w in weights)
        for layer, w in zip(self.layers, weights):
            layer.weight.data = w.T.clone()

    def loss_sum(self, x, y):
        return ((self.layers[1](torch.tanh(self.layers[0](x))) - y) ** 2).sum()


def broken(rank):
    x, y, *weights = data()
    pipe = emu.Pipeline(Two(*weights), rank, microbatches=2)
    for a, b in zip(x.split(4), y.split(4)):
        pipe.add_gradients(emu.Batch(a, b, tokens=4))
        for p in pipe.model.parameters():
            p.grad.div_(2)  # the fault: the gradients of earlier batches, too, once more every time
    pipe.finish(12 // 2)
    return pipe.gather_gradients()


def mended(rank):
    x, y, *weights = data()
    pipe = emu.Pipeline(Two(*weights), rank, microbatches=2)
    for a, b in zip(x.split(4), y.split(4)):
        pipe.add_gradients(emu.Batch(a, b, tokens=4))
    pipe.finish(12)
    return pipe.gather_gradients()


def reference():
    x, y, *weights = data()
    model = Two(*weights)
    for a, b in zip(x.split(2), y.split(2)):
        model.loss_sum(a, b).backward()
    return {name: p.grad / 12 for name, p in model.named_parameters()}


CASE = Case(
    number=28,
    kind="pipeline",
    title="Accumulated gradients are divided at every step of the schedule",
    report="The schedule divided all that was accumulated by its number of microbatches each time it ran, so earlier "
    "batches counted less and less; a loss that is a sum was never divided at all.",
    url="https://github.com/pytorch/torchtitan/issues/1733",
    mesh=emu.Mesh(pp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Add sums, and divide once at the end, by all rows of all batches. What is divided on the way is divided for each "
    "batch that follows.",
)
