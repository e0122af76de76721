"""Which modules of a plain model form which stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

from torch import nn

from emu.spmd import PlanError, split_sizes

LISTS = (nn.ModuleList, nn.Sequential)


class Unit(NamedTuple):
    """A module that lies in one stage as a whole.

    Fields:
        path: its name in the model.
        module: the module.
        around: the path of the list that it is an entry of; None where it stands alone, as an embedding or a head.
    """

    path: str
    module: nn.Module
    around: str | None


def units_of(model: nn.Module) -> list[Unit]:
    """The modules that stages are made of, in the order in which they were registered.

    These are the entries of the outermost lists and sequences, in a transformer its blocks, and what stands beside them.
    Modules without parameters are none: they run wherever they are called.
    """
    found = _units(model, "", "" if isinstance(model, LISTS) else None)
    return list({id(unit.module): unit for unit in reversed(list(found))}.values())[::-1]  # by its first name, once


def _units(module: nn.Module, path: str, around: str | None) -> Iterator[Unit]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if not any(True for _ in child.parameters()):
            continue
        if around is None and isinstance(child, LISTS):
            yield from _units(child, below, below)
        elif around is None and any(isinstance(part, LISTS) for part in child.modules()):
            yield from _units(child, below, None)
        else:
            yield Unit(below, child, around)


def layers_of(units: Sequence[Unit]) -> list[int]:
    """The positions of those units that are layers: entries of the longest list."""
    lists: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        if unit.around is not None:
            lists.setdefault(unit.around, []).append(i)
    return max(lists.values(), key=len, default=[])


def divided(model: nn.Module, stages: int, how: str | Sequence[int] | Sequence[str] = "even") -> list[list[Unit]]:
    """The units of every stage.

    Args:
        how: "even": as many layers as possible alike on every stage (the first ones get one more), what comes before
            the layers on the first stage and what comes after on the last; or the number of layers of every stage, of which
            the first and last may have none; or the name of the first module of every stage but the first.

    Raises:
        PlanError: fewer layers than stages, or a division that does not fit the model.
    """
    units = units_of(model)
    names = [unit.path for unit in units]
    what = type(model).__name__
    _check_kind(how)
    if not isinstance(how, str) and (isinstance(how[0], str) if how else stages == 1):  # one stage begins by itself
        return _from_names(units, stages, [str(one) for one in how], what)
    layers = layers_of(units)
    if isinstance(how, str):
        if how != "even":
            raise PlanError(
                f"stages={how!r} is no way to divide a model",
                'say "even", "cost", "memory", numbers of layers, or names',
            )
        if len(layers) < stages:
            raise PlanError(
                f"{stages} stages, but {what} has {len(layers)} layers to share out"
                + (f" ({names[layers[0]]} to {names[layers[-1]]})" if layers else ""),
                f"use at most {len(layers)} stages (pp * chunks), or say where stages begin: Pipeline(stages=[names of modules])"
                if layers
                else f"say where stages begin by the names of modules: {', '.join(names[:8])}",
                field="mesh",
                nearest=max(len(layers), 1),
            )
        how = split_sizes(len(layers), stages)
    counts = [int(n) for n in how]
    if len(counts) != stages or min(counts) < 0 or sum(counts) != len(layers):
        raise PlanError(
            f"{counts} layers on {stages} stages, but {what} has {len(layers)} layers",
            f"give {stages} numbers that add up to {len(layers)}, e.g. {split_sizes(len(layers), stages)}",
            field="stages",
            nearest=split_sizes(len(layers), stages),
        )
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    first = layers[0] if layers else 0
    starts = [0] + [first + end for end in ends[:-1]] + [len(units)]
    out = [units[a:b] for a, b in pairwise(starts)]
    return _whole(out, what)


def _check_kind(how: Any) -> None:
    """Raises a PlanError for what are no numbers and no names."""
    if isinstance(how, str):
        return
    each = list(how) if isinstance(how, Sequence) else [None]
    numbers = all(isinstance(one, Integral) and not isinstance(one, bool) for one in each)
    if not numbers and not all(isinstance(one, str) for one in each):
        raise PlanError(
            f"stages={how!r:.80} is no way to divide a model",
            'say "even", "cost", "memory", a list of whole numbers of layers, or a list of names of modules',
            field="stages",
        )


def _from_names(units: list[Unit], stages: int, starts: Sequence[str], what: str) -> list[list[Unit]]:
    names = [unit.path for unit in units]
    if wrong := next((name for name in starts if name not in names), None):
        raise PlanError(
            f"a stage begins at {wrong!r}, but {what} has no such module to begin with",
            f"stages may begin at {', '.join(names[1:])}",
            field="stages",
        )
    at = [0, *(names.index(name) for name in starts), len(units)]
    if len(starts) != stages - 1 or any(a >= b for a, b in pairwise(at)):
        raise PlanError(
            f"{len(starts)} beginnings {list(starts)} do not make {stages} stages",
            f"give the first module of every stage but the first, {stages - 1} names in the model's order",
            field="stages",
        )
    return _whole([units[a:b] for a, b in pairwise(at)], what)


def _whole(stages: list[list[Unit]], what: str) -> list[list[Unit]]:
    if (empty := next((i for i, units in enumerate(stages) if not units), None)) is not None:
        raise PlanError(
            f"stage {empty} of {what} has no module",
            "give every stage a layer; only the first and the last may do with an embedding or a head alone",
            field="stages",
        )
    return stages
