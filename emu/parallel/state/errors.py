"""What can go wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emu.spmd import EmuError


class StateError(EmuError):
    """A checkpoint that cannot be written, or read. Every rank raises the same one. Fields: file (str, may be empty)."""

    file: str

    def __init__(self, message: str, hint: str, file: object = "") -> None:
        super().__init__(message, hint, file=str(file))


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
