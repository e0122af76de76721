"""A plain model cut into stages, in place, on one rank: units of other stages are emptied, and are passed by.

Every stage runs the plain model's own forward. A unit of an earlier stage returns a value that is `elsewhere`; the first
unit of the stage gets what the stage before sent as its first argument; where the first unit of the next stage is called,
that call's first argument is the stage's output. All other arguments must follow from the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.pipeline.division.units import Unit
from emu.parallel.pipeline.running.elsewhere import Elsewhere, becomes, elsewhere, here
from emu.parallel.pipeline.running.form import DTYPES, Form
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.tensor.arguments import first_of, with_first
from emu.parallel.tensor.held import Held, Sharding
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
        form: what is known of it, and of what the units before returned.
        known: of every unit of this stage that was called, by its number: the shape and dtype that it returned.
    """

    def __init__(self, stage: int, incoming: Tensor | None, form: Form | None) -> None:
        self.stage, self.incoming, self.form = stage, incoming, form
        self.entered = False
        self.known: dict[int, tuple[tuple[int, ...], torch.dtype] | None] = {}

    def call(self, unit: Placed, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit's call comes to on this stage."""
        args, kwargs = here(args), here(kwargs)
        if any(type(value) in (list, dict, set) for value in (*args, *kwargs.values())):
            raise EmuError(
                f"{unit.path} is given a list, a dict or a set, into which it may write: other stages would not see it",
                "return what later modules need, and pass tensors or tuples",
            )
        if unit.stage < self.stage:
            return self._elsewhere(unit)
        if unit.stage > self.stage:
            raise Leaves(self._sent(unit, args, kwargs))
        if not self.entered and self.incoming is not None:
            incoming = self.incoming
            if incoming.requires_grad and not torch.is_grad_enabled():
                raise EmuError(
                    f"{unit.path} is called without gradients, as within a reentrant checkpoint: nothing before it would learn",
                    "say checkpoint(..., use_reentrant=False), or Pipeline(recompute=True), which does the same for all",
                )
            args, kwargs = with_first(unit.path, unit.first, args, kwargs, lambda there: becomes(there, incoming))
        self.entered = True
        if lacking := [value for value in (*args, *kwargs.values()) if isinstance(value, Elsewhere)]:
            raise EmuError(
                f"{unit.path} needs {lacking[0]._whose}, which lies before stage {self.stage} and was not sent to it: only the "
                "first argument of a stage's first module is",
                "let the stage begin elsewhere, so that both lie on one; or pass both as one tensor",
            )
        out = run(*args, **kwargs)
        single = isinstance(out, Tensor) and out.dtype in DTYPES
        self.known[unit.number] = (tuple(out.shape), out.dtype) if single else None
        return out

    def _elsewhere(self, unit: Placed) -> Elsewhere:
        """What a unit of an earlier stage returned there."""
        if self.entered:
            raise _disorder(f"{unit.path} (stage {unit.stage}) is called after modules of stage {self.stage}")
        assert self.incoming is not None and self.form is not None
        known = self.form.units[unit.number]
        if known is None:
            raise EmuError(
                f"{unit.path} returns no single tensor of activations, so stage {self.stage} cannot do without it",
                "let layers return one tensor each, or let no stage begin after this one",
            )
        return elsewhere(known[0], known[1], self.incoming.device, f"the output of {unit.path}")

    def _sent(self, unit: Placed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The stage's output: the first argument of the next stage's first unit."""
        if unit.stage != self.stage + 1 or not self.entered:
            raise _disorder(f"stage {self.stage} calls {unit.path}, which lies on stage {unit.stage}")
        found: list[Any] = []
        with_first(unit.path, unit.first, args, kwargs, found.append)
        sent = found[0]
        if not isinstance(sent, Tensor) or isinstance(sent, Elsewhere) or not differentiable(sent):
            raise EmuError(
                f"the first argument of {unit.path} is no tensor of activations that stage {self.stage} could send",
                "let stages begin at modules whose first argument brings all activations",
            )
        return sent


class Placed(nn.Module):
    """What is mixed into the class of every unit."""

    stage: int
    path: str
    first: str
    number: int  # in the order of all units
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
                    _empty(unit, stage, kept)
                self._place(unit, stage, next(numbers))
        _guard(model, self)
        self.parameters = {stage: [p for u in units[stage] for p in u.module.parameters()] for stage in self.mine}

    def _place(self, unit: Unit, stage: int, number: int) -> None:
        module: Any = unit.module
        first = first_of(module)
        module.__class__ = _placed(type(module))
        # Past nn.Module's __setattr__, which knows of parameters and modules only.
        vars(module).update(stage=stage, path=unit.path, first=first, number=number, of=self)

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
            loss = model.loss_sum(x, y)
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
            raise _disorder(f"the loss was reached on stage {stage} of {self.last + 1}")
        if isinstance(loss, Elsewhere):
            raise _disorder(f"no module of the last stage ({stage}) was called")
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


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    now = self.of.under_way
    if now is None and torch._C._current_graph_task_id() >= 0:  # a checkpoint computes it again
        plain: Any = super(type(self), self)
        return plain.__call__(*here(args), **here(kwargs))
    if now is None:
        raise EmuError(
            f"{self.path} lies on stage {self.stage} of a pipeline, and was called outside of it",
            "call .backward(batch) or .evaluate(batch) of the Pipeline",
        )
    plain = super(type(self), self)
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
        out.regions, out.tokens = list(sharding.regions), sharding.tokens
    model.cut_inside = out  # type: ignore[assignment]
    return out


def _empty(unit: Unit, stage: int, kept: set[int]) -> None:
    """Drops parameters that no unit of this rank uses, and buffers. Whoever asks for them is told."""
    for part in unit.module.modules():
        gone = [name for name, p in part._parameters.items() if p is not None and id(p) not in kept]
        for name in gone:
            del part._parameters[name]
        names = (*gone, *part._buffers)
        part._buffers.clear()
        if names:
            part.__class__ = _emptied(type(part))
            vars(part).update(gone=names, where=f"{unit.path} (stage {stage})")


_emptied_classes: dict[type, type] = {}


def _emptied(cls: type) -> type:
    """A module class that says so when it is asked for what is on another stage."""

    def gone(self: Any, name: str) -> Any:
        if name in vars(self)["gone"]:
            raise EmuError(
                f"{name!r} of {vars(self)['where']} is read outside of that module, on a stage that does not have it",
                "read it within its module's own forward; to tie weights, let two modules share one: "
                "head.weight = embedding.weight",
            )
        plain: Any = cls
        return plain.__getattr__(self, name)

    if cls not in _emptied_classes:
        about = {"__getattr__": gone, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _emptied_classes[cls] = type(cls.__name__, (cls,), about)
    return _emptied_classes[cls]


def _guard(model: nn.Module, stages: Stages) -> None:
    """A loss that reads all of the model's parameters would read those of one stage: it is told."""
    cls: Any = type(model)

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from cls.named_parameters(self, *args, **kwargs)
        if stages.under_way is not None and stages.last:  # to look at the first of them, say for a dtype, is no harm
            raise EmuError(
                f"loss_sum reads all parameters of {cls.__name__}, of which stage {stages.under_way.stage} has its own alone",
                "leave terms over parameters to the optimizer (weight_decay), or compute them in the modules that have them",
            )

    about = {"named_parameters": named_parameters, "__module__": cls.__module__, "__doc__": cls.__doc__}
    model.__class__ = type(cls.__name__, (cls,), about)


def differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _disorder(what: str) -> EmuError:
    return EmuError(
        what,
        "stages follow the order in which modules are registered, and must be called in it: say where stages begin by the "
        "names of modules, or register them in the order of their use",
    )
