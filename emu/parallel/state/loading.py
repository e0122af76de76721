"""Loading: every rank reads the elements it holds, whoever wrote them."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from emu.parallel.state.blocks import Bytes, Request, check_file, read_blocks
from emu.parallel.state.consult import consult
from emu.parallel.state.errors import StateError, listed
from emu.parallel.state.index import Index, read_index
from emu.parallel.state.ownership import describe, wholes
from emu.parallel.state.piece import Piece
from emu.parallel.state.rng import Rng, derived
from emu.parallel.state.safetensors import DTYPES
from emu.spmd import Rank


class Loaded(NamedTuple):
    """What a checkpoint holds beside tensors.

    Fields:
        extra: the plain data that was saved along.
        rng: the generators' state for this rank, for `restore_rng`; None where none was saved. Rank r of more ranks than
            were saved gets a seed derived from r and the state of rank r modulo the saved number.
        mesh: the axes and folds of the mesh that saved it.
    """

    extra: Any
    rng: Rng | None
    mesh: Mapping[str, Any]


def load_state(
    path: str | os.PathLike[str],
    rank: Rank,
    tensors: Mapping[str, Sequence[Piece]],
    convert: bool = False,
    partial: bool = True,
) -> Loaded:
    """Fills this rank's pieces from a checkpoint, whatever layout and number of ranks it was saved with. Every rank must call it.

    Files are read in blocks, each checked; beside the state it takes one block of memory.

    Args:
        path: the folder it was saved to.
        tensors: kind -> this rank's pieces, which are written in place. A kind that no rank names is left in the file; of
            a kind that is named, all ranks together must name every tensor.
        convert: whether tensors of another dtype are converted; otherwise they are an error.
        partial: whether the checkpoint may hold kinds that no rank names.

    Raises:
        StateError: on every rank alike. No tensor has changed, unless the data inside a file is damaged: then some have.
    """
    folder = Path(path)

    def look() -> Any:
        mine, seal = read_index(folder)
        opened.append(mine)
        return [seal, describe(rank.id, tensors)]

    def compare(found: list[Any]) -> list[None]:
        if any(seal != found[0][0] for seal, _ in found):
            raise StateError(
                f"{folder} changed while it was being loaded, or ranks see different folders",
                "let nobody save to it meanwhile, and give all ranks the same folder",
                folder,
            )
        _compare(folder, opened[0], wholes([wanted for _, wanted in found]), convert, partial)
        for number in range(len(opened[0].files)):
            check_file(opened[0].stored(folder, number))
        return [None] * len(found)

    def fill() -> None:
        rank.synchronize()  # the host is about to write where kernels may still be at work
        read_blocks(_requests(folder, opened[0], tensors))
        state.append(_rng(folder, opened[0], rank.id))

    opened: list[Index] = []
    state: list[Rng | None] = []
    consult(rank, look, compare)
    consult(rank, fill, lambda done: done)
    return Loaded(opened[0].extra, state[0], opened[0].mesh)


def _compare(folder: Path, index: Index, wanted: Mapping[str, Any], convert: bool, partial: bool) -> None:
    """Raises a StateError unless the checkpoint holds just what is asked for."""
    if not partial and (left := sorted(kind for kind, of in index.tensors.items() if of and kind not in wanted)):
        raise StateError(
            f"{folder} holds {listed(left)} too, which nobody asks for",
            "make the optimizer of the kind and with the options that it was saved with",
            folder,
        )
    for kind, of_kind in wanted.items():
        stored = index.tensors.get(kind)
        if stored is None:
            raise StateError(
                f"{folder} has no {kind}: it holds {listed(sorted(index.tensors)) or 'no tensors'}",
                "load only what was saved, or save it too",
                folder,
            )
        wrong: list[str] = []
        if missing := sorted(of_kind.keys() - stored.keys()):
            wrong.append(f"it lacks {listed(missing)}")
        if surplus := sorted(stored.keys() - of_kind.keys()):
            wrong.append(f"nobody asks for its {listed(surplus)}")
        both = sorted(of_kind.keys() & stored.keys())
        if shapes := [
            f"{name} is {list(stored[name].shape)} there and {of_kind[name][0]} here"
            for name in both
            if list(stored[name].shape) != of_kind[name][0]
        ]:
            wrong.append(listed(shapes))
        if wrong:
            raise StateError(
                f"{folder} was saved from another model: of {kind}, {'; '.join(wrong)}",
                "build the model and the optimizer as they were when it was saved",
                folder,
            )
        types = [f"{name} is {stored[name].dtype} there and {of_kind[name][1]} here" for name in both]
        types = [text for name, text in zip(both, types) if stored[name].dtype != of_kind[name][1]]
        if types and not convert:
            raise StateError(
                f"{folder} holds other dtypes: of {kind}, {listed(types)}",
                "pass convert=True to have them converted, or load in the precision that was saved",
                folder,
            )


def _requests(folder: Path, index: Index, tensors: Mapping[str, Sequence[Piece]]) -> Iterator[Request]:
    files = [index.stored(folder, number) for number in range(len(index.files))]
    for kind, pieces in tensors.items():
        for piece in pieces:
            whole = index.tensors[kind][piece.name]
            dtype = DTYPES[whole.dtype]
            width, end = dtype.itemsize, piece.start + len(piece.tensor)
            first = bisect_right(whole.ranges, piece.start, key=lambda r: r.start) - 1
            for held in whole.ranges[max(first, 0) :]:
                if held.start >= end:
                    break
                start, stop = max(piece.start, held.start), min(end, held.stop)
                if start < stop:
                    offset = held.offset + (start - held.start) * width
                    target = piece.tensor.detach()[start - piece.start : stop - piece.start]
                    yield Request(files[held.file], offset, (stop - start) * width, *_into(target, dtype))


def _into(target: torch.Tensor, dtype: torch.dtype) -> tuple[Callable[[Bytes, int], None], Bytes | None]:
    """How bytes of a dtype get into a tensor; and its memory, if they are to lie there just so."""
    if target.device.type == "cpu" and target.dtype == dtype and target.stride(0) == 1:
        memory = target.view(torch.uint8).numpy()
        return lambda part, at: memory.__setitem__(slice(at, at + len(part)), part), memory

    def put(part: Bytes, at: int) -> None:
        values = torch.from_numpy(part).view(dtype)
        at //= dtype.itemsize
        target[at : at + len(values)].copy_(values)

    return put, None


def _rng(folder: Path, index: Index, rank: int) -> Rng | None:
    """The saved state of the rank's generators, or one derived from it."""
    number = rank % len(index.files)
    place = index.files[number]["rng"]
    if place is None:
        return None
    text = bytearray()
    offset, length = place
    read_blocks([Request(index.stored(folder, number), offset, length, lambda part, at: text.extend(part.tobytes()))])
    try:
        state = json.loads(text)
    except ValueError as error:
        file = index.stored(folder, number).path
        raise StateError(f"{file} holds no state of random generators", "load another checkpoint", file) from error
    return state if rank < len(index.files) else derived(state, rank)
