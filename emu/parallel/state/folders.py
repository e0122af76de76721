"""How a checkpoint is replaced: never in place, and by one rename.

A checkpoint is a folder:

    path/emu-state.json              the index
    path/save-000007/rank-00000.safetensors ...

No system renames a folder over one that is not empty, and between two renames there would be a moment without a
checkpoint. So a save writes into a new sub-folder, with its index, brings all of it to the disk, and then renames the
index over the old one: one file, one step. A run killed before it leaves the old index with its old files; killed after
it, the new ones. What lies in sub-folders that the index does not name is left over, and the next save removes it.
Two runs must not save into one folder at the same time.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from emu.parallel.state.errors import StateError
from emu.parallel.state.index import INDEX, SAVE, read_index


def begin(path: Path) -> str:
    """Makes the sub-folder for a new save, and returns its name.

    Raises:
        StateError: the path is a file, or a folder of something else.
    """
    if path.exists() and not path.is_dir():
        raise StateError(f"{path} is a file, and a checkpoint is a folder", "name a folder", path)
    path.mkdir(parents=True, exist_ok=True)
    names = [entry.name for entry in path.iterdir()]
    if INDEX not in names and any(not SAVE.fullmatch(name) for name in names):
        raise StateError(
            f"{path} holds something else than a checkpoint", "name a folder that is new, empty or a checkpoint", path
        )
    taken = [int(match[1]) for match in map(SAVE.fullmatch, names) if match]
    save = f"save-{max(taken, default=0) + 1:06d}"
    (path / save).mkdir()
    return save


def commit(path: Path, save: str, index: str) -> None:
    """Makes a save, all of whose files are on the disk, the checkpoint at the path."""
    written = path / save / INDEX
    with open(written, "w") as file:
        file.write(index)
        to_disk(file)
    folder_to_disk(path / save)
    folder_to_disk(path)  # the sub-folder's name
    os.replace(written, path / INDEX)
    folder_to_disk(path)
    with suppress(OSError):  # the checkpoint is there; what cannot be removed now, the next save tries again
        for entry in path.iterdir():
            if SAVE.fullmatch(entry.name) and entry.name != save:
                shutil.rmtree(entry, ignore_errors=True)


def abandon(path: Path, save: str) -> None:
    """Removes a save that came to nothing, unless it has become the checkpoint meanwhile."""
    with suppress(StateError):
        if read_index(path).save == save:
            return
    shutil.rmtree(path / save, ignore_errors=True)


def to_disk(file: IO[Any]) -> None:
    """Returns when what was written to the file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def folder_to_disk(path: Path) -> None:
    """The same for the names in a folder, where the system knows such a thing."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
