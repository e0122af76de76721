"""Whether a checkpoint fits what ranks ask for, and which bytes of which file go where."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from emu.parallel.state.errors import StateError, listed
from emu.parallel.state.index import Index
from emu.parallel.state.ownership import Described
from emu.parallel.state.safetensors import DTYPES


class Fill(NamedTuple):
    """Elements [start, stop) of a tensor, of a dtype, from a place in a file into a rank's piece number `index` of a kind."""

    kind: str
    index: int
    start: int
    stop: int
    file: int
    offset: int
    dtype: str


def fills(index: Index, described: Described) -> Iterator[Fill]:
    """Where the elements of a rank's pieces lie."""
    for kind, pieces in described.items():
        for number, (name, _, start, length, _) in enumerate(pieces):
            if (whole := index.tensors[kind].get(name)) is None:
                continue
            width, end = DTYPES[whole.dtype].itemsize, start + length
            first = bisect_right(whole.ranges, start, key=lambda r: r.start) - 1
            for at in range(max(first, 0), len(whole.ranges)):
                if (held := whole.ranges[at]).start >= end:
                    break
                a, b = max(start, held.start), min(end, held.stop)
                if a < b:
                    yield Fill(kind, number, a, b, held.file, held.offset + (a - held.start) * width, whole.dtype)


def compare(
    folder: Path, index: Index, wanted: Mapping[str, Any], convert: bool, partial: bool, zeros: Collection[str]
) -> None:
    """Raises a StateError unless the checkpoint holds just what is asked for. See `load_state`."""
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
        if (missing := sorted(of_kind.keys() - stored.keys())) and kind not in zeros:
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
