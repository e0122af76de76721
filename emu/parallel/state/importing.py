"""In from torch.distributed.checkpoint: what stock `dcp.save` wrote, FSDP2's shards included, into emu's pieces.

Nothing in such a folder is trusted: the metadata is read as in unpickling.py, and tensors by torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emu.parallel.state.boxes import Box, boxes
from emu.parallel.state.consult import consult
from emu.parallel.state.errors import StateError, folder_of, listed
from emu.parallel.state.exporting import Key, dcp_key
from emu.parallel.state.ownership import describe, wholes
from emu.parallel.state.piece import Piece
from emu.parallel.state.safetensors import DTYPES
from emu.parallel.state.unpickling import StoredChunk, StoredItem, read_metadata
from emu.spmd import Rank

Copies = list[tuple[Tensor, Box]]  # a tensor of the shape of the box, to be filled with what the box holds


def import_dcp(
    path: str | os.PathLike[str],
    rank: Rank,
    tensors: Mapping[str, Sequence[Piece]],
    key: Callable[[str, str], Key] = dcp_key,
    convert: bool = False,
) -> Any:
    """Fills this rank's pieces from a torch.distributed.checkpoint of any sharding. Every rank must call it.

    A rank reads only the chunks that it needs part of, one at a time. What the checkpoint holds besides is left there.

    Args:
        path: the folder that `dcp.save` wrote.
        tensors: kind -> this rank's pieces, which are written in place.
        key: kind and name -> where the tensor stands in the nested state dict that was saved.
        convert: whether tensors of another dtype are converted; otherwise they are an error.

    Returns:
        What the state dict had under "extra", None if nothing.

    Raises:
        StateError: on every rank alike; names missing, or of another shape or dtype; a file that is damaged, or a pickle
            that calls something. No tensor has changed, unless a file of tensors is damaged: then some have.
    """
    items: dict[str, StoredItem] = {}
    extra: list[Any] = []

    def look() -> None:
        folder = folder_of(path)
        described = describe(rank.id, tensors)
        items.update(read_metadata(folder))
        _compare(folder, items, wholes([described]), key, convert)

    def fill() -> None:
        folder = folder_of(path)
        rank.synchronize()  # kernels may still be at work where the host is about to write
        for name, (chunk, copies) in _copies(items, tensors, key).items():
            _copy(folder, name, items[name[0]], chunk, copies)
        extra.append(_extra(folder, items))

    consult(rank, look, lambda done: done)
    consult(rank, fill, lambda done: done)
    return extra[0]


def _flat(path: Key) -> str:
    return ".".join(map(str, path))


def _compare(
    folder: Path, items: Mapping[str, StoredItem], wanted: Any, key: Callable[[str, str], Key], convert: bool
) -> None:
    missing, shapes, dtypes, holes = [], [], [], []
    for kind, of_kind in wanted.items():
        for tensor, (shape, dtype_name) in of_kind.items():
            dtype = DTYPES[dtype_name]
            name = _flat(key(kind, tensor))
            item = items.get(name)
            if item is None or item.shape is None:
                missing.append(name)
            elif list(item.shape) != shape:
                shapes.append(f"{name} is {list(item.shape)} there and {shape} here")
            elif item.dtype != dtype:
                dtypes.append(f"{name} is {item.dtype} there and {dtype} here")
            elif sum(torch.Size(c.box.sizes).numel() for c in item.chunks if c.box) != torch.Size(shape).numel():
                holes.append(name)
    if missing:
        raise StateError(
            f"{folder} lacks {listed(sorted(missing))}; it holds {listed(sorted(items))}",
            "make model and optimizer of the kind that was saved; or, if tensors stand elsewhere in the saved state dict, say "
            "where: key=lambda kind, name: (...)",
            folder,
        )
    if shapes:
        raise StateError(
            f"{folder} was saved from another model: {listed(shapes)}",
            "build the model as it was when it was saved",
            folder,
        )
    if holes:
        raise StateError(f"{folder} does not hold all elements of {listed(holes)}", "save it again", folder)
    if dtypes and not convert:
        raise StateError(
            f"{folder} holds other dtypes: {listed(dtypes)}",
            "pass convert=True to have them converted, or load in the precision that was saved",
            folder,
        )


def _copies(
    items: Mapping[str, StoredItem], tensors: Mapping[str, Sequence[Piece]], key: Callable[[str, str], Key]
) -> dict[tuple[str, int], tuple[StoredChunk, Copies]]:
    """For each chunk that this rank needs, in the order of the files, what is to be filled from it."""
    found: dict[tuple[str, int], tuple[StoredChunk, Copies]] = {}
    for kind, pieces in tensors.items():
        for piece in pieces:
            name = _flat(key(kind, piece.name))
            at = 0
            for box in boxes(piece.shape, piece.start, piece.start + len(piece.tensor)):
                count = torch.Size(box.sizes).numel()
                part = piece.tensor.detach()[at : at + count].view(box.sizes)
                at += count
                for number, chunk in enumerate(items[name].chunks):
                    if chunk.box is not None and (common := box.common(chunk.box)) is not None:
                        copies = found.setdefault((name, number), (chunk, []))[1]
                        copies.append((part[common.within(box)], common))
    return dict(sorted(found.items(), key=lambda entry: (entry[1][0].file, entry[1][0].offset)))


def _copy(folder: Path, name: tuple[str, int], item: StoredItem, chunk: StoredChunk, copies: Copies) -> None:
    held = _load(folder, chunk, name[0])
    assert chunk.box is not None
    if not isinstance(held, Tensor) or tuple(held.shape) != chunk.box.sizes or held.dtype != item.dtype:
        raise _damaged(folder / chunk.file, name[0], "it is not the tensor that the metadata says")
    for target, box in copies:
        target.copy_(held[box.within(chunk.box)])


def read_item(folder: Path, item: StoredItem, name: str) -> Any:
    """An object, or a tensor of one number that is there in one chunk; read as _load reads.

    Raises:
        StateError: a damaged file, or a pickle of more than tensors and plain data.
    """
    if item.shape is None or (item.shape == () and item.chunks):
        return _load(folder, item.chunks[0], name)
    raise StateError(f"{name} in {folder} is a tensor of shape {list(item.shape)}", "save one number there", folder)


def _load(folder: Path, chunk: StoredChunk, name: str) -> Any:
    file = folder / chunk.file
    try:
        with open(file, "rb") as stream:
            stream.seek(chunk.offset)
            content = stream.read(chunk.bytes)
    except FileNotFoundError:
        raise StateError(
            f"{file} is missing, which holds {name}: the checkpoint is not whole", "copy all of its files", file
        ) from None
    if len(content) < chunk.bytes:
        raise _damaged(file, name, "the file is truncated")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as records:  # torch.load does not look at checksums
            if (record := records.testzip()) is not None:
                raise _damaged(file, name, f"the checksum of {record} is wrong")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{file} is refused: what it holds for {name} is a pickle of more than tensors and plain data",
            "do not load it: it could run something on your machine",
            file,
        ) from error
    except StateError:
        raise
    except Exception as error:  # whatever the zip or the pickle inside can lead to
        raise _damaged(file, name, f"{error!r:.200}") from error


def _damaged(file: Path, name: str, why: str) -> StateError:
    return StateError(
        f"{file} is damaged where it holds {name}: {why}",
        "copy it again from where it is whole, or load another; set_crc32_options(False) saves without checksums",
        file,
    )


def _extra(folder: Path, items: Mapping[str, StoredItem]) -> Any:
    """What the state dict had under "extra"."""
    root: Any = {}
    for name, item in items.items():
        if item.shape is None and item.path[0] == "extra":
            at = root
            for part in item.path[:-1]:
                at = at.setdefault(part, {})
                if not isinstance(at, dict):
                    raise _damaged(folder, name, "it lies inside of what is no dict")
            at[item.path[-1]] = _load(folder, item.chunks[0], name)
    return _with_lists(root.get("extra"))


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(name, int) for name in value):
        return [_with_lists(value[i]) for i in sorted(value)]
    return {name: _with_lists(inner) for name, inner in value.items()}
