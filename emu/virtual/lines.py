"""Where the user's program stands, for messages and for telling one call from another."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from types import FrameType

import torch

_EMU = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MACHINERY = tuple(os.path.join(_EMU, room) + os.sep for room in ("spmd", "virtual", "stepping"))
_INSIDE = (*_MACHINERY, *(os.path.join(_EMU, room) + os.sep for room in ("parallel", "equivalence", "trace")))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = ("<frozen", threading.__file__, contextlib.__file__)  # `with dist.gathered():` enters through contextlib


_FILES: dict[tuple[str, ...], dict[str, str]] = {}  # what to call a file in messages; "" if it is not the user's


def user_frame(inside: tuple[str, ...] = _INSIDE, above: int = 1, start: FrameType | None = None) -> FrameType | None:
    """The innermost frame that is neither emu's nor torch's; None when no program runs on this thread.

    Args:
        inside: where emu's own code is.
        above: how many frames, from this function's on, need not be looked at.
        start: where to begin, instead of here.
    """
    frame = start if start is not None else sys._getframe(above)
    files = _FILES.get(inside)
    if files is None:
        files = _FILES.setdefault(inside, {})
    while frame is not None:
        path = frame.f_code.co_filename
        name = files.get(path)
        if name is None:
            ours = path.startswith((*inside, _TORCH, *_PYTHON))
            name = files[path] = "" if ours else os.path.basename(path)
        if name:
            return frame
        frame = frame.f_back
    return None


def user_line(inside: tuple[str, ...] = _INSIDE, above: int = 1) -> str:
    """Where the user's program stands: "file.py:12"."""
    frame = user_frame(inside, above + 1)
    return "unknown" if frame is None else f"{_FILES[inside][frame.f_code.co_filename]}:{frame.f_lineno}"


def path_of(name: str) -> str:
    """The file that messages call by a name; "" where it is none of the user's, or several have it."""
    paths = {path for files in _FILES.values() for path, called in list(files.items()) if called == name}
    return paths.pop() if len(paths) == 1 else ""


def code_at(line: str) -> str:
    """What stands at a line of the user's program that messages call "file.py:12"; "" where it cannot be read."""
    name, _, number = line.rpartition(":")
    path = path_of(name)
    return linecache.getline(path, int(number)).strip() if path and number.isdigit() else ""


def is_emus(path: str) -> bool:
    """Whether a file is emu's own machinery, and not a user's program."""
    return path.startswith(_INSIDE)


def handling() -> str:
    """What the caller is handling just now, for messages: the cause of a stuck rank may be an exception under way."""
    error = sys.exc_info()[1]
    return f" while handling {type(error).__name__}: {error}"[:200] if error is not None else ""


def call_site() -> str:
    """Where a communication was called, strategies included."""
    return user_line(_MACHINERY)
