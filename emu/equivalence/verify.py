"""Verifying a plan: a plain model, distributed as the plan says, against itself on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from emu.equivalence.check import check
from emu.equivalence.verdict import Verdict
from emu.parallel import Batch, Plan, mesh_of, parallelize
from emu.spmd import EmuError, Rank, grads


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    batch: Batch | None = None,
    tier: str = "exact",
    mutants: str | int = "sampled",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Whether a plan computes the gradients that the plain model computes on one device.

    Args:
        model: a plain module with `loss_sum(x, y)`, or a function without arguments that makes one.
        plan: how to distribute it.
        batch: what to compute gradients of; None draws random tokens below the model's vocabulary.
        tier, mutants: see `check`.

    Raises:
        PlanError: a plan that cannot be; EmuError: a model without loss_sum, or no batch and no vocabulary to draw from.
    """
    made = model if isinstance(model, nn.Module) else model()
    if not hasattr(made, "loss_sum"):
        raise EmuError(
            f"{type(made).__name__} has no loss_sum(x, y)",
            "give the module a method that returns the sum of its loss over all labels that count",
        )
    data = batch if batch is not None else random_batch(made, plan)
    mesh = mesh_of(plan)

    def fresh() -> Any:
        # A module that was passed in is copied, so that no two ranks share it, into the dtype that the tier computes in;
        # a factory makes one for every rank, in that dtype.
        return copy.deepcopy(made).to(torch.get_default_dtype()) if isinstance(model, nn.Module) else model()

    def program(rank: Rank) -> Any:
        distributed = parallelize(fresh(), plan, rank)
        loss = distributed.backward(_in_tier(data))
        return {"loss": loss, "parameters": grads(distributed.model)}

    def reference(rank: Rank) -> Any:
        plain, whole = fresh(), _in_tier(data)
        loss = plain.loss_sum(whole.x, whole.y)
        loss.backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.div_(data.tokens)  # late, as the strategies divide
        return {"loss": loss.detach() / data.tokens, "parameters": grads(plain)}

    return check(program, mesh, reference, tier=tier, mutants=mutants, progress=progress)


def _in_tier(data: Batch) -> Batch:
    """The batch in the dtype that the tier computes in; tokens and labels stay whole numbers."""
    x, y = (t.to(torch.get_default_dtype()) if t.is_floating_point() else t for t in (data.x, data.y))
    return Batch(x, y, data.tokens)


def random_batch(model: nn.Module, plan: Plan) -> Batch:
    """Random tokens and labels, about one label in eight ignored: [global_batch, seq]."""
    config = getattr(model, "config", None)
    vocab = getattr(config, "vocab", None)
    if vocab is None:
        raise EmuError(f"{type(model).__name__} does not say its vocabulary (config.vocab)", "pass a batch")
    generator = torch.Generator().manual_seed(plan.seed)
    seq = min(plan.seq, getattr(config, "seq", plan.seq))
    x = torch.randint(0, vocab, (plan.global_batch, seq), generator=generator)
    y = torch.randint(0, vocab, (plan.global_batch, seq), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 1 / 8] = -100
    return Batch(x, y)
