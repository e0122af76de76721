"""A program: a function of a rank, and the mesh that it is run on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from emu.spmd.errors import EmuError
from emu.spmd.mesh import Mesh


def check_kinds(program: object, mesh: object) -> None:
    """Raises an EmuError for a program that is no function, and for a mesh that is no Mesh, such as text."""
    if not callable(program):
        raise EmuError(f"the program is a {type(program).__name__}", "pass a function program(rank)")
    if not isinstance(mesh, Mesh):
        raise EmuError(f"the mesh is a {type(mesh).__name__}", "pass a mesh: emu.Mesh(dp=8)")


def check_program(program: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raises an EmuError for a function that cannot be called with a rank and these arguments."""
    try:
        inspect.signature(program).bind(None, *args)
    except TypeError as error:
        name = getattr(program, "__name__", "program")
        more = f", and {len(args)} further argument{'s' * (len(args) > 1)}" if args else ""
        raise EmuError(
            f"{name} cannot be called with a rank{more}: {error}",
            f"write def {name}(rank{', ...' if args else ''}): every rank calls it with itself",
        ) from None
    except ValueError:  # a builtin, which says nothing about itself
        return
