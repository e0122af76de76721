"""A plain model under a plan, on one rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from emu.parallel.axes import DATA_AXES
from emu.parallel.batch import checked_plain
from emu.parallel.checkpointing import checkpointed
from emu.parallel.checkpointing.offload import offloaded
from emu.parallel.data import DataParallel
from emu.parallel.pipeline.pipeline import Pipeline
from emu.parallel.plan import Plan, checked_plan, mesh_of
from emu.parallel.plan_and_model import check_fit
from emu.parallel.tensor import shard_model
from emu.spmd import EmuError, PlanError, Rank


def parallelize(model: nn.Module, plan: Plan, rank: Rank) -> DataParallel:
    """The distributed form of a plain model on one rank of the plan's mesh. It is no module: `.model` is.

    Raises:
        PlanError: no plan, one for another mesh than the rank's, or one that does not fit the model; EmuError: no module, one
            without loss_sum, or no rank.
    """
    plan = checked_plan(plan)
    if not isinstance(rank, Rank):
        raise EmuError(
            f"the rank is a {type(rank).__name__}",
            "pass the rank that the program gets: parallelize(model, plan, rank)",
        )
    wanted, there = mesh_of(plan), rank.mesh
    if any(
        {a: n for a, n in w.items() if n > 1} != {a: n for a, n in t.items() if n > 1}
        for w, t in (
            (wanted.axes, there.axes),
            (wanted.folds, there.folds),
        )
    ):
        raise PlanError(
            f"the plan is for mesh {wanted}, but the program runs on {there}",
            "launch it on the plan's mesh: emu.launch(program, emu.parallel.mesh_of(plan))",
            field="mesh",
        )
    checked_plain(model, "parallelize(model, plan, rank)")
    check_fit(model, plan)
    if plan.capacity is not None:
        set_capacity(model, plan.capacity)
    balances = {getattr(m, "over", None) for m in model.modules()}  # what balance losses are over
    sequences = plan.axes().get("cp", 1) > 1
    shares = ("batch" in balances and there.size > 1) or ("sequence" in balances and sequences)
    inside = plan.axes().get("tp", 1) * plan.ep * plan.etp > 1 or shares
    sharding = shard_model(model, rank, sp=plan.sp) if inside else None
    if plan.checkpoint != "none":
        checkpointed(model, plan.checkpoint, rank)
    if plan.offload:
        offloaded(model, rank)
    strategy, more = DataParallel, {}
    if plan.axes().get("pp", 1) > 1:
        strategy, more = (
            Pipeline,
            {"schedule": plan.schedule, "chunks": plan.chunks, "microbatches": plan.accumulated()},
        )
    return strategy(
        model,
        rank,
        *(axis for axis in DATA_AXES if axis in rank.mesh.axes),
        sharding=sharding,
        context=plan.context,
        **more,
        zero=plan.zero,
        replicate=plan.replicate,
        reshard_after_forward=plan.reshard_after_forward,
        prefetch=plan.prefetch,
        precision=plan.precision_roles(),
        find_unused=True,
    )


def set_capacity(model: nn.Module, capacity: float) -> None:
    """Limits how many tokens an expert takes, in every module of a model that counts them (see Plan.capacity).

    Raises:
        PlanError: no module of the model does.
    """
    counting: list[Any] = [m for m in model.modules() if hasattr(m, "limit") and hasattr(m, "factor")]
    if not counting:
        raise PlanError(
            f"capacity={capacity}, but {type(model).__name__} has no experts that take tokens",
            "leave capacity out",
            field="capacity",
        )
    for module in counting:
        module.factor = capacity
