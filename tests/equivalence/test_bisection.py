"""Where a program goes wrong is said: the line, the layer, the direction, the ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import emu
from emu.equivalence import check
from emu.equivalence.bisection import recorder
from emu.models import Config, Decoder
from emu.spmd import Group

DRAW = torch.Generator().manual_seed(0)
X, T, W, V = (torch.randn(shape, generator=DRAW) / 4 for shape in ((12, 6), (12, 3), (6, 8), (8, 3)))
CONFIG = Config(layers=2, width=8, heads=2, ffn=8, vocab=11, seq=8, norm="layer", positions="learned")


def reference():
    w, v = W.double().requires_grad_(), V.double().requires_grad_()
    loss = ((torch.relu(X.double() @ w) @ v - T.double()) ** 2).sum()
    loss.backward()
    return {"loss": loss.detach() / 12, "w": w.grad / 12, "v": v.grad / 12}


def program(fault):
    """An MLP under dp 2 and tp 2 by hand; a fault stands on a line that ends with its name."""

    def step(rank):
        dp, tp = rank.group("dp"), rank.group("tp")
        n, k = 12 // dp.size, 8 // tp.size
        rows, columns = slice(dp.rank * n, dp.rank * n + n), slice(tp.rank * k, tp.rank * k + k)
        x, t = X.double()[rows], T.double()[rows]
        w, v = W.double()[:, columns].clone().requires_grad_(), V.double()[columns].clone().requires_grad_()
        h = torch.relu(x @ w)
        part = h @ v  # not reduced
        if fault == "wrong group":
            y = emu.spmd.reduce_from(part, dp)  # wrong group
        elif fault == "not reduced":
            y = part
        else:
            y = emu.spmd.reduce_from(part, tp)
        if fault == "reduced twice":
            y = emu.spmd.reduce_from(y, tp)  # reduced twice
        loss = ((y - t) ** 2).sum()
        loss.backward()
        loss = dp.all_reduce(loss.detach())
        if fault == "wrong op":
            dp.all_reduce(w.grad, op="max")  # wrong op
        elif fault != "gradient not reduced":
            dp.all_reduce(w.grad)
        dp.all_reduce(v.grad)
        if fault == "scaled":
            w.grad.div_(6)  # scaled
        elif fault != "not divided":
            w.grad.div_(12)  # gradient not reduced
        v.grad.div_(12)
        if fault == "noise on a rank" and rank.id == 2:
            v.grad.add_(torch.ones(3).double())  # noise on a rank
        return {"loss": loss / 12, "w": tp.all_gather(w.grad, dim=1), "v": tp.all_gather(v.grad)}  # all is returned

    return step


def line_of(fault):
    text = Path(__file__).read_text().split("\n")
    return next(i for i, line in enumerate(text, 1) if line.endswith(f"# {fault}"))


@pytest.mark.parametrize(
    ("fault", "op", "ranks", "words"),
    [
        ("not reduced", "sub", (0, 1, 2, 3), "still a part of a sum over 'tp'"),
        ("wrong group", "all_reduce over 'dp'", (0, 1, 2, 3), "still a part of a sum over 'tp'"),
        ("reduced twice", "all_reduce over 'tp'", (0, 1, 2, 3), "2 times what is there"),
        ("wrong op", "all_reduce over 'dp'", (0, 1, 2, 3), "what it reads is in the reference"),
        ("gradient not reduced", "all_gather over 'tp'", (0, 1, 2, 3), "'w' is returned as a part of a sum over 'dp'"),
        ("scaled", "div_", (0, 1, 2, 3), "2 times what is there"),
        ("noise on a rank", "add_", (2,), "what it reads is in the reference"),
    ],
)
def test_a_slip_is_found_where_it_stands(fault, op, ranks, words):
    verdict = check(program(fault), emu.Mesh(dp=2, tp=2), reference, mutants="none")
    found = verdict.divergence
    assert not verdict and found is not None
    assert (found.op, found.ranks) == (op, ranks) and words in found.says
    named = set(map(int, re.findall(r"test_bisection\.py:(\d+)", str(verdict))))
    assert line_of(fault) in named and len(named) <= 4
    assert f"first divergence: {found.says}" in str(verdict)
    assert verdict.as_dict()["divergence"]["ranks"] == ranks


def test_what_was_forgotten_at_the_end_is_told_from_the_reference():
    verdict = check(program("not divided"), emu.Mesh(dp=2, tp=2), reference, mutants="none")
    line = line_of("all is returned")
    told = f"'w' is returned at test_bisection.py:{line} as it was before the reference's div (test_bisection.py:"
    assert told in verdict.divergence.says


def test_what_is_right_diverges_nowhere():
    verdict = check(program(""), emu.Mesh(dp=2, tp=2), reference, mutants="none")
    assert verdict and verdict.divergence is None and "divergence" not in str(verdict)


class OfRows(nn.Module):
    """A norm after which, forward or backward, everything is as many times larger as there are rows."""

    def __init__(self, norm, direction):
        super().__init__()
        self.norm, self.direction = norm, direction

    def forward(self, x):
        y = self.norm(x)
        return y * (x.shape[0] * x.shape[1]) if self.direction == "forward" else Times.apply(y)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (grad.shape[0] * grad.shape[1])


@pytest.mark.parametrize(
    ("mesh", "more", "ranks"),
    [
        ("dp=2", {}, 2),
        ("dp=2", {"zero": 3}, 2),
        ("cp=2", {}, 2),
        ("pp=2", {"microbatches": 2}, 1),
        ("dp=2,pp=2,tp=2", {"zero": 1, "sp": True}, 4),
        ("tp=2,dp=2", {"checkpoint": "full"}, 4),
    ],
)
@pytest.mark.parametrize(("layer", "direction"), [("blocks.0.norm2", "forward"), ("blocks.1.norm1", "backward")])
def test_the_layer_of_a_plan_is_named_and_the_direction(mesh, more, ranks, layer, direction):
    def make():
        model = Decoder(CONFIG)
        _, i, norm = layer.split(".")
        block = model.blocks[int(i)]
        setattr(block, norm, OfRows(getattr(block, norm), direction))
        return model

    plan = emu.Plan(mesh, global_batch=4, seq=8, **more)
    found = emu.verify(make, plan, mutants="none").divergence
    assert (found.layer, found.direction, len(found.ranks)) == (layer, direction, ranks), found
    assert found.line.startswith("test_bisection.py:")


@pytest.mark.parametrize("tier", ["exact", "float64", "float32"])
def test_in_every_tier(tier):
    narrow = torch.float32 if tier == "float32" else torch.float64
    found = check(
        lambda rank: {"y": (X.to(narrow) @ W.to(narrow)).mul(2)},
        emu.Mesh(dp=2),
        lambda: {"y": X.to(narrow) @ W.to(narrow)},
        tier=tier,
        mutants="none",
    ).divergence
    assert found is not None and found.op == "mul" and "2 times" in found.says


def test_a_reduction_within_the_strategies_is_found(monkeypatch):
    right = Group.all_reduce

    def wrong(self, x, *args, **more):
        return right(self, x, *args, **(more | {"op": "max"} if self.label == "tp" else more))

    monkeypatch.setattr(Group, "all_reduce", wrong)
    found = emu.verify(lambda: Decoder(CONFIG), emu.Plan("tp=2", global_batch=4, seq=8), mutants="none").divergence
    assert (found.op, found.layer, found.direction) == ("all_reduce over 'tp'", "embedding", "forward")


def test_what_is_too_large_to_keep_is_not_bisected(monkeypatch):
    monkeypatch.setattr(recorder, "MOST_BYTES", 1000)
    verdict = check(program("scaled"), emu.Mesh(dp=2, tp=2), reference, mutants="none")
    assert not verdict and verdict.divergence is None
