"""What becomes of a model's modules in stages: calls go by the stage under way, and what is on other stages says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from emu.parallel.pipeline.division.units import Unit
from emu.parallel.pipeline.running.elsewhere import here
from emu.parallel.pipeline.running.passing import Staged
from emu.parallel.tensor.arguments import first_of
from emu.spmd import EmuError


def place(unit: Unit, stage: int, number: int, stages: Staged) -> None:
    """From now on the unit's calls depend on the stage under way."""
    module: Any = unit.module
    first = first_of(module)
    module.__class__ = _placed(type(module))
    # Past nn.Module's __setattr__, which knows of parameters and modules only.
    vars(module).update(stage=stage, path=unit.path, first=first, number=number, of=stages)


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


def empty(unit: Unit, stage: int, kept: set[int]) -> None:
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


def guard(model: nn.Module, stages: Staged) -> None:
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
