"""Verifying a plan: a plain model, distributed as the plan says, against itself on one device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from emu.equivalence.check import check
from emu.equivalence.state import drops_out, name_of_dropout
from emu.equivalence.verdict import Verdict
from emu.parallel import Batch, Plan, SyncBatchNorm, as_batch, check_fit, checked_plan, mesh_of, parallelize
from emu.parallel.parallelize import set_capacity
from emu.spmd import EmuError, Mesh, PlanError, Rank, grads

RATE = 0.1  # of the step that both sides take
AFTER = "loss after a step"
VOCAB = ("vocab", "vocab_size")  # fields of a config: emu's, and what configs of transformers call it
LONGEST = ("seq", "max_position_embeddings")


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    batch: Batch | tuple[Tensor, Tensor] | None = None,
    tier: str = "exact",
    mutants: str | int = "sampled",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Whether a plan computes the gradients that the plain model computes on one device.

    Args:
        model: a plain module with `loss_sum(x, y)`, or a function without arguments that makes one.
        plan: how to distribute it.
        batch: what to compute gradients of, emu.Batch(x, y) or (x, y); None draws random tokens below the model's vocabulary.
        tier, mutants: see `check`.

    Raises:
        PlanError: no plan, or one that cannot be.
        EmuError: no model, one without loss_sum or with active dropout (pieces of a batch draw other random numbers than
            the whole does), one that is frozen altogether, or no batch and no vocabulary to draw from.
    """
    plan = checked_plan(plan)
    if tier == "float32":
        plan = replace(
            plan, precision="fp32", dtype=None
        )  # a tier is one dtype for all roles; the others see to that themselves
    made = model if isinstance(model, nn.Module) else _made(model)
    check_fit(made, plan)
    mesh = mesh_of(plan)
    _refuse_dropout(made, mesh)
    data = as_batch(batch) if batch is not None else random_batch(made, plan)
    idle: dict[str, None] = {}  # parameters without a gradient
    # A module that was passed in is copied, so that no two ranks share it, into the dtype that the tier computes in; a
    # factory makes one for every rank, in that dtype. What is copied is host data, so nothing in it is trainable.
    template = copy.deepcopy(made).requires_grad_(False)
    trainable = [p.requires_grad for p in made.parameters()]
    if trainable and not any(trainable):
        raise EmuError(
            f"all parameters of {type(made).__name__} are frozen: there are no gradients to compare",
            "leave requires_grad on at those that training changes: model.head.requires_grad_(True)",
        )

    def fresh() -> Any:
        plain = _plain()
        if plan.capacity is not None:
            set_capacity(plain, plan.capacity)  # on both sides: it is another function with it than without
        return plain

    def _plain() -> Any:
        if isinstance(model, nn.Module):
            mine = _copied(template).to(torch.get_default_dtype())
            for p, trains in zip(mine.parameters(), trainable):
                p.requires_grad_(trains)
            return mine
        torch.manual_seed(plan.seed)  # every rank, and the reference, draw the same weights
        return model()

    # Each also takes one step, and looks at the loss after it: it shows whether every rank has all the new values.
    def program(rank: Rank) -> Any:
        distributed, whole = parallelize(fresh(), plan, rank), _in_tier(data)
        optimizer = distributed.optimizer(torch.optim.SGD, lr=RATE)
        loss = distributed.backward(whole, microbatches=plan.accumulated())
        gradients = distributed.gather_gradients()
        optimizer.step()
        return {"loss": loss, AFTER: distributed.evaluate(whole), "parameters": gradients}

    def reference(rank: Rank) -> Any:
        plain, whole = fresh(), _in_tier(data)
        loss = plain.loss_sum(whole.x, whole.y)
        loss.backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                p.grad.div_(data.tokens)  # late, as the strategies divide
            else:
                idle[f"parameters.{name}"] = None
        torch.optim.SGD(plain.parameters(), lr=RATE).step()
        with torch.no_grad():
            after = plain.loss_sum(whole.x, whole.y)
        return {"loss": loss.detach() / data.tokens, AFTER: after / data.tokens, "parameters": grads(plain)}

    verdict = check(program, mesh, reference, tier=tier, mutants=mutants, progress=progress)
    verdict = replace(verdict, without_gradient=list({**idle, **dict.fromkeys(verdict.without_gradient)}))
    if not verdict.equivalent and (hint := _cause(made, mesh, data, "only by rounding" in verdict.why)):
        verdict = replace(verdict, why="\n  hint: ".join([verdict.why.partition("\n  hint: ")[0], hint]))
    return verdict


def _copied(module: nn.Module) -> nn.Module:
    """A copy of a module. Tensors that are no parameters are copied by hand: deepcopy cannot while dtypes are widened."""
    others = [value for m in module.modules() for value in (*m._buffers.values(), *vars(m).values())]
    return copy.deepcopy(module, {id(value): value.clone() for value in others if isinstance(value, Tensor)})


def _cause(model: nn.Module, mesh: Mesh, data: Batch, rounding: bool) -> str:
    """What about the model itself keeps its pieces of a batch from agreeing with the whole, and what to do; "" if nothing."""
    if _is_mean(copy.deepcopy(model).to(torch.get_default_dtype()), data):
        return (
            "loss_sum returns a mean (a batch twice as long has the same loss): return the sum over labels that count"
        )
    if mesh.axes.get("cp", 1) > 1 and not rounding:
        return (
            "under cp a rank has some tokens of each sequence: let every layer use the positions and call mask.attend that "
            "loss_sum is given, and nothing else look at neighbouring tokens"
        )
    if mesh.size > 1 and (found := _local_statistics(model)):
        return (
            f"{found} normalises every rank's rows by that rank's own statistics, another function than on one device: "
            'call emu.parallel.synchronize_statistics(model, rank.group("dp")) before the model is distributed, in a '
            "program(rank) that emu.check compares; or use a norm within rows, as LayerNorm"
        )
    return ""


def _local_statistics(model: nn.Module) -> str:
    """The first batch normalisation that computes statistics of a rank's rows alone, in words; "" if there is none."""
    for name, module in model.named_modules():
        local = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        if local and (module.training or module.running_mean is None):
            return f"{name or 'the model'}, a {type(module).__name__},"
    return ""


def _made(factory: Any) -> Any:
    """What a function without arguments makes."""
    if not callable(factory):
        raise EmuError(
            f"the model is a {type(factory).__name__}, not a module",
            "pass a torch.nn.Module with loss_sum(x, y), or a function that makes one",
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        name = getattr(factory, "__name__", "the model")
        raise EmuError(
            f"{name} cannot be called without arguments: {error}", f"pass lambda: {name}(...) with its arguments"
        ) from None
    except ValueError:  # a builtin, which says nothing about itself
        pass
    return factory()


def _refuse_dropout(model: nn.Module, mesh: Mesh) -> None:
    for name, module in model.named_modules():
        if mesh.size > 1 and drops_out(module):
            raise EmuError(
                f"{name or 'the model'} is an active {name_of_dropout(module)}: a whole batch draws other random numbers "
                "than its pieces do, so no plan can agree with one device",
                "call model.eval() before verifying, or make the model without dropout",
            )


def _is_mean(model: Any, data: Batch) -> bool:
    """Whether loss_sum averages over rows: then a batch twice over has the same loss, not twice as much."""
    data = _in_tier(data)
    try:
        with torch.no_grad():
            once = float(model.loss_sum(data.x, data.y))
            twice = float(model.loss_sum(torch.cat([data.x] * 2), torch.cat([data.y] * 2)))
    except Exception:  # a model that does not take that batch leaves the question open
        return False
    return once != 0 and abs(twice - once) < 1e-4 * abs(once)


def _in_tier(data: Batch) -> Batch:
    """The batch in the dtype that the tier computes in; tokens and labels stay whole numbers."""
    x, y = (t.to(torch.get_default_dtype()) if t.is_floating_point() else t for t in (data.x, data.y))
    return Batch(x, y, data.tokens)


def said(model: nn.Module, *fields: str) -> tuple[str, int | None]:
    """The first of these fields of a model's config that is a whole number, and that number; ("", None) if none is."""
    for field in fields:
        value = getattr(getattr(model, "config", None), field, None)
        if isinstance(value, int):
            return field, value
    return "", None


def random_batch(model: nn.Module, plan: Plan) -> Batch:
    """Random tokens and labels, about one label in eight ignored: [global_batch, seq].

    Raises:
        EmuError: no vocabulary to draw from; PlanError: sequences longer than the model takes.
    """
    _, vocab = said(model, *VOCAB)
    if vocab is None:
        raise EmuError(
            f"{type(model).__name__} does not say its vocabulary (config.{' or config.'.join(VOCAB)})", "pass a batch"
        )
    generator = torch.Generator().manual_seed(plan.seed)
    field, most = said(model, *LONGEST)
    if most is not None and plan.seq > most:
        raise PlanError(
            f"seq={plan.seq}, but {type(model).__name__} takes sequences of at most {most} tokens (config.{field})",
            f"the nearest plan has seq={most}; or make the model with seq={plan.seq}",
            field="seq",
            value=plan.seq,
            nearest=most,
        )
    x = torch.randint(0, vocab, (plan.global_batch, plan.seq), generator=generator)
    y = torch.randint(0, vocab, (plan.global_batch, plan.seq), generator=generator)
    ignored = torch.rand(y.shape, generator=generator) < 1 / 8
    if ignored.all():
        ignored[0, 0] = False  # something must be learnt
    y[ignored] = -100
    return Batch(x, y)
