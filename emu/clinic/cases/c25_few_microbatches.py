"""A 1F1B schedule for four stages, written by hand, with two microbatches."""

import torch
from torch import nn

import emu
from emu.clinic.examined import Case
from emu.parallel.pipeline import Action

STAGES, MICROBATCHES = 4, 2


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(25)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(STAGES))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).sum()


def batch():
    g = torch.Generator().manual_seed(26)
    return emu.Batch(torch.randn(6, 3, generator=g), torch.randn(6, 3, generator=g), tokens=18)


def one_f_one_b(rank, microbatches, ahead):
    for m in range(ahead):
        yield Action(rank, "F", m)
    for m in range(microbatches):
        if ahead + m < microbatches:
            yield Action(rank, "F", ahead + m)
        yield Action(rank, "B", m)


def train(rank, schedule):
    pipe = emu.Pipeline(Stack(), rank, schedule=schedule, microbatches=MICROBATCHES)
    pipe.backward(batch())
    return pipe.gather_gradients()


def broken(rank):
    def by_hand(stage, stages, microbatches, chunks):
        return one_f_one_b(stage, microbatches, ahead=stages - 1 - stage)  # the fault: there may be fewer

    return train(rank, by_hand)


def mended(rank):
    def by_hand(stage, stages, microbatches, chunks):
        return one_f_one_b(stage, microbatches, ahead=min(stages - 1 - stage, microbatches))

    return train(rank, by_hand)


def reference():
    model, data = Stack(), batch()
    model.loss_sum(data.x, data.y).backward()
    return {name: p.grad / data.tokens for name, p in model.named_parameters()}


CASE = Case(
    number=25,
    kind="pipeline",
    title="1F1B with fewer microbatches than stages",
    report="The schedule ran as many forwards ahead as there are stages behind, and hung where there were fewer microbatches "
    "than that.",
    url="https://github.com/pytorch/torchtitan/issues/775",
    mesh=emu.Mesh(pp=STAGES),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="No more forwards ahead than microbatches: min(stages - 1 - stage, microbatches). With m microbatches on four "
    "stages the bubble is 3 / (m + 3) of the step: 3/5 here.",
)
