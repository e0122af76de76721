"""A plain model cut into stages, in place, on one rank: units of other stages are emptied, and are passed by.

Every stage runs the plain model's own forward. A unit of an earlier stage returns a value that is `elsewhere`; the first
unit of the stage gets what the stage before sent as its first argument; where the first unit of the next stage is called,
that call's first argument is the stage's output. All other arguments must follow from the batch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.context.sequences import Sequences
from emu.parallel.pipeline.division.units import Unit
from emu.parallel.pipeline.running.elsewhere import Elsewhere
from emu.parallel.pipeline.running.form import Form
from emu.parallel.pipeline.running.passing import Leaves, Pass, disorder
from emu.parallel.pipeline.running.placing import empty, guard, place
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.tensor.held import Held, Sharding
from emu.spmd import EmuError, Layout, Only, Rank


class Stages:
    """The stages that one rank holds of a model.

    Args:
        model: a plain one, or one that `shard_model` has cut; it is changed in place.
        rank: which; its index along the axis pp is that of a rank of the schedule.
        schedule: who runs what.
        units: those of every stage.
        sharding: what shard_model returned, which becomes that of what is left; None of a plain model.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: Rank,
        schedule: Schedule,
        units: Sequence[Sequence[Unit]],
        sharding: Sharding | None = None,
    ) -> None:
        self.model, self.rank, self.last = model, rank, len(units) - 1
        self.under_way: Pass | None = None
        self.sequences: Sequences | None = None  # what cuts them over ranks, if anything does
        self.known: dict[int, Any] = {}  # of the last pass
        self._checked: set[int] = set()  # stages whose modules keep no part of the loss
        at = rank.coords.get("pp", 0)
        self.mine = schedule.stages_of[at]
        holders = _holders(model, units, schedule)
        self.sharding = _held(model, rank, holders, sharding)
        kept = {id(p) for name, p in model.named_parameters() if at in holders[name]}
        self.units = sum(len(some) for some in units)
        numbers = count()
        for stage, some in enumerate(units):
            for unit in some:
                if stage not in self.mine:
                    empty(unit, stage, kept)
                place(unit, stage, next(numbers), self)
        guard(model, self)
        self.parameters = {stage: [p for u in units[stage] for p in u.module.parameters()] for stage in self.mine}

    def form_of(self, output: Tensor, before: Form | None) -> Form:
        """What is known of the output of the forward that has just run.

        Args:
            before: of its input.
        """
        known = list(before.units) if before is not None else []
        known += [None] * (self.units - len(known))
        for number, one in self.known.items():
            known[number] = one
        length = self.sharding.tokens.length if self.sharding.tokens is not None else 0
        return Form(tuple(output.shape), output.dtype, length, tuple(known))

    def forward(
        self, stage: int, incoming: Tensor | None, form: Form | None, x: Tensor, y: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """One stage's forward of one microbatch.

        Args:
            incoming: the output of the stage before; None on the first stage.
            form: what is known of that.
            x, y: the microbatch.

        Returns:
            The output for the next stage (None from the last one), and the stage's part of the summed loss (None: none).
        """
        model: Any = self.model
        if self.sharding.tokens is not None and form is not None:
            self.sharding.tokens.length = form.length
        now = self.under_way = Pass(stage, incoming, form)
        self.known = now.known
        try:
            if self.sequences is None:
                loss = model.loss_sum(x, y)
            else:
                with self.sequences.part(x, y, whole=False) as (x, y, more):
                    loss = model.loss_sum(x, y, **more)
        except Leaves as leaves:
            own = getattr(model, "balance_sum", None)  # of a loss that layers have by themselves
            part = own(y) if own is not None else None
            self._check_nothing_kept(stage)
            return leaves.output, part
        except RuntimeError as error:
            if incoming is not None and "a leaf Variable that requires grad" in str(error):
                raise EmuError(
                    f"the first module of stage {stage} writes into its input in place, which the stage before has sent",
                    "let it write elsewhere (inplace=False), or let the stage begin at another module",
                ) from error
            raise
        finally:
            self.under_way = None
        if stage != self.last:
            raise disorder(f"the loss was reached on stage {stage} of {self.last + 1}")
        if isinstance(loss, Elsewhere):
            raise disorder(f"no module of the last stage ({stage}) was called")
        return None, loss

    def _check_nothing_kept(self, stage: int) -> None:
        """Raises an EmuError if a module of a stage keeps a tensor with a gradient: a part of the loss that nobody adds."""
        if stage in self._checked or not torch.is_grad_enabled():
            return
        self._checked.add(stage)
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                    raise EmuError(
                        f"{path} keeps {name!r}, a tensor with a gradient, on stage {stage}: where the last stage adds up the "
                        "loss, it is not there",
                        "give the model balance_sum(y), which returns what its layers add to the summed loss, and None if "
                        "nothing; detach what is no part of the loss",
                    )


def _holders(model: nn.Module, units: Sequence[Sequence[Unit]], schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the indices along pp of the ranks that hold it.

    A parameter that modules of several stages use, as a tied embedding, is held by all of those; one of no unit by all.
    """
    ranks: dict[int, set[int]] = {}
    for stage, some in enumerate(units):
        for unit in some:
            for p in unit.module.parameters():
                ranks.setdefault(id(p), set()).update(schedule.ranks_of[stage])
    loose = {
        id(p)
        for path, module in model.named_modules()
        if not any(path == u.path or path.startswith(u.path + ".") for some in units for u in some)
        for p in module.parameters(recurse=False)
    }
    everyone = tuple(range(schedule.ranks))
    return {n: everyone if id(p) in loose else tuple(sorted(ranks[id(p)])) for n, p in model.named_parameters()}


def _held(model: nn.Module, rank: Rank, holders: dict[str, tuple[int, ...]], sharding: Sharding | None) -> Sharding:
    """What this rank holds once other stages' units are emptied. Copies of a parameter get the first one's values."""
    here = rank.coords.get("pp", 0)
    out = Sharding(rank, pipeline=True)
    for name, p in model.named_parameters():
        before = sharding.held[name] if sharding is not None else Held(Layout(), "dense")
        out.shapes[name] = sharding.shapes[name] if sharding is not None else tuple(p.shape)
        if here in holders[name]:
            layout = Layout({**before.layout.placements, "pp": Only(holders[name])})
            out.held[name] = Held(layout, before.kind, before.counted, before.overlaps)
    if sharding is not None:
        out.regions, out.tokens = list(sharding.regions), sharding.tokens
    taken: Any = model
    taken.cut_inside = out  # so that nobody takes it for a plain one
    return out
