"""Random meshes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import TypeVar

from hypothesis import strategies as st

from emu.spmd import EmuError, Mesh
from emu.spmd.mesh import FOLDED
from emu.testing.choices import AXES

_Value = TypeVar("_Value")


@st.composite
def meshes(draw: st.DrawFn, max_ranks: int = 8, axes: Sequence[str] = AXES, folds: bool = True) -> Mesh:
    """Meshes with all of these axes, in any order, some of one rank; shrinks to one rank, in the order given.

    Args:
        max_ranks: the most ranks of a mesh.
        axes: their names, any that a program uses; "ep" and "etp" are no axes of their own, but folds.
        folds: whether the ranks of a stage may be folded into "ep" and "etp", where those divide them.

    Raises:
        EmuError: a number of ranks below one, or what no mesh has as axes.
    """
    at_most(max_ranks)
    listed(axes)
    if folded := [axis for axis in axes if axis in FOLDED]:
        raise EmuError(f"{folded[0]!r} is no axis, but a fold of the others", "leave it out, and say folds=True")
    sizes = draw(sizes_within(max_ranks, tuple(axes)))
    dense = prod(n for axis, n in sizes.items() if axis != "pp")
    ep = draw(one_of(_divisors(dense))) if folds else 1
    etp = draw(one_of(_divisors(dense // ep))) if folds else 1
    return Mesh(**sizes, **({"ep": ep, "etp": etp} if ep * etp > 1 else {}))


@st.composite
def sizes_within(draw: st.DrawFn, most: int, axes: tuple[str, ...]) -> dict[str, int]:
    """Axis -> size, in any order, of which the product is at most so much."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(one_of(range(1, most // prod(sizes.values()) + 1)))
    return sizes


def one_of(values: Sequence[_Value]) -> st.SearchStrategy[_Value]:
    """One of some values, the first of which is the simplest.

    It takes one choice of hypothesis's however many they are, where sampled_from takes none of a single one: of two
    examples hypothesis calls the one of fewer choices simpler, so that what leaves less to choose would be simpler.
    """
    return st.integers(0, 119).map(lambda i: values[i % len(values)])


def at_most(ranks: int) -> None:
    """Raises an EmuError for a bound that leaves nothing to draw."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise EmuError(f"max_ranks={ranks!r} is not a whole number of at least 1", "say max_ranks=8")


def listed(axes: Sequence[str]) -> None:
    """Raises an EmuError for axes that are no list of different names."""
    if isinstance(axes, str):
        names = re.findall(r"\w+", axes) or ["dp"]
        raise EmuError(f"axes={axes!r} is a text, and no list of names", f"say axes={tuple(names)!r}")
    for axis in axes:
        if not isinstance(axis, str) or not axis.isidentifier() or axis == "on":
            raise EmuError(f"{axis!r} is no name of an axis", f"name some, as {', '.join(AXES)}")
    if len(set(axes)) < len(axes):
        raise EmuError(f"axes={tuple(axes)!r} names an axis twice", "name each once")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if not n % d]
