"""Chains of layers of every kind, policies of every shape, and one step of training with and without checkpointing."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

from emu.parallel.checkpointing import Policy, Segment, checkpointed

WIDTH = 6
NAMED = (
    "none",
    "full",
    "every:2",
    "every:3",
    "sqrt",
    "repeated:2",
    "repeated:3",
    "naive",
    "nested:4,2",
    "nested:5,3,1",
    "halving",
)


class Mlp(nn.Module):
    """A residual branch with dropout."""

    def __init__(self, p: float):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x, scale=None):
        y = self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Statistics(nn.Module):
    """Keeps running statistics, and writes into its own tensors in place."""

    def __init__(self, p: float):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.map = nn.Linear(WIDTH, WIDTH)
        self.last = None

    def forward(self, x, scale=None):
        y = self.norm(self.map(x)).relu_()
        self.last = y  # as modules do that add to the loss by themselves
        return torch.dropout(y, 0.3, self.training) + x


class Product(nn.Module):
    """Reads its input twice, and saves its output."""

    def __init__(self, p: float):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=None):
        return (torch.sigmoid(self.map(x)) * x).tanh()


KINDS = {"mlp": Mlp, "statistics": Statistics, "product": Product}


class Model(nn.Module):
    """Layers in a loop, in between an embedding and a head."""

    def __init__(self, kinds, p: float = 0.5, seed: int = 0):
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.first, self.layers, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(KINDS[kind](p) for kind in kinds),
            nn.Linear(WIDTH, 1),
        )
        torch.set_rng_state(state)

    def forward(self, x):
        x, scale = self.first(x), x.mean()
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2).sum()


class Step(NamedTuple):
    """All that a step of training leaves behind."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random: torch.Tensor

    def same(self, other: Step) -> bool:
        return all(map(_same, self, other))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(_same, a, b))


def step(model: nn.Module, order=("F0", "B0"), autocast: bool = False, seed: int = 5) -> Step:
    """Microbatches forward and backward in some order: "F0 F1 B0 F2 B1 B2"."""
    torch.manual_seed(seed)
    losses, inputs, found = {}, {}, []
    for what in order:
        i = int(what[1:])
        if what[0] == "F":
            g = torch.Generator().manual_seed(100 + i)
            inputs[i] = torch.randn(4, WIDTH, generator=g).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, autocast):
                losses[i] = model.loss_sum(inputs[i], 1.0)
        else:
            losses[i].backward()
            found.append(losses.pop(i).detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = dict(model.named_buffers())
    return Step(found, gradients, [x.grad for x in inputs.values()], buffers, torch.get_rng_state())


def both(kinds, policy: Policy | str, p: float = 0.5, **how: Any) -> tuple[Step, Step]:
    """A step without checkpointing, and with it."""
    plain = Model(kinds, p)
    changed = copy.deepcopy(plain)
    checkpointed(changed, policy, layers="layers")
    return step(plain, **how), step(changed, **how)


@st.composite
def policies(draw, layers: int):
    """Any policy: gaps, segments of any sizes and sources, inputs kept on the way."""
    made: list[Segment] = []
    starts: list[int] = []  # of the segments since the last gap
    roots: list[int] = []
    at = 0
    while at < layers:
        size = draw(st.integers(1, layers - at))
        if draw(st.integers(0, 4)) == 0:
            starts, roots = [], []
        else:
            source = draw(st.sampled_from([*roots, at]))
            between = [s for s in starts if source < s < at]
            keeps = tuple(draw(st.lists(st.sampled_from(between), unique=True).map(sorted))) if between else ()
            made.append(Segment(at, at + size, source, keeps))
            starts.append(at)
            roots += [at] if source == at else []
        at += size
    return Policy("drawn", layers, tuple(made))


@st.composite
def orders(draw, microbatches: int):
    """Forwards and backwards of some microbatches, interleaved in any way."""
    left = {i: ["F", "B"] for i in range(microbatches)}
    order = []
    while left:
        i = draw(st.sampled_from(sorted(left)))
        order.append(f"{left[i].pop(0)}{i}")
        if not left[i]:
            del left[i]
    return order
