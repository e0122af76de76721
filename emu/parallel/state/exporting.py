"""Out to torch.distributed.checkpoint: a folder that stock `dcp.load` reads, into tensors of any sharding.

Every rank writes the boxes that its share consists of to one file, each as torch.save writes it; rank 0 writes the
metadata. See https://pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from emu.parallel.state.boxes import Box, boxes, stacked
from emu.parallel.state.consult import consult
from emu.parallel.state.errors import StateError, folder_of, naming
from emu.parallel.state.folders import folder_to_disk, to_disk
from emu.parallel.state.ownership import Described, Share, describe, shares, wholes
from emu.parallel.state.piece import Piece
from emu.parallel.state.safetensors import DTYPES
from emu.parallel.state.saving import check_extra
from emu.parallel.state.unpickling import METADATA
from emu.spmd import Rank

Key = tuple[str | int, ...]
PARAMETERS, BUFFERS = "parameters", "buffers"  # kinds of tensors that are the model's


def dcp_key(kind: str, name: str) -> Key:
    """Where a tensor stands in the state dict {"model": ..., "optim": ...} that torch's get_state_dict makes.

    Parameters and buffers are ("model", name); a state of the optimizer is ("optim", "state", name, kind).
    """
    return ("model", name) if kind in (PARAMETERS, BUFFERS) else ("optim", "state", name, kind)


def export_dcp(
    path: str | os.PathLike[str],
    rank: Rank,
    tensors: Mapping[str, Sequence[Piece]],
    extra: Any = None,
    key: Callable[[str, str], Key] = dcp_key,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Writes a checkpoint that stock torch reads: `dcp.load({"model": ..., "optim": ..., "extra": ...}, checkpoint_id=path)`.

    It appears at the path whole or not at all. Every rank must call it.

    Args:
        path: a folder that does not exist yet, or is empty.
        tensors: kind -> this rank's pieces, as for `save_state`.
        extra: JSON-able data, which stands under "extra"; rank 0's counts.
        key: kind and name -> where the tensor stands in the nested state dict.
        groups: an optimizer's parameter groups, which stand under ("optim", "param_groups"); rank 0's count.

    Raises:
        StateError: on every rank alike.
    """
    held: list[Described] = []
    given: list[list[Share]] = []

    def part() -> Described:
        folder_of(path)
        return describe(rank.id, tensors)

    def plan(described: list[Described]) -> list[Any]:
        held.extend(described)
        given.extend(shares(described))
        check_extra(extra)
        folder = _folder(folder_of(path))
        return [[str(folder), share] for share in given]

    def write() -> Any:
        return _write(Path(folder) / _file(rank.id), tensors, [Share(*s) for s in mine])

    def commit(written: list[Any]) -> list[None]:
        beside = [] if extra is None else _flattened(("extra",), extra)
        beside += _flattened(("optim", "param_groups"), list(groups)) if groups else []
        _finish(Path(folder), held, given, written, beside, key)
        target = folder_of(path)
        os.replace(folder, target)  # over an empty folder, or none
        folder_to_disk(target.parent)
        return [None] * len(written)

    rank.synchronize()  # kernels may still be at work on what the host is about to read
    folder, mine = consult(rank, part, plan)
    try:
        consult(rank, write, commit)
    except BaseException:
        if rank.id == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _folder(target: Path) -> Path:
    """A new folder beside the target; those that killed runs left are removed."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StateError(f"{target} is there already", "export to a new folder, or remove it first", target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.emu-"
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
    made.chmod(0o777 & ~_umask())
    return made


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


class Boxed(NamedTuple):
    """A box of a tensor that a rank writes, from the runs of its pieces (index, start, stop), one after the other."""

    kind: str
    name: str
    box: Box
    runs: list[tuple[int, int, int]]


def _boxed(pieces: Mapping[str, Sequence[tuple[str, Sequence[int]]]], share: Sequence[Share]) -> list[Boxed]:
    """A rank's share as boxes, as few as may be.

    Args:
        pieces: kind -> name and shape of every piece.
    """
    out: list[Boxed] = []
    for (kind, name), some in groupby(share, lambda s: (s.kind, pieces[s.kind][s.index][0])):
        found: list[Box] = []
        runs: list[tuple[int, int, int]] = []
        for _, index, start, stop in some:
            for box in boxes(pieces[kind][index][1], start, stop):
                end = start + torch.Size(box.sizes).numel()
                found.append(box)
                runs.append((index, start, end))
                start = end
        at = 0
        for box, count in stacked(found):
            out.append(Boxed(kind, name, box, runs[at : at + count]))
            at += count
    return out


def _write(path: Path, tensors: Mapping[str, Sequence[Piece]], share: Sequence[Share]) -> list[Any]:
    """Writes a rank's boxes; returns where each of them lies: [offset, length]."""
    places: list[Any] = []
    shapes = {kind: [(piece.name, piece.shape) for piece in pieces] for kind, pieces in tensors.items()}
    with naming(path), open(path, "wb") as file:
        for kind, _, box, runs in _boxed(shapes, share):
            held = [tensors[kind][index] for index, _, _ in runs]
            # A tensor of its own: torch.save would write all that a view is a view of.
            own = torch.empty(torch.Size(box.sizes).numel(), dtype=held[0].tensor.dtype, device="cpu")
            at = 0
            for piece, (_, start, stop) in zip(held, runs):
                own[at : at + stop - start].copy_(piece.tensor.detach()[start - piece.start : stop - piece.start])
                at += stop - start
            before = file.tell()
            torch.save(own.view(box.sizes), file)
            places.append([before, file.tell() - before])
        to_disk(file)
    return places


def _finish(
    folder: Path,
    held: Sequence[Described],
    given: Sequence[Sequence[Share]],
    written: Sequence[Any],
    beside: Sequence[tuple[Key, Any]],
    key: Callable[[str, str], Key],
) -> None:
    """Writes what stands beside the pieces, and the metadata."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    paths: dict[str, Key] = {}
    contents: dict[str, Any] = {}
    storage: dict[Any, Any] = {}

    def name_of(path: Key) -> str:
        name = ".".join(map(str, path))
        if paths.setdefault(name, path) != path or name in contents:
            raise StateError(
                f"two tensors would be called {name}", "let key give each kind and name a place of its own"
            )
        return name

    flat: dict[tuple[str, str], str] = {}
    for kind, of_kind in wholes(held).items():
        for tensor, (shape, dtype) in of_kind.items():
            flat[kind, tensor] = name = name_of(tuple(key(kind, tensor)))
            properties = dcp.TensorProperties(dtype=DTYPES[dtype])
            contents[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
    for rank, (described, share, places) in enumerate(zip(held, given, written)):
        shapes = {kind: [(name, shape) for name, shape, *_ in pieces] for kind, pieces in described.items()}
        for (kind, tensor, box, _), (offset, length) in zip(_boxed(shapes, share), places):
            name = flat[kind, tensor]
            chunk = dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            contents[name].chunks.append(chunk)
            place = dcp.MetadataIndex(name, box.offsets, len(contents[name].chunks) - 1)
            storage[place] = filesystem._StorageInfo(_file(rank), offset, length)
    with open(folder / "__extra.distcp", "wb") as file:
        for path, value in beside:
            name, before = name_of(path), file.tell()
            if isinstance(value, torch.Tensor):  # of one number
                one = dcp.ChunkStorageMetadata(torch.Size(()), torch.Size(()))
                properties = dcp.TensorProperties(dtype=value.dtype)
                contents[name] = dcp.TensorStorageMetadata(properties, torch.Size(()), [one])
                place = dcp.MetadataIndex(name, torch.Size(()), 0)
            else:
                contents[name], place = dcp.BytesStorageMetadata(), dcp.MetadataIndex(name)
            torch.save(value, file)
            storage[place] = filesystem._StorageInfo("__extra.distcp", before, file.tell() - before)
        to_disk(file)
    metadata = dcp.Metadata(contents, paths, storage, dcp.StorageMeta())
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    with open(folder / METADATA, "wb") as file:
        pickle.dump(metadata, file)
        to_disk(file)
    folder_to_disk(folder)


def _flattened(path: Key, value: Any) -> list[tuple[Key, Any]]:
    """As dcp flattens a state dict: through dicts, and through lists that hold a dict somewhere."""
    if isinstance(value, Mapping) and value:
        return [entry for name, inner in value.items() for entry in _flattened((*path, name), inner)]
    if isinstance(value, list) and _holds_dict(value):
        return [entry for i, inner in enumerate(value) for entry in _flattened((*path, i), inner)]
    return [(path, value)]


def _holds_dict(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_holds_dict, value)))
