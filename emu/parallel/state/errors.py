"""What can go wrong with a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emu.spmd import EmuError


class StateError(EmuError):
    """A checkpoint that cannot be written, or read. Every rank raises the same one. Fields: file (str, may be empty)."""

    file: str

    def __init__(self, message: str, hint: str, file: object = "") -> None:
        super().__init__(message, hint, file=str(file))


def folder_of(path: object) -> Path:
    """The folder that a path names.

    Raises:
        StateError: it is none.
    """
    given: Any = path
    try:
        text = os.fspath(given)
    except TypeError:
        text = path
    if not isinstance(text, str):
        raise StateError(
            f"the path is a {type(path).__name__}, {path!r:.80}", 'name a folder: "runs/checkpoint", or a Path'
        )
    try:
        known = "\0" not in os.fsdecode(os.fsencode(text))
    except ValueError:  # half a character
        known = False
    if not known:
        raise StateError(
            f"the path {text!r:.80} has a character that no path can have",
            'name a folder: "runs/checkpoint", or a Path',
        )
    return Path(text)


def listed(names: Sequence[object], most: int = 6) -> str:
    """Names for a message; of many, the first few."""
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it an error of the system, e.g. a disk that is full, says which file was being written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
