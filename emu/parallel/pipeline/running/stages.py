"""A plain model cut into stages, in place, on one rank: units of other stages are emptied, and are passed by.

Every stage runs the plain model's own forward. A unit of an earlier stage returns a value that is `elsewhere`; the first
unit of the stage gets what the stage before sent as its first argument; where the first unit of the next stage is called,
that call's first argument is the stage's output. All other arguments must follow from the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from emu.parallel.pipeline.division.units import Unit
from emu.parallel.pipeline.running.elsewhere import Elsewhere, becomes, elsewhere, here
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.tensor.arguments import first_of, with_first
from emu.parallel.tensor.held import Held, Sharding
from emu.parallel.tensor.pairs import lies_in
from emu.spmd import EmuError, Layout, Only, Rank


class Leaves(BaseException):
    """A stage is over: the next one's first unit was called. No Exception, so that no model catches it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class Pass:
    """One forward of one stage.

    Args:
        stage: which.
        incoming: what the stage before sent; None on the first stage.
        length: tokens of the whole sequence, of which `incoming` has some; 0: it has all.
    """

    def __init__(self, stage: int, incoming: Tensor | None, length: int) -> None:
        self.stage, self.incoming, self.length = stage, incoming, length
        self.entered = False

    def call(self, unit: Placed, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit's call comes to on this stage."""
        args, kwargs = here(args), here(kwargs)
        if unit.stage < self.stage:
            if self.entered:
                raise _disorder(f"{unit.path} (stage {unit.stage}) is called after modules of stage {self.stage}")
            assert self.incoming is not None
            given = self.incoming
            shape = list(given.shape)
            if unit.whole and self.length:
                shape[1] = self.length
            return elsewhere(tuple(shape), given.dtype, given.device, f"the output of {unit.path}")
        if unit.stage > self.stage:
            if unit.stage != self.stage + 1 or (not self.entered):
                raise _disorder(f"stage {self.stage} calls {unit.path}, which lies on stage {unit.stage}")
            found: list[Any] = []
            with_first(unit.path, unit.first, args, kwargs, found.append)
            sent = found[0]
            if not isinstance(sent, Tensor) or isinstance(sent, Elsewhere) or not differentiable(sent):
                raise EmuError(
                    f"the first argument of {unit.path} is no tensor of activations that stage {self.stage} could send",
                    "let stages begin at modules whose first argument brings all activations",
                )
            raise Leaves(sent)
        if not self.entered and self.incoming is not None:
            incoming = self.incoming
            args, kwargs = with_first(unit.path, unit.first, args, kwargs, lambda there: becomes(there, incoming))
        self.entered = True
        if lacking := [value for value in (*args, *kwargs.values()) if isinstance(value, Elsewhere)]:
            raise EmuError(
                f"{unit.path} needs {lacking[0]._whose}, which lies before stage {self.stage} and was not sent to it: only the "
                "first argument of a stage's first module is",
                "let the stage begin elsewhere, so that both lie on one; or pass both as one tensor",
            )
        return run(*args, **kwargs)


class Placed(nn.Module):
    """What is mixed into the class of every unit."""

    stage: int
    path: str
    first: str
    whole: bool  # whether it comes before sequences are cut
    of: Stages


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
        at = rank.coords.get("pp", 0)
        self.mine = schedule.stages_of[at]
        holders = _holders(model, units, schedule)
        self.sharding = _held(model, rank, holders, sharding)
        kept = {id(p) for name, p in model.named_parameters() if at in holders[name]}
        cut = False
        self._cut_before: list[bool] = []  # whether sequences are cut before a stage begins
        for stage, some in enumerate(units):
            self._cut_before.append(cut)
            for unit in some:
                if stage not in self.mine:
                    _empty(unit.module, kept)
                cut = cut or any(lies_in(path, unit.path) for path in self.sharding.scatters)
                self._place(unit, stage, not cut)
        self.parameters = {stage: [p for u in units[stage] for p in u.module.parameters()] for stage in self.mine}

    def _place(self, unit: Unit, stage: int, whole: bool) -> None:
        module: Any = unit.module
        first = first_of(module)
        module.__class__ = _placed(type(module))
        # Past nn.Module's __setattr__, which knows of parameters and modules only.
        vars(module).update(stage=stage, path=unit.path, first=first, whole=whole, of=self)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence in the forward under way, where a rank has some of them; otherwise 0."""
        return self.sharding.tokens.length if self.sharding.tokens is not None else 0

    def forward(
        self, stage: int, incoming: Tensor | None, length: int, x: Tensor, y: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """One stage's forward of one microbatch.

        Args:
            length: what `length` was on the first stage; on that one itself it does not matter.
            incoming: the output of the stage before, which also says its shape; None on the first stage.
            x, y: the microbatch.

        Returns:
            The output for the next stage (None from the last one), and the stage's part of the summed loss (None: none).
        """
        model: Any = self.model
        if self.sharding.tokens is not None and incoming is not None:
            self.sharding.tokens.length = length
        self.under_way = Pass(stage, incoming, length if self._cut_before[stage] else 0)
        try:
            loss = model.loss_sum(x, y)
        except Leaves as leaves:
            own = getattr(model, "balance_sum", None)  # of a loss that layers have by themselves
            return leaves.output, own(y) if own is not None else None
        finally:
            self.under_way = None
        if stage != self.last:
            raise _disorder(f"the loss was reached on stage {stage} of {self.last + 1}")
        if isinstance(loss, Elsewhere):
            raise _disorder(f"no module of the last stage ({stage}) was called")
        return None, loss


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    now = self.of.under_way
    if now is None:
        raise EmuError(
            f"{self.path} lies on stage {self.stage} of a pipeline, and was called outside of it",
            "call .backward(batch) or .evaluate(batch) of the Pipeline",
        )
    plain: Any = super(type(self), self)
    return now.call(self, plain.__call__, args, kwargs)


_classes: dict[type, type] = {}


def _placed(cls: type) -> type:
    """A module class whose calls depend on the stage under way."""
    if cls not in _classes:
        _classes[cls] = type(
            cls.__name__, (cls,), {"__call__": _call, "__module__": cls.__module__, "__doc__": cls.__doc__}
        )
    return _classes[cls]


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
        out.regions, out.tokens, out.scatters = list(sharding.regions), sharding.tokens, list(sharding.scatters)
    model.cut_inside = out  # type: ignore[assignment]
    return out


def _empty(module: nn.Module, kept: set[int]) -> None:
    """Drops parameters that no unit of this rank uses, and buffers."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and id(p) not in kept:
                part._parameters[name] = None
        for name in part._buffers:
            part._buffers[name] = None


def differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _disorder(what: str) -> EmuError:
    return EmuError(
        what,
        "stages follow the order in which modules are registered, and must be called in it: say where stages begin by the "
        "names of modules, or register them in the order of their use",
    )
