"""Tensors cut anyhow over any number of ranks, and programs that save and load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import emu
from emu.parallel.state import Loaded, Piece, load_state, save_state

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
]
Runs = list[tuple[int, int, list[int]]]  # start, stop, the ranks that hold these elements
Wholes = dict[str, dict[str, Tensor]]  # kind -> name -> tensor

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def wholes(draw: Any) -> Wholes:
    """Some kinds of some tensors, of any dtype; every bit is random."""
    found: Wholes = {}
    for kind in ("parameters", "exp_avg")[: draw(st.integers(1, 2))]:
        found[kind] = {}
        for name in draw(st.lists(st.sampled_from(["w", "b", "a.b", "a/b", "é[0:2]", "x y"]), unique=True, max_size=4)):
            found[kind][name] = random_bits(draw(shapes), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))
    return found


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    bits = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), generator=g, dtype=torch.uint8
    )
    return bits.view(dtype).view(tuple(shape))


@st.composite
def cuts(draw: Any, tensors: Wholes) -> tuple[int, dict[tuple[str, str], Runs]]:
    """A number of ranks, and who of them holds what: every element has a holder, some have several."""
    n = draw(st.integers(1, 5))
    held: dict[tuple[str, str], Runs] = {}
    for kind, of_kind in tensors.items():
        for name, whole in of_kind.items():
            count = whole.numel()
            points = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=4))})
            runs: Runs = []
            for a, b in pairwise(points):
                ranks = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
                runs.append((a, b, ranks))
                if draw(st.booleans()):  # somebody's piece reaches over the cut
                    runs.append((draw(st.integers(0, a)), b, draw(st.lists(st.integers(0, n - 1), max_size=1))))
            held[kind, name] = runs or [(0, 0, [0])]
    return n, held


def pieces(
    rank: int, tensors: Wholes, held: Mapping[tuple[str, str], Runs], fill: Any = None
) -> dict[str, list[Piece]]:
    """A rank's pieces with the tensors' values, or filled with one value; every second one is strided."""
    found: dict[str, list[Piece]] = {}
    for kind, of_kind in tensors.items():
        found[kind] = []
        for name, whole in of_kind.items():
            for a, b, ranks in held[kind, name]:
                if rank in ranks:
                    flat = whole.flatten()[a:b]
                    step = 1 + len(found[kind]) % 2
                    mine = torch.zeros(step * (b - a), dtype=flat.dtype)[::step]
                    mine.copy_(flat) if fill is None else mine.fill_(fill)
                    found[kind].append(Piece(name, tuple(whole.shape), a, mine))
    return found


def everything(tensors: Wholes) -> dict[tuple[str, str], Runs]:
    """The layout of one rank that holds all."""
    return {(kind, name): [(0, t.numel(), [0])] for kind, of_kind in tensors.items() for name, t in of_kind.items()}


def saving(rank: Any, path: Any, tensors: Wholes, held: Any, extra: Any = None) -> None:
    save_state(path, rank, pieces(rank, tensors, held), extra)


def loading(rank: Any, path: Any, tensors: Wholes, held: Any) -> tuple[dict[str, list[Piece]], Loaded]:
    mine = pieces(rank, tensors, held, fill=1)
    loaded = load_state(path, rank, mine)
    return mine, loaded


def save(path: Any, tensors: Wholes, n: int = 1, held: Any = None, extra: Any = None, track: bool = True) -> None:
    args = (path, tensors, held or everything(tensors), extra)
    emu.launch(saving, emu.Mesh(dp=n), args=args, track=track, backend="virtual")


def load(path: Any, tensors: Wholes, n: int = 1, held: Any = None, track: bool = True) -> list[Any]:
    args = (path, tensors, held or everything(tensors))
    return list(emu.launch(loading, emu.Mesh(dp=n), args=args, track=track, backend="virtual").results)


def differences(tensors: Wholes, loaded: dict[str, list[Piece]]) -> list[str]:
    """The pieces in which some bit is not the whole tensor's."""
    return [
        f"{kind}: {piece.name} from {piece.start}"
        for kind, of_kind in loaded.items()
        for piece in of_kind
        if not torch.equal(
            torch.empty(len(piece.tensor), dtype=piece.tensor.dtype).copy_(piece.tensor).view(torch.uint8),
            tensors[kind][piece.name].flatten()[piece.start : piece.start + len(piece.tensor)].view(torch.uint8),
        )
    ]
