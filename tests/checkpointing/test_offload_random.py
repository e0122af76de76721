"""Random layers, called in random orders, forwards and backwards interleaved at random: the same bits as without offloading."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.parallel.checkpointing import offloaded
from emu.trace.compare import first_difference
from emu.trace.events import Alloc, HostCopy

WIDTH = 6
OPS = {
    "linear": lambda layer, x, skip: layer.linear(x),
    "norm": lambda layer, x, skip: F.layer_norm(x, (WIDTH,)),
    "softmax": lambda layer, x, skip: x.softmax(-1),
    "sigmoid": lambda layer, x, skip: x.sigmoid(),
    "in place": lambda layer, x, skip: (x + 0).relu_(),
    "dropout": lambda layer, x, skip: F.dropout(x, 0.3),
    "halves": lambda layer, x, skip: torch.cat([a * b for a, b in [x.chunk(2, -1), x.chunk(2, -1)[::-1]]], -1),
    "turned": lambda layer, x, skip: (x.t() @ x).t()[:1] + x,
    "table": lambda layer, x, skip: x * layer.table * layer.table.sin(),
    "skip": lambda layer, x, skip: x * skip,
    "frozen": lambda layer, x, skip: x * layer.frozen,
    "cast": lambda layer, x, skip: (x.double() * x.double()).float().tanh(),
    "empty": lambda layer, x, skip: x + (x[:0] * x[:0]).sum(),
}


class Layer(nn.Module):
    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self.ops = ops
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("table", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        for op in self.ops:
            x = OPS[op](self, x, skip)
        return x


class Program(NamedTuple):
    """Fields:
    layers: the ops of each.
    calls: which layer is called when, and of which earlier value it gets a skip, by how many calls back.
    passes: "F" begins a forward, a number ends one of those under way by a backward.
    how: arguments of `offloaded`.
    """

    layers: list[list[str]]
    calls: list[tuple[int, int]]
    passes: list[str | int]
    how: dict[str, int]


@st.composite
def programs(draw) -> Program:
    layers = draw(st.lists(st.lists(st.sampled_from(list(OPS)), max_size=4), min_size=1, max_size=5))
    calls = [(i, draw(st.integers(0, 3))) for i in range(len(layers))]
    for _ in range(draw(st.integers(0, 2))):  # a layer that is called once more, anywhere
        calls.insert(draw(st.integers(0, len(calls))), (draw(st.integers(0, len(layers) - 1)), draw(st.integers(0, 3))))
    passes: list[str | int] = []
    under_way = 0
    for _ in range(draw(st.integers(1, 6))):
        if under_way and draw(st.booleans()):
            passes.append(draw(st.integers(0, under_way - 1)))
            under_way -= 1
        else:
            passes.append("F")
            under_way += 1
    how = {"ahead": draw(st.integers(1, 3)), "least_bytes": draw(st.sampled_from([0, 0, 60]))}
    return Program(layers, calls, passes, how)


def run(rank, program: Program, offloads: bool):
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(ops) for ops in program.layers)
    model.first = nn.Linear(WIDTH, WIDTH)
    if offloads:
        offloaded(model, rank, **program.how)
    under_way = []
    for step in program.passes:
        if step == "F":
            values = [model.first(torch.rand(3, WIDTH))]
            for layer, back in program.calls:
                values.append(model.layers[layer](values[-1], values[max(0, len(values) - 1 - back)]))
            under_way.append(values.pop().sum())
            del values
        else:
            under_way.pop(step).backward()
    out = emu.grads(model)
    del under_way[:]
    rank.mark("end")
    return out, rank._device.ledger.by_category["activations"]


@given(programs())
@settings(max_examples=80)
def test_any_layers_in_any_order_have_the_same_bits_and_leave_nothing_behind(program):
    mesh = emu.Mesh(dp=1)
    plain, kept = emu.launch(run, mesh, args=(program, False)).results[0]
    run_ = emu.launch(run, mesh, args=(program, True))
    moved, left = run_.results[0]
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[name], moved[name]) for name in plain)
    # What no backward asked for has gone, too; or it is leaving, until the next forward.
    if program.how["ahead"] == 1 or program.passes.count("F") * 2 == len(program.passes):
        assert left == kept
        assert run_.memory.host_series(0)[1][-1:] in ([], [0])
    shapes = emu.launch(run, mesh, args=(program, True), backend="shape")
    assert first_difference(run_.trace, shapes.trace) is None


def test_such_programs_copy_and_allocate():
    """Negative control: they are not all empty."""
    layers = [["linear", "sigmoid", "skip"], ["norm", "in place", "linear"], ["halves", "turned"]]
    program = Program(layers, [(0, 0), (1, 1), (2, 2)], ["F", "F", 0, 0], {"ahead": 1})
    trace = emu.launch(run, emu.Mesh(dp=1), args=(program, True)).trace
    kinds = [e.kind for _, e in trace.of(HostCopy)]
    assert kinds.count("to_host") > 10 and kinds.count("from_host") > 10 and len(list(trace.of(Alloc))) > 50
