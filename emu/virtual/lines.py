"""Where the user's program stands, for messages and for telling one call from another."""

from __future__ import annotations

import os
import sys

import torch

_EMU = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MACHINERY = tuple(os.path.join(_EMU, room) + os.sep for room in ("spmd", "virtual"))
_INSIDE = (*_MACHINERY, *(os.path.join(_EMU, room) + os.sep for room in ("parallel", "equivalence", "trace")))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


_FILES: dict[tuple[str, tuple[str, ...]], str] = {}  # what to call a file in messages; "" if it is not the user's


def user_line(inside: tuple[str, ...] = _INSIDE) -> str:
    """Where the user's program stands: "file.py:12", the innermost frame that is neither emu's nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        key = (frame.f_code.co_filename, inside)
        name = _FILES.get(key)
        if name is None:
            ours = key[0].startswith((*inside, _TORCH, "<frozen"))
            name = _FILES[key] = "" if ours else os.path.basename(key[0])
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def handling() -> str:
    """What the caller is handling just now, for messages: the cause of a stuck rank may be an exception under way."""
    error = sys.exc_info()[1]
    return f" while handling {type(error).__name__}: {error}"[:200] if error is not None else ""


def call_site() -> str:
    """Where a communication was called, strategies included."""
    return user_line(_MACHINERY)
