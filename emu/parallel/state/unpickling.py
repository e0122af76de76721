"""The metadata of a torch.distributed.checkpoint, which is a pickle, read without calling anything that it names.

A pickle can call any function. This one may name only what such metadata consists of, and even that is not called: each
class is stood in for by one that just keeps what it is given. Anything else is an error.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from emu.parallel.state.boxes import Box
from emu.parallel.state.errors import StateError

METADATA = ".metadata"


class StoredChunk(NamedTuple):
    """One item of a file: the box of its tensor that it holds (None for an object), and where it lies."""

    box: Box | None
    file: str
    offset: int
    bytes: int


class StoredItem(NamedTuple):
    """A tensor's shape, dtype and chunks; an object has neither shape nor dtype, and one chunk.

    `path` is where it stood in the nested state dict.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: list[StoredChunk]


class _Record:
    """Stands in for a class: keeps what the pickle gives to it."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __new__(cls, *given: Any) -> _Record:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Index(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_FILES, "_StorageInfo"): _Record,
    (_FILES, "_StoragePrefix"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{(m, n): _Record for m in ("pathlib", "pathlib._local") for n in ("Path", "PosixPath", "WindowsPath")},
}


class _Unpickler(pickle._Unpickler):
    """Python's own: the one in C makes room for whatever size a memo or an array claims to have, though nothing follows."""

    dispatch = {code: read for code, read in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise StateError(
            f"it wants to call {module}.{name}, which no such metadata needs",
            "do not load it: somebody may have made it to run something on your machine",
        )


def read_metadata(path: Path) -> dict[str, StoredItem]:
    """What a torch.distributed.checkpoint holds, by flattened name.

    Raises:
        StateError: there is none, it is damaged, or its metadata is a pickle of something else.
    """
    file = path / METADATA
    try:
        # In memory, since reading more than there is then takes no more room than there is.
        return _items(_Unpickler(io.BytesIO(file.read_bytes())).load().state)
    except (FileNotFoundError, NotADirectoryError):
        raise StateError(
            f"{path} is no torch.distributed.checkpoint: it has no {METADATA}",
            "name the folder that dcp.save wrote; a checkpoint of emu's own is read by load",
            file,
        ) from None
    except StateError as error:
        raise StateError(f"{file} is refused: {error.message}", error.hint, file) from None
    except OSError:
        raise
    except Exception as error:  # whatever a pickle that is none can lead to
        raise StateError(
            f"{file} is damaged, or of another format: {error!r:.200}",
            "copy it again from where it is whole, or save it again with this torch",
            file,
        ) from error


def _items(metadata: dict[str, Any]) -> dict[str, StoredItem]:
    places: dict[tuple[str, tuple[int, ...] | None], StoredChunk] = {}
    for index, info in metadata["storage_data"].items():
        name, offset, where = index.state["fqn"], index.state.get("offset"), info.state
        if where.get("transform_descriptors"):
            raise StateError(
                f"{name} was written through {where['transform_descriptors']}, which emu cannot undo",
                "save it without extensions of the writer",
            )
        file = where["relative_path"]
        if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", ".."):
            raise StateError(f"{name} lies in {file!r}, outside of the folder", "do not load it")
        offset = None if offset is None else _numbers(offset)
        places[name, offset] = StoredChunk(None, file, *_numbers((where["offset"], where["length"])))
    paths = metadata.get("planner_data") or {}
    items: dict[str, StoredItem] = {}
    for name, stored in metadata["state_dict_metadata"].items():
        path = tuple(paths.get(name, (name,)))
        if not path or not all(type(part) in (str, int) for part in path):
            raise ValueError(f"{name} stands at {path!r:.80}")
        if isinstance(stored, _Bytes):
            items[name] = StoredItem(path, None, None, [places[name, None]])
            continue
        if not isinstance(stored, _Tensor):
            raise ValueError(f"{name} is neither a tensor nor an object")
        dtype, shape = stored.state["properties"].state[0], _numbers(stored.state["size"])
        found = [Box(_numbers(c.state["offsets"]), _numbers(c.state["sizes"])) for c in stored.state["chunks"]]
        if not isinstance(dtype, torch.dtype) or any(len(b.offsets) != len(shape) != len(b.sizes) for b in found):
            raise ValueError(f"{name} is {dtype} of shape {shape} in {found}")
        chunks = [places[name, box.offsets]._replace(box=box) for box in found if 0 not in box.sizes]
        items[name] = StoredItem(path, shape, dtype, chunks)
    return items


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers!r:.80} are no sizes")
    return numbers
