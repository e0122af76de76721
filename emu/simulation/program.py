"""What is simulated: a training step, as every rank runs it, after one that only makes what later steps find there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from emu.parallel import Batch, Plan, parallelize
from emu.parallel.pipeline.schedules import make
from emu.simulation.alike import Classes, check_alike
from emu.simulation.optimizer import FusedAdamW
from emu.spmd import PlanError, Rank

START, END = "the step", "the step is over"  # marks around what is priced


@dataclass(frozen=True)
class Step:
    """A program(rank): forward and backward of all microbatches, sums of gradients over ranks, the optimizer's step.

    AdamW takes it in one kernel; gradients are not clipped. A first step comes before the one that counts, of as few
    microbatches as the schedule can do: it makes the optimizer's states, and tells every stage what shapes arrive.

    Args:
        make_model: makes the plain model.
        plan: how it is trained.
        classes: the ranks that are taken to do the same; a rank that sees that it is not so raises NotAlike.
        tick: told of every pass of a microbatch through a layer, forward, on any rank; not of one that is computed again.
        whole_warm_up: whether the first step is as long as the other.
    """

    make_model: Callable[[], Any]
    plan: Plan
    classes: Classes = field(default_factory=dict)
    tick: Callable[[], None] = lambda: None
    whole_warm_up: bool = False

    def __call__(self, rank: Rank) -> Any:
        plan = self.plan
        model = self.make_model()
        for layer in layers_of(model):
            layer.register_forward_hook(self._passed)
        dist = parallelize(model, plan, rank)
        check_alike(dist, self.classes)
        optimizer = dist.optimizer(FusedAdamW)
        microbatches = plan.accumulated() if self.whole_warm_up else warm_up_microbatches(plan)
        loss = None
        for mark, parts in ((None, microbatches), (START, plan.accumulated())):
            if mark is not None:
                rank.mark(mark)
            loss = dist.backward(batch_of(plan, parts), microbatches=parts)
            optimizer.step()
            optimizer.zero_grad()
        rank.mark(END)
        return {"loss": loss}

    def _passed(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not within a backward
            self.tick()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a plain model: its longest list of modules; the model itself where it has none."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[]) or [model]


def batch_of(plan: Plan, microbatches: int) -> Batch:
    """A step's batch, or one of fewer of its microbatches: shapes alone, every label counts."""
    whole = plan.accumulated()
    rows = plan.global_batch if microbatches == whole else plan.global_batch // whole * microbatches
    x = torch.empty(rows, plan.seq, dtype=torch.int64, device="meta")
    return Batch(x, x, tokens=rows * plan.seq)


def warm_up_microbatches(plan: Plan) -> int:
    """The fewest microbatches of a step's size that the schedule can do, with stages where the step has them."""
    most, ranks = plan.accumulated(), plan.axes().get("pp", 1)
    if plan.rows() % most or plan.global_batch % plan.axes().get("dp", 1):  # they differ in size
        return most
    if ranks == 1:
        return 1
    stages = make(plan.schedule, ranks, most, plan.chunks).stages_of
    for fewer in (1, ranks, 2 * ranks):
        try:
            if fewer < most and make(plan.schedule, ranks, fewer, plan.chunks).stages_of == stages:
                return fewer
        except PlanError:
            continue
    return most
