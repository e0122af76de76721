"""A mixture of experts alone, on one device and with its experts on many ranks, by hand: no strategy but the experts'."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import emu
from emu.models import Config
from emu.models.layers import draw_
from emu.models.moe import MoE
from emu.parallel.expert import become_expert_parallel, expert_layouts


@dataclass(frozen=True)
class Case:
    """A mixture of experts, and how many tokens every rank has."""

    config: Config
    tokens: tuple[int, ...]
    seed: int = 0
    std: float = 0.5  # of the weights

    def model(self):
        model = MoE(self.config)
        g = torch.Generator().manual_seed(self.seed)
        for p in model.parameters():
            draw_(p, self.std, g)
        return model

    def data(self):
        """Tokens, and what their outputs are multiplied by in the loss: both [1, tokens, width]."""
        g = torch.Generator().manual_seed(self.seed + 1)
        return [torch.randn(1, sum(self.tokens), self.config.width, generator=g) for _ in range(2)]


def shape(experts=4, top_k=2, width=4, ffn=6, **options):
    """A Config of which only the mixture matters."""
    return Config(
        layers=1,
        width=width,
        heads=1,
        head_dim=2,
        vocab=2,
        seq=1,
        ffn=ffn,
        bias=False,
        experts=experts,
        top_k=top_k,
        **options,
    )


def mesh_for(case, ep, etp=1):
    return emu.Mesh(dp=len(case.tokens), ep=ep, etp=etp)


def reference(rank, case, *others):
    model = case.model()
    x, c = case.data()
    x.requires_grad_()
    y = model(x)
    loss = (y * c).sum()
    loss.backward()
    n = sum(case.tokens)
    return {"y": y, "loss": loss / n, "x": {"grad": x.grad / n}, "grads": emu.spmd.grads(model), "n": n}


def spread(rank, model):
    """Shares the experts of a mixture out, and tells the layouts of its parameters."""
    ep, etp = rank.group("ep"), rank.group("etp")
    layouts = expert_layouts(model.experts, ep.size, etp.size)
    become_expert_parallel(model.experts, ep, etp)
    return {f"experts.{name}": layout for name, layout in layouts.items()}


def program(rank, case, over="edp", break_it=lambda rank, model: None):
    """Every rank has its own tokens of the whole batch; gradients of experts are summed over `over` (None: not at all)."""
    model = case.model()
    layouts = spread(rank, model)
    break_it(rank, model)
    world = rank.group(*rank.mesh.axes)
    x, c = (t.split(case.tokens, 1)[rank] for t in case.data())
    x = x.clone().requires_grad_()
    y = model(x)
    loss = (y * c).sum()
    loss.backward()
    n = sum(case.tokens)
    for name, p in model.named_parameters():
        if name not in layouts:
            world.all_reduce(p.grad)
        elif over is not None:
            rank.group(over).all_reduce(p.grad)

    def everyone(t):
        return world.all_gather(t.detach(), 1, case.tokens)

    loss = world.all_reduce(loss.detach().clone())
    grads = emu.spmd.grads(model, layouts)
    return {"y": everyone(y), "loss": loss / n, "x": {"grad": everyone(x.grad) / n}, "grads": grads, "n": n}


@st.composite
def shapes(draw, least_experts=1, least_ffn=1):
    experts = draw(st.integers(least_experts, least_experts + 5))
    top_k = draw(st.integers(1, min(3, experts)))
    one_of_many = top_k == 1 < experts  # whose weight, renormalised, would always be 1
    return shape(
        experts,
        top_k,
        width=draw(st.integers(1, 5)),
        ffn=draw(st.integers(least_ffn, least_ffn + 4)),
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        shared_ffn=draw(st.sampled_from([0, 3])),
        router="softmax-topk" if one_of_many else draw(st.sampled_from(["softmax-topk", "topk-softmax"])),
        renormalize=not one_of_many and draw(st.booleans()),
    )


@st.composite
def cases(draw, most_ranks=12):
    """Experts on any ranks: (case, ep, etp)."""
    splits = st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
    ep, etp, edp = draw(splits.filter(lambda t: t[0] * t[1] * t[2] <= most_ranks))
    n = ep * etp * edp
    tokens = draw(st.lists(st.integers(0, 6), min_size=n, max_size=n).filter(any))
    return Case(draw(shapes(ep, etp)), tuple(tokens), draw(st.integers(0, 99))), ep, etp
