"""Random plans, all of which can be carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from hypothesis import strategies as st

from emu.parallel import Plan
from emu.spmd import EmuError, Mesh, PlanError
from emu.testing.choices import AXES, CHOICES, FOLDS, fits, plan_of
from emu.testing.meshes import at_most, listed, one_of

# What is drawn together, because one allows the other; each group only with what is possible with those before it.
_TOGETHER = (
    ("zero",),
    ("replicate",),
    ("reshard_after_forward",),
    ("prefetch",),
    ("sp",),
    ("fold",),
    ("microbatches", "schedule", "chunks"),
    ("context",),
    ("checkpoint",),
    ("offload",),
    ("precision",),
    ("seq",),
    ("global_batch",),
)
# What says nothing, and so stays as it is.
_SILENT = {
    "sp": lambda case: case["tp"] == 1,
    "replicate": lambda case: case["zero"] == 0,
    "reshard_after_forward": lambda case: case["zero"] != 3,
    "prefetch": lambda case: case["zero"] != 3,
    "schedule": lambda case: case["pp"] == 1,
    "chunks": lambda case: case["pp"] == 1,
    "context": lambda case: case["cp"] == 1,
}
_DEFAULTS = {"context": "zigzag", "schedule": "1f1b", "model": "experts"}  # a model of experts allows any fold
# Where there is room for any value of an option that there can be: mesh, and what else it needs.
_ROOM: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "zero": [("dp=2", {})],
    "replicate": [("dp={}", {"zero": 1}), ("dp=2", {"zero": 1})],
    "prefetch": [("dp=2", {"zero": 3})],
    "sp": [("tp=2", {})],
    "schedule": [("pp=2", {"microbatches": 4})],
    "chunks": [("pp=2", {"schedule": "interleaved", "microbatches": 4})],
    "context": [("cp=2", {})],
}
OPTIONS = tuple(option for options in _TOGETHER for option in options)


@st.composite
def plans(draw: st.DrawFn, max_ranks: int = 8, axes: Sequence[str] = AXES, **choices: Sequence[Any]) -> Plan:
    """Plans that a model of `models(plan)` trains under; shrinks to one rank and the first choice of every option.

    Args:
        max_ranks: the most ranks of a mesh.
        axes: those that may have more than one.
        choices: option -> the values to draw from, e.g. `zero=[0, 1]`; the first is the simplest. Options are those of
            emu.testing.choices.CHOICES: fields of a Plan, and fold, by name: "none", "ep2", "etp2", "ep4", "ep2 etp2".

    Raises:
        EmuError: an axis or option that there is none, a value that no plan has, or choices of which none is possible.
    """
    at_most(max_ranks)
    allowed = _allowed(axes, choices, max_ranks)
    order = draw(st.permutations(AXES))
    case: dict[str, Any] = {option: values[0] for option, values in CHOICES.items()}
    case |= _DEFAULTS | {"order": " ".join(order)} | dict.fromkeys(AXES, 1)
    for axis in order:
        left = max_ranks // prod(case[a] for a in AXES)
        case[axis] = draw(one_of([n for n in allowed[axis] if n <= left] or [1]))
    for options in _TOGETHER:
        loud = [option for option in options if option not in _SILENT or not _SILENT[option](case)]
        found = [
            made
            for made in (case | dict(zip(loud, values)) for values in _each(loud, allowed))
            if _fits(tuple(made.items()))
        ]
        if not found:
            said = ", ".join(f"{option}={list(allowed[option])}" for option in loud)
            mesh = ",".join(f"{axis}={case[axis]}" for axis in order if case[axis] > 1) or "one rank"
            why = _why_not(case | dict(zip(loud, _each(loud, allowed)[0])))
            raise EmuError(f"none of {said} is possible on {mesh}{why}", "allow more, or fewer axes: axes=('dp',)")
        case = draw(one_of(found))
    return plan_of(case)


@lru_cache(maxsize=4096)
def _fits(case: tuple[tuple[str, Any], ...]) -> bool:
    return fits(dict(case))


def _simplest_first(option: str) -> list[Any]:
    """The values of an option, what stands for nothing special first."""
    return sorted(CHOICES[option], key=lambda value: value != _DEFAULTS.get(option, CHOICES[option][0]))


def _each(options: Sequence[str], allowed: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(product(*(allowed[option] for option in options)))


def _why_not(case: Mapping[str, Any]) -> str:
    """Why a case cannot be, in a plan's words."""
    try:
        plan_of(case)
    except PlanError as error:
        return f": {error.message}"
    return ""


def _check_value(option: str, value: Any) -> None:
    """Raises the plan's own error, or the mesh's, for a value that there never is."""
    if option == "fold" or any(type(value) is type(known) and value == known for known in CHOICES[option]):
        return
    if option in AXES:
        Mesh(**{option: value})
        return
    refused = None
    for mesh, others in _ROOM.get(option, [("", {})]):
        try:
            Plan(mesh.format(value), **others, **{option: value})
        except PlanError as error:
            refused = error
        else:
            return
    if refused is not None:
        raise refused


def _allowed(axes: Sequence[str], choices: Mapping[str, Sequence[Any]], max_ranks: int) -> dict[str, list[Any]]:
    """Axes and options -> what may be drawn, the simplest first."""
    listed(axes)
    for axis in axes:
        if axis not in AXES:
            raise EmuError(f"no plan has an axis {axis!r}", f"name some of {', '.join(AXES)}")
    for option, values in choices.items():
        if option not in (*OPTIONS, *AXES):
            raise EmuError(f"no plan has an option {option!r}", f"name one of {', '.join((*AXES, *OPTIONS))}")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise EmuError(f"{option}={values!r} lists no values", f"list those to draw from: {option}=[...]")
        if option == "fold" and (unknown := [name for name in values if name not in FOLDS]):
            raise EmuError(f"there is no fold {unknown[0]!r}", f"name some of {', '.join(FOLDS)}")
        for value in values:
            _check_value(option, value)
        if option in AXES and min(values) > max_ranks:
            raise EmuError(
                f"{option}={list(values)!r} takes more than {max_ranks} ranks", f"say max_ranks={min(values)}"
            )
    allowed = {option: list(choices.get(option, _simplest_first(option))) for option in CHOICES}
    return allowed | {axis: [1] for axis in AXES if axis not in axes}
