"""Pipelines to test with: random models cut into random stages, a step of training on ranks, and plain torch beside it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

import emu
from emu.models import GPT, Config
from emu.parallel import Pipeline, shard_model
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.spmd import PlanError

from ..parallel.programs import batch

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
TWO_WAYS = ("dualpipe",)
NAMES = tuple(SCHEDULES)


class Chain(nn.Module):
    """A chain of layers of any widths, with code between them. x: [rows, widths[0]]; y: [rows], below the last width."""

    def __init__(self, widths, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g))

    def loss_sum(self, x, y):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.layers[-1](x), y, reduction="sum", ignore_index=-100)


class Case(NamedTuple):
    """A step of training on a pipeline.

    Fields:
        of: a decoder's Config, or a Chain's widths.
        axes: of the mesh; ep is folded in.
        rows: of every rank along dp, the rows of each of its microbatches.
        cut: where stages begin: "even", layers of each, or names.
        how: further arguments of Pipeline.
        optimizer: kind, and its options.
    """

    of: Any
    axes: dict[str, int]
    schedule: Any = "1f1b"
    chunks: int = 1
    rows: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1),)
    cut: Any = "even"
    sp: bool = False
    how: Any = {}

    def model(self):
        return GPT(self.of, seed=0) if isinstance(self.of, Config) else Chain(self.of)

    def batch(self, seed=0):
        rows = sum(map(sum, self.rows))
        if isinstance(self.of, Config):
            return uneven(batch(self.of, rows, seed))
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.of[0], generator=g, dtype=torch.float64)
        y = torch.randint(0, self.of[-1], (rows,), generator=g)
        y[torch.rand(rows, generator=g) < 0.2] = -100
        y[0] = 0
        return emu.Batch(x.to(torch.get_default_dtype()), y)

    def mesh(self):
        return emu.Mesh(**self.axes)

    def pipeline(self, rank, model=None):
        """The case's pipeline on a rank."""
        model = self.model() if model is None else model
        inside = any(self.axes.get(axis, 1) > 1 for axis in ("tp", "ep", "etp"))
        batched = isinstance(self.of, Config) and self.of.balance_over == "batch" and rank.mesh.size > 1
        return Pipeline(
            model,
            rank,
            *(axis for axis in ("dp",) if axis in rank.mesh.axes),
            schedule=self.schedule,
            microbatches=len(self.rows[0]),
            chunks=self.chunks,
            stages=self.cut,
            sharding=shard_model(model, rank, sp=self.sp) if inside or batched else None,
            **self.how,
        )

    def sizes(self):
        """Rows of every rank along dp."""
        return [sum(rows) for rows in self.rows]

    def microbatches(self, rank):
        return list(self.rows[rank.coords.get("dp", 0)])


def uneven(data):
    """The same batch, in which some rows have no label that counts, and others have few."""
    y = data.y.clone()
    for i in range(len(y)):
        y[i, 1 + i % y.shape[1] :] = -100
    if len(y) > 2:
        y[1] = -100
    return emu.Batch(data.x, y)


RATE, CLIP = 0.1, 0.25


def trained(rank, case, data):
    """A step: loss, gradients, the norm that is clipped, and the loss after it."""
    pipe = case.pipeline(rank)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=RATE, clip=CLIP)
    sizes, rows = case.sizes(), case.microbatches(rank)
    loss = pipe.backward(data, sizes, rows)
    gradients = pipe.gather_gradients()
    norm = optimizer.step().norm
    return {"loss": loss, "norm": norm, "loss after": pipe.evaluate(data, sizes, rows), "parameters": gradients}


def alone(case, data):
    """Plain torch, on the whole batch at once."""
    model = case.model()
    loss = model.loss_sum(data.x, data.y)
    loss.backward()
    squares = torch.zeros(())
    for p in model.parameters():
        p.grad.div_(data.tokens)
        squares = squares + (p.grad * p.grad).sum()
    norm = squares.sqrt()
    gradients = {name: g.clone() for name, g in emu.grads(model).items()}
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(RATE * p.grad * (CLIP / (norm + 1e-6)).clamp(max=1.0))
        after = model.loss_sum(data.x, data.y)
    return {
        "loss": loss.detach() / data.tokens,
        "norm": norm,
        "loss after": after / data.tokens,
        "parameters": gradients,
    }


@st.composite
def shapes(draw, layers, tp=1, ep=1):
    """Decoders of so many layers."""
    moe = draw(st.booleans()) or ep > 1
    heads = 2 * tp if tp > 1 else draw(st.sampled_from([1, 2]))
    return Config(
        layers=layers,
        width=4 * heads if tp == 1 else 6,
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if not heads % n])),
        head_dim=2,
        ffn=draw(st.integers(tp, tp + 5)),
        vocab=draw(st.integers(3, 9)),
        seq=draw(st.integers(2, 4)),
        positions=draw(st.sampled_from(["learned", "rotary"])),
        norm=draw(st.sampled_from(["layer", "rms"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        fused=draw(st.booleans()),
        experts=draw(st.sampled_from([2, 4])) if moe else 0,
        balance=draw(st.sampled_from([0.0, 0.1])) if moe else 0.0,
        shared_ffn=draw(st.sampled_from([0, 3])) if moe else 0,
    )


@st.composite
def schedules(draw, most_ranks=8, most_microbatches=24, most_actions=400):
    """(name, ranks, microbatches, chunks, stages) that can be, small enough that a run is short."""
    name = draw(st.sampled_from(NAMES))
    several, some = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, most_ranks))
    for chunks in dict.fromkeys([several, 1]):
        for ranks in dict.fromkeys([some, some + some % 2]):
            most = min(most_microbatches, max(1, most_actions // (ranks * (2 if name in V_SHAPED else chunks))))
            try:
                made = make(name, ranks, microbatches := draw(st.integers(1, most)), chunks)
            except PlanError:
                continue
            return name, ranks, microbatches, chunks, made.stages
    return "gpipe", some, 2, 1, some


@st.composite
def cuts(draw, stages, units, layers, first, extra):
    """Where a model of so many layers is cut into stages: evenly, by numbers of layers, or by names."""
    kind = draw(st.sampled_from(["even", "counts", "names"]))
    if kind == "even":
        return "even"
    if kind == "names":
        return [units[i] for i in sorted(draw(st.permutations(range(1, len(units))))[: stages - 1])]
    counts = [1] * stages
    if extra and stages > 1:  # the first and the last have something else besides layers
        counts[0], counts[-1] = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    for _ in range(layers - sum(counts)):
        counts[draw(st.integers(0, stages - 1))] += 1
    return counts


@st.composite
def cases(draw, most_actions=400, most_size=16):
    """A random model on a random pipeline, with everything else mixed in."""
    name, pp, m, chunks, stages = draw(schedules(most_actions=most_actions))
    decoder = stages <= 6 and draw(st.booleans())
    layers = stages + draw(st.integers(0, 2))
    axes, sp, how = {"pp": pp}, False, {}
    if pp <= most_size // 2:
        axes["dp"] = draw(st.sampled_from([1, 2, 2, 3] if pp * 3 <= most_size else [1, 2]))
    dp = axes.get("dp", 1)
    if decoder:
        m = min(m, max(1, 60 // stages))
        if pp * dp <= most_size // 4 or (pp <= 2 and dp == 1):
            axes["tp"] = draw(st.sampled_from([1, 2]))
            sp = axes["tp"] > 1 and draw(st.booleans())
        inner = dp * axes.get("tp", 1)
        if inner % 2 == 0 and draw(st.booleans()):
            axes["ep"] = 2
        of = draw(shapes(layers, axes.get("tp", 1), axes.get("ep", 1)))
        units = ["embedding", *(["positions"] if of.positions == "learned" else [])]
        first = len(units)
        units += [f"blocks.{i}" for i in range(layers)] + ["norm", "head"]
    else:
        widths = draw(st.lists(st.integers(1, 4), min_size=layers, max_size=layers))
        of, units, first = (*widths, 3), [f"layers.{i}" for i in range(layers)], 0
    # Names may cut before positions, which do not follow the activations: that is another test's.
    at = units if first < 2 else [units[0], *units[2:]]
    cut = draw(cuts(stages, at, layers, first, decoder))
    axes = {axis: axes[axis] for axis in draw(st.permutations(list(axes)))}
    how["zero"] = draw(st.integers(0, 3))
    if how["zero"] and dp > 1:
        how["replicate"] = draw(st.sampled_from([n for n in range(1, dp + 1) if not dp % n]))
        if axes.get("ep", 1) > 1:
            how["replicate"] = 1
    how["recompute"] = draw(st.booleans())
    how["find_unused"] = True
    if draw(st.booleans()):
        rows = tuple(tuple(draw(st.lists(st.integers(0, 2), min_size=m, max_size=m))) for _ in range(dp))
    else:
        rows = ((1,) * m,) * dp
    if not sum(map(sum, rows)):
        rows = ((1, *rows[0][1:]), *rows[1:])
    return Case(of, axes, name, chunks, rows, cut, sp, how)
