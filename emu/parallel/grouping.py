"""Which parameters belong together: buckets by bytes for gradients, units by module, an optimizer's groups by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from emu.spmd import EmuError

BUCKET_BYTES = 25 * 2**20  # torch's default for DistributedDataParallel


class Unit(NamedTuple):
    """A module whose parameters are gathered, used and freed together.

    Fields:
        path: its name in the model; "" is the model itself, which holds what no other unit does.
        module: the module.
        names: parameters, by their first name in the model.
    """

    path: str
    module: nn.Module
    names: list[str]


def buckets(parameters: Mapping[str, nn.Parameter], bucket_bytes: int) -> list[list[str]]:
    """Names in backward order (the last parameter's first), in buckets of at least so many bytes, but the last."""
    out: list[list[str]] = []
    room = 0
    for name, p in reversed(list(parameters.items())):
        if room <= 0:
            out.append([])
            room = bucket_bytes
        out[-1].append(name)
        room -= p.numel() * p.element_size()
    return out


def units(model: nn.Module, chosen: Sequence[str] | None = None) -> list[Unit]:
    """The units of a model, in the order in which modules were registered; the model itself comes first.

    Args:
        chosen: paths of modules, with * for any characters; None takes every entry of the outermost module lists and
            sequences (in a transformer: its blocks).

    A parameter that several units use belongs to the model itself, so that it is there for all of them.

    Raises:
        EmuError: a path that names no module, or units inside each other.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    if chosen is None:
        paths = list(_entries(model, ""))
    else:
        paths = [path for path in modules if any(fnmatchcase(path, pattern) for pattern in chosen)]
        for pattern in chosen:
            if not any(fnmatchcase(path, pattern) for path in modules):
                raise EmuError(
                    f"units={list(chosen)}: no module of {type(model).__name__} is called {pattern!r}",
                    f"its modules are {', '.join(list(modules)[:12])}{' ...' if len(modules) > 12 else ''}",
                )
    for path in paths:
        if inner := next((p for p in paths if p.startswith(path + ".")), None):
            raise EmuError(f"unit {inner!r} lies inside unit {path!r}", "choose modules that do not contain each other")
    users: dict[int, set[str]] = {}
    for path, module in [("", model), *((p, modules[p]) for p in paths)]:
        if not path:
            within = set(paths)
            members = [
                part
                for name, part in model.named_modules()
                if not any(name == p or name.startswith(p + ".") for p in within)
            ]
            ids = [id(p) for part in members for p in part.parameters(recurse=False)]
        else:
            ids = [id(p) for p in module.parameters()]
        for key in ids:
            users.setdefault(key, set()).add(path)
    out = {"": Unit("", model, []), **{path: Unit(path, modules[path], []) for path in paths}}
    for name, p in model.named_parameters():
        owners = users[id(p)]
        out[owners.pop() if len(owners) == 1 else ""].names.append(name)
    return [unit for unit in out.values() if unit.names or not unit.path]


def _entries(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            if any(True for _ in child.parameters()):
                yield below
        else:
            yield from _entries(child, below)


def members_of(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None, names: Sequence[str] | None = None
) -> dict[str, int]:
    """Parameter name -> number of its group in an optimizer.

    Args:
        names: of all parameters, where the model has lost some to other stages of a pipeline; None: its own.
        groups: dicts with "params": names, with * for any characters, or parameters of the model; None makes one of all.

    Raises:
        EmuError: a group that names nothing of the model, or a parameter in two groups.
    """
    names = [name for name, _ in model.named_parameters()] if names is None else names
    if groups is None:
        return dict.fromkeys(names, 0)
    by_id = {id(p): name for name, p in model.named_parameters()}
    members: dict[str, int] = {}
    for number, group in enumerate(groups):
        given = group.get("params", ())
        for one in [given] if isinstance(given, (str, Tensor)) else given:
            found = (
                [by_id[id(one)]]
                if id(one) in by_id
                else [n for n in names if isinstance(one, str) and fnmatchcase(n, one)]
            )
            if not found:
                what = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
                raise EmuError(
                    f"parameter group {number} has {what}, which is no parameter of the model",
                    f"name parameters, with * for any characters: {', '.join(names[:6])}, ...",
                )
            for name in found:
                if members.setdefault(name, number) != number:
                    raise EmuError(
                        f"parameter {name!r} is in groups {members[name]} and {number}", "put it in one of them"
                    )
    return members
