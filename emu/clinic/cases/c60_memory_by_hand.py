"""ZeRO-2 with ten parameters on four ranks: how many bytes of model states has the fullest rank?"""

import math

import torch

import emu
from emu.clinic.examined import Case, compared

P, N = 10, 4  # parameters, ranks


class Dot(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(P))

    def loss_sum(self, x, y):
        return (self.p * x).sum()


def train(rank):
    """One step. What is returned lives on, and so does its memory."""
    dist = emu.DataParallel(Dot(), rank, "dp", zero=2, precision="bf16-mixed")
    optimizer = dist.optimizer(torch.optim.Adam, lr=0.1)
    dist.backward(emu.Batch(torch.ones(N, 1), torch.zeros(N), tokens=N))
    optimizer.step()
    rank.mark("stepped")
    return dist, optimizer


def broken(rank):
    parameters, gradients, states = 2 * P, 2 * P, 12 * P / N  # the fault: stage 2 cuts gradients, too
    return {"by hand": parameters + gradients + states, "alive": train(rank)}


def mended(rank):
    shard = math.ceil(P / N)
    parameters, gradients, states = 2 * P, 2 * shard, 12 * shard
    return {"by hand": parameters + gradients + states, "alive": train(rank)}


def states(run):
    """Model states at the end, as they were allocated on rank 0."""
    lines = run.memory.series(0)[1]
    held = sum(lines[category][-1] for category in ("parameters", "gradients", "optimizer"))
    return compared("model states", run.results[0]["by hand"], held, "bytes", "run.memory.series(0)")


CASE = Case(
    number=60,
    kind="memory estimate",
    title="A formula for ZeRO-2 forgets that gradients are sharded",
    report="The estimate for stage 2 counted whole gradients on every rank, and did not say where its multipliers came from.",
    url="https://github.com/deepspeedai/DeepSpeed/issues/5102",
    mesh=emu.Mesh(dp=N),
    broken=broken,
    mended=mended,
    question=states,
    precision="fp32",
    cure="In bfloat16 with Adam in float32 a parameter takes 2 + 2 + 12 bytes. Stage 1 cuts the 12 over the ranks, stage 2 "
    "the gradient's 2 as well, stage 3 all; pieces are rounded up: 62 bytes here.",
)
