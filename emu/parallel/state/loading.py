"""Loading: rank 0 finds out where everybody's elements lie, and every rank reads its own, whoever wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from emu.parallel.state.blocks import Bytes, Request, Stored, check_file, read_blocks
from emu.parallel.state.consult import consult
from emu.parallel.state.errors import StateError, folder_of
from emu.parallel.state.fitting import Fill, compare, fills
from emu.parallel.state.index import Index, read_index
from emu.parallel.state.memory import memory_of
from emu.parallel.state.ownership import Described, describe, wholes
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
    zeros: Collection[str] = (),
    accept: Callable[[Any], None] = lambda extra: None,
) -> Loaded:
    """Fills this rank's pieces from a checkpoint, whatever layout and number of ranks it was saved with. Every rank must call it.

    Files are read in blocks, each checked; beside the state it takes one block of memory.

    Args:
        path: the folder it was saved to.
        tensors: kind -> this rank's pieces, which are written in place. A kind that no rank names is left in the file; of
            a kind that is named, all ranks together must name every tensor.
        convert: whether tensors of another dtype are converted; otherwise they are an error.
        partial: whether the checkpoint may hold kinds that no rank names.
        zeros: kinds of which it may lack some tensors: those become zero. (An optimizer has no state yet of a parameter
            that was never used.)
        accept: called on rank 0 with the extra data before any tensor changes; may refuse it with a StateError.

    Raises:
        StateError: on every rank alike. No tensor has changed, unless the data inside a file is damaged: then some have.
    """

    def part() -> Described:
        folder_of(path)
        return describe(rank.id, tensors)

    def plan(described: list[Described]) -> list[Any]:
        folder = folder_of(path)
        index = read_index(folder)
        compare(folder, index, wholes(described), convert, partial, zeros)
        accept(index.extra)
        for number in range(len(index.files)):
            check_file(index.stored(folder, number))
        return [_plan(folder, index, rank, wanted) for rank, wanted in enumerate(described)]

    def fill() -> None:
        rank.synchronize()  # the host is about to write where kernels may still be at work
        files = {int(number): Stored(Path(path), *rest) for number, (path, *rest) in mine["files"].items()}
        for kind, number in mine["zeros"]:
            tensors[kind][number].tensor.detach().zero_()
        read_blocks([_request(files, tensors, Fill(*f)) for f in mine["fills"]])
        state.append(_rng(files, mine["rng"], rank.id))

    mine = consult(rank, part, plan)
    state: list[Rng | None] = []
    consult(rank, fill, lambda done: done)
    return Loaded(mine["extra"], state[0], mine["mesh"])


def _plan(folder: Path, index: Index, rank: int, wanted: Described) -> dict[str, Any]:
    """What a rank has to know of the checkpoint."""
    mine, saved = list(fills(index, wanted)), len(index.files)
    place = index.files[rank % saved]["rng"]
    rng = None if place is None else [rank % saved, *place, rank >= saved]
    files = {f.file for f in mine} | ({rank % saved} if rng else set())
    stored = {number: index.stored(folder, number) for number in sorted(files)}
    return {
        "files": {number: [str(path), *rest] for number, (path, *rest) in stored.items()},
        "fills": mine,
        "zeros": [
            (kind, i) for kind, ps in wanted.items() for i, p in enumerate(ps) if p[0] not in index.tensors[kind]
        ],
        "rng": rng,
        "extra": index.extra,
        "mesh": index.mesh,
    }


def _request(files: Mapping[int, Stored], tensors: Mapping[str, Sequence[Piece]], fill: Fill) -> Request:
    """What to read of a file; and how it gets into its tensor, or the memory where it is to lie just so."""
    piece, dtype = tensors[fill.kind][fill.index], DTYPES[fill.dtype]
    width, first = dtype.itemsize, fill.start - piece.start
    length = fill.stop - fill.start
    memory = memory_of(piece.tensor) if piece.tensor.dtype == dtype else None
    if memory is not None:
        memory = memory[first * width : (first + length) * width]
        return Request(files[fill.file], fill.offset, len(memory), _copier(memory), memory)
    target = piece.tensor.detach()[first : first + length]

    def put(part: Bytes, at: int) -> None:
        values = torch.from_numpy(part).view(dtype)
        at //= width
        target[at : at + len(values)].copy_(values)

    return Request(files[fill.file], fill.offset, length * width, put)


def _copier(memory: Bytes) -> Callable[[Bytes, int], None]:
    def put(part: Bytes, at: int) -> None:
        memory[at : at + len(part)] = part

    return put


def _rng(files: Mapping[int, Stored], place: Sequence[Any] | None, rank: int) -> Rng | None:
    """The saved state of the rank's generators, or one derived from another's."""
    if place is None:
        return None
    number, offset, length, is_new = place
    text = bytearray()
    read_blocks([Request(files[number], offset, length, lambda part, at: text.extend(part.tobytes()))])
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        file = files[number].path
        raise StateError(f"{file} holds no state of random generators", "load another checkpoint", file) from error
    return derived(state, rank) if is_new else state
