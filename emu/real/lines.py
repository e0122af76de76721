"""Where the user's program stands."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

import torch

_EMU = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSIDE = tuple(os.path.join(_EMU, room) + os.sep for room in ("spmd", "real", "parallel", "equivalence", "trace"))
_OTHERS = (*_INSIDE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, "<frozen", contextlib.__file__)


def user_line() -> str:
    """The innermost frame that is neither emu's nor torch's, e.g. "file.py:12"."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OTHERS):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def line_of(error: BaseException) -> str:
    """The user's line at which an error was raised, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_OTHERS):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""
