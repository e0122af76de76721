"""Selective by operator: the results of some operators are kept, and what is cheap is computed again around them.

One mode below autograd notes the results of these operators down, in order; another gives them back in that order when the
layer is computed again, so that they do not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emu.parallel.checkpointing.keeping import Keep, Kept, alias, from_here
from emu.parallel.checkpointing.surroundings import RandomState
from emu.spmd import EmuError, PlanError


def checked_operators(names: Iterable[str]) -> frozenset[str]:
    """Schema names of operators: "mm", "aten.mm" and "aten::mm" are "aten::mm".

    Raises:
        PlanError: no such operator, or one that writes in place or returns a view, of which nothing could be kept.
    """
    if isinstance(names, str):
        names = (names,)
    return frozenset(_schema_name(name) for name in names)


def _schema_name(name: str) -> str:
    space, _, short = name.replace("::", ".").rpartition(".")
    space = space or "aten"
    packet = getattr(getattr(torch.ops, space, None), short, None)
    if packet is None or not hasattr(packet, "overloads"):
        raise PlanError(
            f"there is no operator {name!r} whose results could be kept",
            "name operators as torch.ops.aten has them: mm, addmm, bmm, _scaled_dot_product_flash_attention",
            field="checkpoint",
        )
    schema = getattr(packet, packet.overloads()[0])._schema
    if any(r.alias_info is not None for r in schema.returns) or short.endswith("_"):
        raise PlanError(
            f"{name!r} makes nothing new that could be kept: it writes in place, or returns a view",
            "name operators that compute, such as mm, addmm or bmm",
            field="checkpoint",
        )
    return f"{space}::{short}"


class _Result(NamedTuple):
    """What one operator returned, and the generators after it where it drew from them."""

    operator: str
    tensors: Any
    random: RandomState | None


class Results:
    """What some operators returned in one call of a layer.

    Args:
        operators: which, as checked_operators returns them.
        keep: what their results pass through, as it is where this is made: outside of the layer.
        where: the layer, for errors.
    """

    def __init__(self, operators: frozenset[str], keep: Keep, where: str) -> None:
        self.operators, self.keep, self.where = operators, from_here(keep), where
        self.noted: list[_Result] = []

    def noting(self) -> TorchDispatchMode:
        """Within it results are noted down."""
        return _Noting(self)

    def given_back(self) -> TorchDispatchMode:
        """Within it these operators do not run, and return what they did the first time."""
        return _GivingBack(self)


class _Noting(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results, name = self._results, func._schema.name
        if name in results.operators:
            draws = torch.Tag.nondeterministic_seeded in func.tags
            # What is kept is never the result itself, which is yet to get its place in the graph that holds on to this.
            kept = _each(out, lambda t: Kept(alias(t), results.keep, f"a result of {name} in {results.where}"))
            results.noted.append(_Result(name, kept, RandomState.now() if draws else None))
        return out


class _GivingBack(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results, self._at = results, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in self._results.operators:
            return func(*args, **(kwargs or {}))
        noted, i = self._results.noted, self._at
        self._at += 1
        if i >= len(noted) or noted[i].operator != name:
            raise EmuError(
                f"{self._results.where} computes something else the second time: kept operator {i} is {name} now",
                "let what a layer does depend on its arguments and torch's random numbers alone",
            )
        if (random := noted[i].random) is not None:
            random.set()
        return _each(noted[i].tensors, lambda kept: kept.again())


def _each(value: Any, change: Any) -> Any:
    """Tensors, and what was kept of them, changed, in tuples and lists."""
    if isinstance(value, (Tensor, Kept)):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_each(v, change) for v in value)
    return value
