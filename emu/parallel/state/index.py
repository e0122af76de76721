"""The index of a checkpoint: which file holds which elements of which tensor. Without it there is no checkpoint.

It is JSON under a hash of itself, so an index that was cut off or changed is told at once. It names no paths, only the
folder of the save and the files' numbers, so a checkpoint can be moved, and no index leads a reader elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from operator import index as whole_number
from pathlib import Path
from typing import Any, NamedTuple

from emu.parallel.state import blocks
from emu.parallel.state.blocks import Stored
from emu.parallel.state.errors import StateError
from emu.parallel.state.safetensors import DTYPES

INDEX = "emu-state.json"
FORMAT = "emu state 1"  # changes with the size of blocks, too
SAVE = re.compile(r"save-(\d{6,})")


class Range(NamedTuple):
    """Elements [start, stop) of a tensor: the number of the file that holds them, and where in it."""

    start: int
    stop: int
    file: int
    offset: int


class Whole(NamedTuple):
    """A stored tensor: its shape, the name of its dtype in safetensors, and its ranges in order."""

    shape: tuple[int, ...]
    dtype: str
    ranges: list[Range]


class Index(NamedTuple):
    """What a checkpoint holds.

    Fields:
        save: the name of the folder of its files.
        mesh: the axes and folds of the mesh that saved it.
        extra: plain data that was saved along.
        files: length and blocks' checksums of every rank's file, and where in it its generators' state lies.
        tensors: kind -> name -> Whole.
    """

    save: str
    mesh: Mapping[str, Any]
    extra: Any
    files: list[dict[str, Any]]
    tensors: dict[str, dict[str, Whole]]

    def stored(self, folder: Path, number: int) -> Stored:
        """A rank's file."""
        file = self.files[number]
        return Stored(folder / self.save / file_name(number), file["bytes"], file["sums"])


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def sealed(index: Index) -> str:
    """The index as the text of its file."""
    body = {"format": FORMAT, **index._asdict()}
    return json.dumps({"sha256": _digest(body), "index": body}, separators=(",", ":"))


def read_index(path: Path) -> Index:
    """The index of the checkpoint in a folder.

    Raises:
        StateError: there is none, it is damaged, or it is not emu's.
    """
    file = path / INDEX
    again = "save it again, or load another checkpoint"
    try:
        sealed = json.loads(file.read_bytes())
        body = sealed["index"]
        if sealed["sha256"] != _digest(body):
            raise StateError(f"{file} is damaged: it is not what was written", again, file)
        if body["format"] != FORMAT:
            raise StateError(
                f"{file} has the format {body['format']!r}, and this emu reads {FORMAT!r}", "use a newer emu", file
            )
        return _parsed(body)
    except (FileNotFoundError, NotADirectoryError):
        raise _none(path, file) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{file} is damaged, or not a checkpoint's index: {error!r}", again, file) from error


def _none(path: Path, file: Path) -> StateError:
    if not path.is_dir():
        return StateError(f"{path} is no checkpoint: it is {'a file' if path.exists() else 'not there'}", _SEE, file)
    if any(SAVE.fullmatch(entry.name) for entry in path.iterdir()):
        return StateError(
            f"{path} holds no whole checkpoint: {INDEX} is missing",
            "its first save did not end, or the index was not copied; load another checkpoint",
            file,
        )
    return StateError(f"{path} is no checkpoint: it has no {INDEX}", _SEE, file)


_SEE = "name the folder that the checkpoint was saved to"


def _parsed(body: Any) -> Index:
    """The index as typed data, checked as far as it can be without the files: it may be anybody's.

    Raises:
        ValueError, KeyError, TypeError: it makes no sense.
    """
    tensors = {
        kind: {
            name: Whole(tuple(map(whole_number, shape)), dtype, [Range(*map(whole_number, r)) for r in ranges])
            for name, (shape, dtype, ranges) in of_kind.items()
        }
        for kind, of_kind in body["tensors"].items()
    }
    files = body["files"]
    if not SAVE.fullmatch(body["save"]) or not files:
        raise ValueError(f"save {body['save']!r} of {len(files)} files")
    for file in files:
        start, length = file["rng"] or (0, 0)
        if (
            len(file["sums"]) != -(-file["bytes"] // blocks.BLOCK_BYTES)
            or not 0 <= start <= start + length <= file["bytes"]
        ):
            raise ValueError(f"a file of {file['bytes']} bytes and {len(file['sums'])} checksums")
    for of_kind in tensors.values():
        for name, whole in of_kind.items():
            _check(name, whole, [file["bytes"] for file in files])
    return Index(body["save"], body["mesh"], body["extra"], files, tensors)


def _check(name: str, whole: Whole, lengths: Sequence[int]) -> None:
    """The ranges of a tensor follow on each other from its first element to its last, and lie inside of their files."""
    width, at = DTYPES[whole.dtype].itemsize, 0
    for start, stop, file, offset in whole.ranges:
        inside = 0 <= file < len(lengths) and 0 <= offset <= lengths[file] - (stop - start) * width
        if start != at or stop <= start or not inside or offset % width:
            raise ValueError(f"elements {start} to {stop} of {name}")
        at = stop
    if at != prod(whole.shape):
        raise ValueError(f"{at} elements of {name}")


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
