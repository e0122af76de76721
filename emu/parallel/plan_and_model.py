"""Whether a plan fits a model: looked up in its modules and config, before anything of either is copied, cut or run.

What is refused here is refused with the nearest value of a field of the plan, found by trying. The strategies would refuse
most of it, too, each in its own words and as soon as it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from emu.parallel.axes import FOLDS
from emu.parallel.batch import check_model
from emu.parallel.checkpointing.apply import layers_to_checkpoint
from emu.parallel.checkpointing.selective import CORES
from emu.parallel.context import fitting
from emu.parallel.context.holding import neighbours
from emu.parallel.context.ulysses import heads_of
from emu.parallel.expert.experts import expert_layouts
from emu.parallel.pipeline.division.units import divided
from emu.parallel.pipeline.schedules import make
from emu.parallel.plan import Plan
from emu.parallel.plan_checks import changed, size_of
from emu.parallel.tensor.apply import styles_of
from emu.parallel.tensor.cuts import Parts, shared_ranges
from emu.parallel.tensor.maps import map_of
from emu.parallel.tensor.styles import Column, Experts, Row, Style
from emu.parallel.wrapping import divisors
from emu.spmd import EmuError, PlanError

HEADS = ("heads", "num_attention_heads")  # fields of a config: emu's, and what configs of transformers call it


def check_fit(model: nn.Module, plan: Plan) -> None:
    """Raises a PlanError for a plan that this model cannot be trained with.

    Args:
        model: a plain one.
        plan: one that is possible by itself.

    Raises:
        PlanError: says the field, the numbers, why, and the nearest value of that field.
        EmuError: a model without loss_sum.
    """
    check_model(model)
    _capacity(model, plan)
    _layers(model, plan)
    _cuts(model, plan)
    _context(model, plan)
    _checkpoint(model, plan)
    _balance(model, plan)


def _capacity(model: nn.Module, plan: Plan) -> None:
    if plan.capacity is not None and not any(hasattr(m, "limit") and hasattr(m, "factor") for m in model.modules()):
        raise PlanError(
            f"capacity={plan.capacity}, but {type(model).__name__} has no experts that take tokens",
            "leave capacity out",
            field="capacity",
            nearest=None,
        )


def _layers(model: nn.Module, plan: Plan) -> None:
    """Every stage of a pipeline gets a layer."""
    ranks = size_of(plan, "pp")

    def check(ranks: int, chunks: int = plan.chunks, schedule: str = plan.schedule) -> None:
        if ranks > 1:
            divided(model, make(schedule, ranks, plan.accumulated(), chunks).stages)

    error = _refusal(lambda: check(ranks))
    if error is None:
        return
    for chunks in range(plan.chunks - 1, 0, -1):
        if not _refusal(lambda chunks=chunks: check(ranks, chunks)):
            _refuse(error, "chunks", chunks)
    if plan.schedule != "1f1b" and not _refusal(lambda: check(ranks, 1, "1f1b")):
        _refuse(error, "schedule", "1f1b")
    _refuse_mesh(error, plan, "pp", _nearest(range(1, ranks), ranks, check))


def _cuts(model: nn.Module, plan: Plan) -> None:
    """What lies inside layers can be shared out over tp, ep and etp."""
    tp = size_of(plan, "tp")
    inside = {axis: n for axis, n in (("tp", tp), ("ep", plan.ep), ("etp", plan.etp)) if n > 1}
    if not inside:
        return
    styles: dict[str, Style] = {}
    if error := _refusal(lambda: styles.update(styles_of(model, map_of(model)))):
        axis = next(iter(inside))
        if axis == "tp":
            _refuse_mesh(error, plan, "tp", 1)
        _refuse(error, axis, 1)
    found = [(path, model.get_submodule(path), style) for path, style in styles.items()]
    if error := _refusal(lambda: _linear(found, tp)):
        _refuse_mesh(error, plan, "tp", _nearest(range(1, tp), tp, lambda n: _linear(found, n)))
    experts = [(path, module, style) for path, module, style in found if isinstance(style, Experts)]
    for axis in FOLDS:
        if axis in inside and not experts:
            raise PlanError(
                f"{axis}={inside[axis]}, but {type(model).__name__} has no experts to share out",
                f"leave {axis} out, or name the module that holds the experts: Experts()",
                field=axis,
                nearest=1,
            )
        now = {"ep": 1, "etp": 1, axis: getattr(plan, axis)}
        if error := _refusal(lambda now=now: _experts(experts, **now)):
            fits = divisors(now[axis])  # which folds the ranks as the plan does, at most
            best = _nearest(fits[:-1], now[axis], lambda n, axis=axis, now=now: _experts(experts, **{**now, axis: n}))
            _refuse(error, axis, best)


def _linear(found: Iterable[tuple[str, nn.Module, Style]], tp: int) -> None:
    for path, module, style in found:
        weight: Any = getattr(module, "weight", None)
        if tp == 1 or weight is None or not isinstance(style, (Column, Row)):
            continue
        ranges = style.cut.ranges(weight.shape[0 if isinstance(style, Column) else 1], tp, path or "the model")
        fused = isinstance(style, Column) and (style.gather or isinstance(style.cut, Parts))
        if fused and any(shared_ranges(ranges, rank) for rank in range(tp)):
            raise PlanError(
                f"{path}: key and value heads that several of {tp} ranks hold cannot be gathered, nor laid out in a fused weight",
                "use a divisor of the key and value heads as tp, or separate projections",
            )


def _experts(found: Iterable[tuple[str, nn.Module, Experts]], ep: int, etp: int) -> None:
    for path, module, style in found:
        expert_layouts(module, ep, etp, style.columns, style.rows, path)


def _context(model: nn.Module, plan: Plan) -> None:
    """The model computes with parts of sequences, and has heads for those who exchange them."""
    ranks, config = size_of(plan, "cp"), getattr(model, "config", None)
    if ranks == 1:
        return

    def check() -> None:
        fitting.check_model(model, 1)
        for path, module in model.named_modules():
            if not hasattr(module, "over"):  # a balance loss is shared out before
                fitting.check_module(path or type(model).__name__, module)

    if error := _refusal(check):
        _refuse_mesh(error, plan, "cp", 1)
    heads = next((n for field in HEADS if isinstance(n := getattr(config, field, None), int)), None)
    if heads is not None and (
        error := _refusal(lambda: heads_of(heads // size_of(plan, "tp"), 1, neighbours(plan.context, ranks, None)))
    ):
        _refuse(error, "context", "zigzag")


def _checkpoint(model: nn.Module, plan: Plan) -> None:
    for field, nothing in (("checkpoint", "none"), ("offload", False)):
        if getattr(plan, field) != nothing and (error := _refusal(lambda: layers_to_checkpoint(model, None))):
            _refuse(error, field, nothing)
    paths = [path for path, _ in model.named_modules()]
    if plan.checkpoint == "selective" and not any(fnmatchcase(path, CORES) for path in paths):
        raise PlanError(
            f"checkpoint=selective computes modules {CORES!r} again, and {type(model).__name__} has none",
            "the nearest plan has checkpoint=full; or name its own: checkpointed_modules(model, '*.the_module_that_attends')",
            field="checkpoint",
            nearest="full",
        )


def _balance(model: nn.Module, plan: Plan) -> None:
    """A balance loss over a batch is one of all that a rank has in a step."""
    cut = plan.accumulated()
    for path, module in model.named_modules():
        if cut > 1 and getattr(module, "over", None) == "batch" and getattr(module, "coefficient", 0):
            field = "microbatches" if plan.micro_batch is None else "micro_batch"
            raise PlanError(
                f"{path} is a balance loss over the batch, and {cut} microbatches have {cut} of them, which add up to another",
                f"use one microbatch ({field}={1 if field == 'microbatches' else None}), or balance over sequences",
                field=field,
                nearest=1 if field == "microbatches" else None,
            )


def _refusal(check: Callable[[], Any]) -> EmuError | None:
    """What a check says against something; None if nothing."""
    try:
        check()
    except EmuError as error:
        return error
    return None


def _nearest(values: Iterable[int], to: int, check: Callable[[int], Any]) -> int:
    """The nearest value that a check allows; 1 always is."""
    return min((n for n in values if not _refusal(partial(check, n))), key=lambda n: abs(n - to), default=1)


def _refuse(error: EmuError, field: str, nearest: Any) -> None:
    how = f"; the nearest plan has {field}={nearest}"
    raise PlanError(error.message, error.hint + how, field=field, nearest=nearest) from None


def _refuse_mesh(error: EmuError, plan: Plan, axis: str, size: int) -> None:
    _refuse(error, "mesh", changed(plan, axis, size))
