"""A program: a function of a rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from emu.spmd.errors import EmuError


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
