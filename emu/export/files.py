"""Writing what was exported: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from emu.spmd import EmuError


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file beside its place first, so that it is there whole or as it was.

    Raises:
        EmuError: a place where no file can be.
    """
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".emu-") as folder:
            written = Path(folder) / "content"
            written.write_bytes(content)
            os.replace(written, target)
    except OSError as error:
        raise EmuError(
            f"{target} cannot be written: {error.strerror or error}", "name a file in a folder that exists"
        ) from error


def write_folder(path: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Makes a new folder of files; it gets its name once all of them are there.

    Raises:
        EmuError: something is there already, or a place where no folder can be.
    """
    target = Path(path)
    if target.exists():
        raise EmuError(f"{target} is there already", "name a folder that does not exist yet, or remove it")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".emu-") as folder:
            made = Path(folder) / "made"
            made.mkdir()
            for name, content in contents.items():
                (made / name).write_bytes(content)
            os.rename(made, target)
    except OSError as error:
        hint = "name a new folder, in a folder that exists"
        raise EmuError(f"{target} cannot be written: {error.strerror or error}", hint) from error
