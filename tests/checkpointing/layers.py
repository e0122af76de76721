"""A chain of equal layers whose kept bytes one can count on fingers, and steps of it with and without offloading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import emu
from emu.hardware import HostLink, cluster
from emu.parallel.checkpointing.offload import offloaded
from emu.trace.events import HostCopy

WIDTH, ROWS, ITEM = 16, 8, 4  # float32
ROW = ROWS * WIDTH * ITEM  # bytes of one activation
# The norm keeps its input, and a mean and a deviation of each row; the products keep their inputs, one and four activations
# wide; gelu keeps its own, four wide. x + y keeps nothing.
KEPT = ROW + 2 * ROWS * ITEM + ROW + 4 * ROW + 4 * ROW


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """x: [rows, WIDTH]. The table, of which layers keep a part, is one for all."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that every layer's input is an activation
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()  # which keeps nothing


def step(rank: emu.Rank, layers: int, how: dict[str, Any] | None) -> Any:
    """Gradients of one step. how: arguments of `offloaded`; None: without it."""
    torch.manual_seed(0)
    model = Chain(layers).to(rank.device)
    rank.watch(model)
    if how is not None:
        offloaded(model, rank, **how)
    x = torch.randn(ROWS, WIDTH, device=rank.device)
    rank.mark("step")
    model(x).backward()
    rank.mark("done")
    return emu.grads(model)


def launched(layers: int, how: dict[str, Any] | None, program: Any = step, **options: Any) -> emu.Run:
    return emu.launch(program, emu.Mesh(dp=1, on=cluster("h100")), args=(layers, how), **options)


def peak(run: emu.Run) -> int:
    """The most bytes of activations within the step."""
    return max(run.memory.window("step", "done").series(0)[1]["activations"])


def copied(run: emu.Run, rank: int = 0) -> dict[str, int]:
    total = {"to_host": 0, "from_host": 0}
    for _, event in run.trace.of(HostCopy, rank=rank):
        total[event.kind] += event.bytes
    return total


def on_link(rate: float, latency_s: float = 0.0):
    """H100s whose hosts launch in no time, with a host link of so many bytes/s."""
    there = cluster("h100")
    host = replace(there.host, launch_s=1e-12)
    return replace(there, host=host, node=replace(there.node, host_link=HostLink("toy", rate, 1.0, latency_s)))
