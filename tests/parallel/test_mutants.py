"""Every communication of every strategy matters: broken in any way, it changes what comes out, or changes nothing at all."""

import itertools

import pytest
import torch

import emu
from emu.equivalence import check

from .training import Made

MADE = Made((3, 4, 3))
SIZES = [2, 1, 2, 1]


def trained(rank, data, how):
    """Two steps; what every rank computed, and uses after them."""
    dist = emu.DataParallel(MADE.model(), rank, "dp", **how)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9, clip=0.05)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(dist.backward(data, SIZES))
        gradients = dist.gather_gradients()
        norm = optimizer.step().norm
    with dist.gathered() as model:
        used = {name.replace(".", " "): p.detach().clone() for name, p in model.named_parameters()}
    values = {name.replace(".", " "): p for name, p in dist.gather_parameters().items()}
    return {
        "first loss": losses[0],
        "loss": losses[1],
        "parameters": gradients,
        "norm": norm,
        "used": used,
        "values": values,
    }


def alone(data, how):
    model = MADE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.loss_sum(data.x, data.y)
        losses.append(loss.detach() / data.tokens)
        loss.backward()
        for p in model.parameters():
            p.grad.div_(data.tokens)
        gradients = emu.grads(model)
        gradients = type(gradients)({name: g.clone() for name, g in gradients.items()}, {})
        norm = sum((p.grad * p.grad).sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((0.05 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
    values = {name.replace(".", " "): p.detach().clone() for name, p in model.named_parameters()}
    return {
        "first loss": losses[0],
        "loss": losses[1],
        "parameters": gradients,
        "norm": norm,
        "used": values,
        "values": values,
    }


STRATEGIES = [
    {"zero": zero, "replicate": replicate, "by_owner": by_owner, "find_unused": find_unused}
    for zero, replicate, by_owner, find_unused in itertools.product(range(4), (1, 2, 4), (False, True), (False, True))
    if zero or not (by_owner or replicate > 1)
]


def verdict(how, program=trained, mutants="all"):
    data = MADE.batch(sum(SIZES))
    return check(program, emu.Mesh(dp=4), alone, args=(data, how), mutants=mutants)


SOME = [STRATEGIES[i] for i in (0, 4, 10, 19, 24, 28)]  # of every stage, owned and cut, with replicas and without
REST = [how for how in STRATEGIES if how not in SOME]


def named(how):
    return " ".join(f"{key}={int(value)}" for key, value in how.items())


@pytest.mark.parametrize("how", SOME, ids=named)
def test_every_mutant_is_killed_or_changes_nothing(how):
    found = verdict(how)
    assert found, str(found)
    assert not found.survivors and found.mutants_killed >= 10
    assert found.mutants == found.mutants_killed + found.mutants_equivalent


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", REST, ids=named)
def test_every_mutant_is_killed_or_changes_nothing_at_length(how):
    test_every_mutant_is_killed_or_changes_nothing(how)


class Partly(torch.nn.Module):
    """`one` serves rows with label 1 only, and `none` no row. x: [rows, 3]; y: [rows]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.all, self.one, self.none = (torch.nn.Linear(3, 2) for _ in range(3))

    def loss_sum(self, x, y):
        loss = (self.all(x) ** 2).sum()
        ones = (y == 1).to(x.dtype)[:, None]
        return loss + ((self.one(x) * ones) ** 2).sum() if bool(ones.any()) else loss


def used_in_part(rank, data, how):
    dist = emu.DataParallel(Partly(), rank, "dp", find_unused=True, **how)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.5, weight_decay=0.1)  # what has no gradient does not decay, either
    loss = dist.backward(data)
    gradients = dist.gather_gradients()
    optimizer.step()
    values = {name.replace(".", " "): p for name, p in dist.gather_parameters().items()}
    return {"loss": loss, "parameters": gradients, "values": values}


def used_in_part_alone(data, how):
    model = Partly()
    loss = model.loss_sum(data.x, data.y)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(data.tokens)
    gradients = type(emu.grads(model))({name: g.clone() for name, g in emu.grads(model).items()}, {})
    torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1).step()
    values = {name.replace(".", " "): p.detach().clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach() / data.tokens, "parameters": gradients, "values": values}


def everywhere(data):
    return emu.Batch(data.x, torch.ones_like(data.y))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_that_ranks_agree_on_what_was_used_matters_where_they_differ(zero):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = emu.Batch(x, torch.tensor([0, 1, 0, 0]))  # rank 1 alone uses `one`
    args = (data, {"zero": zero})
    found = check(used_in_part, emu.Mesh(dp=4), used_in_part_alone, args=args, mutants="all")
    assert found and not found.survivors, str(found)
    without = check(used_in_part, emu.Mesh(dp=4), used_in_part_alone, args=(everywhere(data), args[1]), mutants="all")
    assert found.mutants == without.mutants
    assert found.mutants_killed > without.mutants_killed  # where all ranks use the same, nobody learns anything


def sees_the_first_loss_alone(rank, data, how):
    result = trained(rank, data, how)
    return {"loss": result["first loss"]}


def first_loss(data, how):
    return {"loss": alone(data, how)["first loss"]}


def test_a_check_that_looks_at_too_little_lets_mutants_live():
    data = MADE.batch(sum(SIZES))
    how = {"zero": 2}
    assert verdict(how)
    found = check(sees_the_first_loss_alone, emu.Mesh(dp=4), first_loss, args=(data, how), mutants="all")
    assert not found and len(found.survivors) > 10
    assert any("reduce_scatter" in name for name in found.survivors)
