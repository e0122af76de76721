"""Who writes what. An element that several ranks hold is written once, by the lowest of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from emu.parallel.state.errors import StateError, listed
from emu.parallel.state.piece import Piece
from emu.parallel.state.safetensors import NAMES

Described = dict[str, list[list[Any]]]  # kind -> [name, shape, start, length, dtype] of every piece


class Share(NamedTuple):
    """Elements [start, stop) of a tensor, which one rank has to write: they lie in its piece number `index` of a kind."""

    kind: str
    index: int
    start: int
    stop: int


def describe(rank: int, tensors: Mapping[str, Sequence[Piece]]) -> Described:
    """This rank's pieces without their values.

    Raises:
        StateError: a piece that is none; names it.
    """
    found: Described = {}
    for kind, pieces in tensors.items():
        if not isinstance(kind, str) or not kind or set(kind) & set("/[]"):
            raise StateError(f"{kind!r} is no kind of tensors", 'call kinds by plain words: "parameters", "exp_avg"')
        found[kind] = [_described(rank, kind, piece) for piece in pieces]
    return found


def _described(rank: int, kind: str, piece: Piece) -> list[Any]:
    where = f"rank {rank}, {kind}"
    if not isinstance(piece, Piece) or not isinstance(piece.tensor, torch.Tensor):
        raise StateError(f"{where}: {piece!r:.80} is no piece", "pass Piece(name, shape, start, tensor)")
    name, shape, start, tensor = piece.name, [int(n) for n in piece.shape], int(piece.start), piece.tensor
    if tensor.is_meta:
        raise StateError(
            f"{where}: {name!r} has a shape and no values, so there is nothing to save or load",
            'run the program with backend="virtual"',
        )
    if tensor.dim() != 1 or start < 0 or start + len(tensor) > prod(shape):
        raise StateError(
            f"{where}: {name!r} of shape {shape} has {prod(shape)} elements; the piece starts at {start} and has shape "
            f"{list(tensor.shape)}",
            "give the elements [start, start + len) of the flattened tensor, one-dimensional and without padding",
        )
    if tensor.dtype not in NAMES:
        raise StateError(
            f"{where}: {name!r} is {tensor.dtype}, which safetensors does not hold",
            f"convert it to one of {', '.join(str(d).removeprefix('torch.') for d in NAMES)}",
        )
    return [str(name), shape, start, len(tensor), NAMES[tensor.dtype]]


def wholes(described: Sequence[Described]) -> dict[str, dict[str, tuple[list[int], str]]]:
    """The tensors that all ranks' pieces are of: kind -> name -> (shape, dtype).

    Raises:
        StateError: ranks differ in the shape or dtype of a tensor.
    """
    found: dict[str, dict[str, tuple[list[int], str]]] = {}
    for rank, kinds in enumerate(described):
        for kind, pieces in kinds.items():
            of_kind = found.setdefault(kind, {})
            for name, shape, _, _, dtype in pieces:
                first = of_kind.setdefault(name, (shape, dtype))
                if first != (shape, dtype):
                    raise StateError(
                        f"{kind}: {name!r} is {dtype}{shape} on rank {rank}, and {first[1]}{first[0]} on a lower one",
                        "let all ranks agree on the whole tensor's shape and dtype",
                    )
    return found


def shares(described: Sequence[Described]) -> list[list[Share]]:
    """What each rank writes, so that every element is written once.

    Raises:
        StateError: elements that no rank holds.
    """
    written: dict[tuple[str, str], list[tuple[int, int]]] = {}  # sorted, disjoint runs
    given: list[list[Share]] = []
    for kinds in described:
        mine: list[Share] = []
        for kind, pieces in kinds.items():
            by_name: dict[str, list[tuple[int, int, int]]] = {}
            for index, (name, _, start, length, _) in enumerate(pieces):
                by_name.setdefault(name, []).append((start, start + length, index))
            for name, runs in by_name.items():
                done, runs = written.get((kind, name), []), sorted(runs)
                mine += [Share(kind, index, a, b) for a, b, index in _uncovered(done, runs)]
                written[kind, name] = _joined([*done, *((start, stop) for start, stop, _ in runs)])
        given.append(mine)
    whole = wholes(described)
    lost = [f"{kind}: {name}" for (kind, name), done in written.items() if not _all(done, prod(whole[kind][name][0]))]
    if lost:
        raise StateError(
            f"no rank holds some elements of {listed(lost)}: the checkpoint would have holes",
            "let every rank name all pieces it holds, and all ranks together the whole tensor",
        )
    return given


def _uncovered(done: Sequence[tuple[int, int]], runs: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """What of the runs (start, stop, anything) lies in none of those that are done, each element once; both are sorted."""
    at = number = 0  # all before `at` is done, or given out here
    for start, stop, of in runs:
        at = max(at, start)
        while at < stop:
            while number < len(done) and done[number][1] <= at:
                number += 1
            if number == len(done) or stop <= done[number][0]:
                yield at, stop, of
                at = stop
            else:
                if at < done[number][0]:
                    yield at, done[number][0], of
                at = done[number][1]


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for a, b in sorted(runs):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        elif a < b:
            joined.append((a, b))
    return joined


def _all(done: list[tuple[int, int]], count: int) -> bool:
    return done == [(0, count)] if count else not done
