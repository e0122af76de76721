"""Numbers that no data sheet gives: fitted to published runs, each held near a prior by the width of its doubt.

They stand in data/fitted.toml, one table each, by family and name: [a100.matmul_bfloat16]. A chip or a link says which
families it takes its constants from (`fitted = ["gpu", "a100"]`), so one family serves every chip that it is true of.
The fit (`python -m emu.validate.fit`) writes that file; to try other values, it calls `with_constants`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import unknown
from .packaged import packaged

if TYPE_CHECKING:
    from .clusters import Cluster


@dataclass(frozen=True)
class Constant:
    """One number that the fit may move.

    Args:
        value: what the fit found, in the unit of the field that it fills.
        prior: what it would be without the fit.
        width: how far off the prior may be, one standard deviation of its logarithm.
        source: where the prior comes from, and whether the fit sees the constant at all.
    """

    value: float
    prior: float
    width: float
    source: str


@cache
def fitted() -> Mapping[str, Constant]:
    """All constants by dotted name, e.g. "a100.matmul_bfloat16"."""
    return {
        f"{family}.{name}": Constant(**constant)
        for family, constants in packaged("fitted").items()
        for name, constant in constants.items()
    }


def place_of(name: str) -> tuple[str, str]:
    """The field that a constant fills, and its key there ("" if the field is one number).

    "a100.matmul_bfloat16" fills sustained["bfloat16"], "a100.flash2_backward" attention["flash2.backward"]; any other
    fills the field of its own name.
    """
    name = name.split(".", 1)[1]
    if name.startswith("matmul_") and name != "matmul_ends":
        return "sustained", name.removeprefix("matmul_")
    if name.startswith("flash"):
        return "attention", name.replace("_", ".")
    return name, ""


def values_of(families: tuple[str, ...], values: Mapping[str, float]) -> dict[str, Any]:
    """Fields and their contents, out of the constants of these families."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.split(".", 1)[0] in families:
            field, key = place_of(name)
            if key:
                found.setdefault(field, {})[key] = value
            else:
                found[field] = value
    return found


def with_constants(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """The cluster with other values for some constants, e.g. {"a100.matmul_bfloat16": 0.8}.

    Constants of families that nothing in this cluster takes (another chip's, or those of software) change nothing.
    Raises HardwareError for a name that is no constant.
    """
    for name in values:
        if name not in fitted():
            raise unknown("constant", name, fitted())
    return replace(
        cluster,
        chip=_with(cluster.chip, values),
        node=replace(cluster.node, scale_up=_with(cluster.node.scale_up, values)),
        scale_out=_with(cluster.scale_out, values),
    )


def _with(part: Any, values: Mapping[str, float]) -> Any:
    """A chip or a link with those of its constants that `values` names."""
    changed = values_of(getattr(part, "fitted", ()), values)
    if not changed:
        return part
    merged = {
        field: {**getattr(part, field), **value} if isinstance(value, dict) else value
        for field, value in changed.items()
    }
    return replace(part, **merged)
