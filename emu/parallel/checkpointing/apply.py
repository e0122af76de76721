"""Checkpointing a plain model, in place: its layers' classes change, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from emu.parallel.checkpointing.chain import Chain
from emu.parallel.checkpointing.keeping import Keep, in_place
from emu.parallel.checkpointing.operators import checked_operators
from emu.parallel.checkpointing.policy import Policy
from emu.parallel.tensor.arguments import first_of
from emu.spmd import EmuError, PlanError, Rank

LISTS = (nn.ModuleList, nn.Sequential)


def checkpointed(
    model: nn.Module,
    policy: str | Policy = "full",
    rank: Rank | None = None,
    layers: str | Sequence[nn.Module] | None = None,
    keep: Keep = in_place,
    operators: Iterable[str] = (),
) -> Policy:
    """Changes a plain model's layers so that backward computes again what forward did not keep, as a policy says.

    Losses, gradients and torch's random numbers stay as they are, to the last bit. Do it before Pipeline or DataParallel take
    the model over; under Pipeline every stage follows the policy with the layers that it has.

    A layer that is computed again finds the autocast, the buffers, the numbers and tensors among its attributes and the
    generators that its first call found, also where it writes them. Backward raises an EmuError, by the layer's name, where
    parameters or buffers that it reads were written in between, or an input or result that was kept (also in a view, or
    without gradients). Nobody can see writes through `.data`, or into lists and dicts that a layer holds.

    Args:
        model: with a chain of layers, each called with what the one before returned as its first argument. With the policy
            "full", or where a segment begins at every layer, anything may happen between them.
        policy: its name (see Policy.named), or a Policy of as many layers as there are.
        rank: the rank it runs on, where there is one.
        layers: the modules, or the path of a list of them; None: the longest outermost list.
        keep: what the inputs that forward keeps pass through: see keeping.py.
        operators: of layers that are computed again, the operators whose results are kept and which do not run again, as
            torch.ops.aten names them: ("mm", "addmm"). A layer may not write into these in place.

    Returns:
        The policy.

    Raises:
        PlanError: no such policy, or one of another number of layers.
        EmuError: a model without a list of layers; one that is checkpointed already, or cut into stages.
    """
    if not isinstance(model, nn.Module):
        raise EmuError(f"a {type(model).__name__} is no module", "pass the model: checkpointed(model, 'full')")
    if rank is not None and not isinstance(rank, Rank):
        raise EmuError(f"the rank is a {type(rank).__name__}", "pass the rank that the program gets, or None")
    found = layers_to_checkpoint(model, layers)
    if isinstance(policy, str):
        policy = Policy.named(policy, len(found))
    elif not isinstance(policy, Policy):
        raise PlanError(
            f"checkpoint={policy!r:.80} is a {type(policy).__name__}",
            "say its name, such as 'full'",
            field="checkpoint",
        )
    if policy.layers != len(found):
        raise PlanError(
            f"checkpoint={policy.name} is for {policy.layers} layers, and {type(model).__name__} has {len(found)}",
            f"make it for {len(found)} layers",
            field="checkpoint",
        )
    names = [name for name, _ in found]
    join(Chain(policy, names, keep, checked_operators(operators)), found)
    if policy.cores:
        from emu.parallel.checkpointing.selective import checkpointed_modules

        checkpointed_modules(model, keep=keep)
    return policy


def layers_to_checkpoint(model: nn.Module, layers: str | Sequence[nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """Names and modules of the layers. Raises an EmuError where there are none."""
    if layers is None:
        lists = [(path, m) for path, m in _outermost(model, "") if len(m)]
        if not lists:
            raise EmuError(
                f"{type(model).__name__} has no list of layers",
                "say which modules they are: checkpointed(model, 'full', layers=[...]), or the path of a list of them",
            )
        layers, found = max(lists, key=lambda one: len(one[1]))
    elif isinstance(layers, str):
        at = dict(model.named_modules())
        if not isinstance(found := at.get(layers), LISTS):
            known = ", ".join(path for path, m in at.items() if isinstance(m, LISTS)) or "none"
            raise EmuError(f"{layers!r} is no list of layers of {type(model).__name__}", f"its lists are: {known}")
    else:
        paths = {id(m): path for path, m in model.named_modules()}
        if wrong := next((m for m in layers if id(m) not in paths), None):
            raise EmuError(f"a {type(wrong).__name__} is no module of {type(model).__name__}", "pass its own layers")
        return [(paths[id(m)], m) for m in layers]
    return [(f"{layers}.{name}" if layers else name, m) for name, m in found.named_children()]


def _outermost(module: nn.Module, path: str) -> Any:
    if isinstance(module, LISTS):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name)


def join(chain: Chain, layers: Sequence[tuple[str, nn.Module]]) -> None:
    """From now on calls of these modules go by the chain. One that is called twice keeps both calls."""
    for name, layer in layers:
        if "_chain" in vars(layer):
            raise EmuError(f"{name} is checkpointed already", "checkpoint a model once; change a plain copy of it")
        if "of" in vars(layer) and "stage" in vars(layer):
            raise EmuError(
                f"{name} lies on a stage of a pipeline", "checkpoint the model before Pipeline takes it over"
            )
    for i, (_, layer) in enumerate(layers):
        if "_chain" in vars(layer):
            raise EmuError(f"{layers[i][0]} stands in the list of layers twice", "give each place a layer of its own")
        first = first_of(layer)
        made: Any = layer
        made.__class__ = _linked(type(layer))
        vars(layer).update(_chain=chain, _place=i, _first=first)


_classes: dict[type, type] = {}


def _linked(cls: type) -> type:
    """A module class whose calls go by a chain."""
    if cls not in _classes:
        plain: Any = cls.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._chain.call(self, self._place, self._first, plain.__get__(self), args, kwargs)

        about = {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (cls,), about)
    return _classes[cls]
