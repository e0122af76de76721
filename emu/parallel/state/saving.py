"""Saving: every rank writes its share to a file of its own, and rank 0 makes them a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from emu.parallel.state import folders
from emu.parallel.state.blocks import BlockWriter
from emu.parallel.state.consult import consult
from emu.parallel.state.errors import StateError, folder_of, naming
from emu.parallel.state.index import Index, Range, Whole, file_name, sealed
from emu.parallel.state.memory import bytes_of
from emu.parallel.state.ownership import Described, Share, describe, shares, wholes
from emu.parallel.state.piece import Piece
from emu.parallel.state.rng import rng_state
from emu.parallel.state.safetensors import NAMES, Entry, head
from emu.spmd import Rank

_RNG = "random generators"  # the entry of a rank's file


def save_state(
    path: str | os.PathLike[str],
    rank: Rank,
    tensors: Mapping[str, Sequence[Piece]],
    extra: Any = None,
    rng: bool = True,
) -> None:
    """Writes a checkpoint, whole or not at all. Every rank must call it.

    What several ranks hold is written once, by the lowest of them. A checkpoint that is already there stays loadable until
    the new one is whole, whenever the run is killed.

    Args:
        path: a folder; made if it is not there. All ranks see the same one.
        tensors: kind, e.g. "parameters" or "exp_avg", -> this rank's pieces of the tensors of that kind.
        extra: JSON-able data to keep along; rank 0's counts.
        rng: whether to keep every rank's random generators.

    Raises:
        StateError: on every rank alike; what was at the path is still there.
    """
    held: list[Described] = []  # by every rank; known to rank 0
    given: list[list[Share]] = []

    def part() -> Described:
        folder_of(path)
        return describe(rank.id, tensors)

    def plan(described: list[Described]) -> list[Any]:
        held.extend(described)
        given.extend(shares(described))
        check_extra(extra)
        save = folders.begin(folder_of(path))
        return [[save, share] for share in given]

    def write() -> Any:
        return _write(folder_of(path) / save / file_name(rank.id), tensors, [Share(*s) for s in mine], state)

    def commit(written: list[Any]) -> list[None]:
        index = Index(save, _mesh(rank), extra, [w["file"] for w in written], _contents(held, given, written))
        folders.commit(folder_of(path), save, sealed(index))
        return [None] * len(written)

    rank.synchronize()  # kernels may still be at work on what the host is about to read
    state = rng_state(rank) if rng else None
    save, mine = consult(rank, part, plan)
    try:
        consult(rank, write, commit)
    except BaseException:
        if rank.id == 0:
            folders.abandon(folder_of(path), save)
        raise


def _write(path: Path, tensors: Mapping[str, Sequence[Piece]], share: Sequence[Share], state: Any) -> Any:
    """Writes one rank's file; returns its length and checksums, and where in it each entry lies."""
    text = np.frombuffer(json.dumps(state).encode(), np.uint8) if state is not None else None
    order = sorted(range(len(share)), key=lambda i: -_piece(tensors, share[i]).tensor.element_size())
    entries = [_entry(tensors, share[i]) for i in order]
    if text is not None:
        entries.append(Entry(_RNG, "U8", [len(text)]))
    offsets = [0] * len(share)
    with naming(path), open(path, "xb") as file:
        blocks = BlockWriter(file)
        blocks.write(np.frombuffer(head(entries, {"format": "pt", "by": "emu"}), np.uint8))
        for i in order:
            offsets[i] = blocks.written_bytes
            piece = _piece(tensors, share[i])
            for part in bytes_of(piece.tensor, share[i].start - piece.start, share[i].stop - piece.start):
                blocks.write(part)
        at = blocks.written_bytes
        if text is not None:
            blocks.write(text)
        blocks.finish()
        folders.to_disk(file)
    rng = None if text is None else [at, len(text)]
    return {"file": {"bytes": blocks.written_bytes, "sums": blocks.sums, "rng": rng}, "offsets": offsets}


def _piece(tensors: Mapping[str, Sequence[Piece]], share: Share) -> Piece:
    return tensors[share.kind][share.index]


def _entry(tensors: Mapping[str, Sequence[Piece]], share: Share) -> Entry:
    """Whole tensors keep name and shape, so that others can use the file; a part says which it is."""
    piece = _piece(tensors, share)
    dtype, count = NAMES[piece.tensor.dtype], prod(piece.shape)
    if (share.start, share.stop) == (0, count):
        return Entry(f"{share.kind}/{piece.name}", dtype, piece.shape)
    return Entry(f"{share.kind}[{share.start}:{share.stop}]/{piece.name}", dtype, [share.stop - share.start])


def _contents(
    held: Sequence[Described], given: Sequence[Sequence[Share]], written: Sequence[Any]
) -> dict[str, dict[str, Whole]]:
    """The index of all tensors, from what every rank holds, was to write, and wrote where."""
    found = {
        kind: {name: Whole(tuple(shape), dtype, []) for name, (shape, dtype) in of_kind.items()}
        for kind, of_kind in wholes(held).items()
    }
    for number, (pieces, share, file) in enumerate(zip(held, given, written)):
        for (kind, index, start, stop), offset in zip(share, file["offsets"]):
            found[kind][pieces[kind][index][0]].ranges.append(Range(start, stop, number, offset))
    for of_kind in found.values():
        for whole in of_kind.values():
            whole.ranges.sort()
    return found


def _mesh(rank: Rank) -> dict[str, Any]:
    return {"axes": dict(rank.mesh.axes), "folds": {a: n for a, n in rank.mesh.folds.items() if a != "edp"}}


def check_extra(extra: Any) -> None:
    """Raises a StateError unless the data would come back from JSON as it is."""
    try:
        if json.loads(json.dumps(extra)) == extra:
            return
        what = "it would come back as something else (a tuple as a list, a key that is a number as text; NaN equals nothing)"
    except (TypeError, ValueError, RecursionError) as error:
        what = str(error)
    raise StateError(
        f"extra cannot be saved: {what}",
        "pass numbers, text, None, lists and dicts with text keys; tensors go as pieces",
    )
