"""Saves and loads on real processes: torchrun on_processes.py PROGRAM folder."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

import emu
from emu.parallel.state import Loaded, Piece, StateError, load_state, restore_rng, save_state, saving

COUNT = 100_003


def whole(name: str) -> Tensor:
    return torch.arange(COUNT, dtype=torch.float32) * (2 if name == "w" else 3)


def pieces(rank) -> dict[str, list[Piece]]:
    """w is cut over the ranks, every rank has all of b."""
    cut = [COUNT * i // rank.world_size for i in range(rank.world_size + 1)]
    mine = slice(cut[rank], cut[rank + 1])
    return {"parameters": [Piece("w", (COUNT,), mine.start, whole("w")[mine]), Piece("b", (COUNT,), 0, whole("b"))]}


def save(rank, path) -> list[float]:
    torch.manual_seed(100 + rank)
    torch.rand(3)
    save_state(path, rank, pieces(rank), {"ranks": rank.world_size})
    return torch.rand(4).tolist()


def load(rank, path) -> tuple[bool, Loaded]:
    mine = pieces(rank)["parameters"]
    empty = [piece._replace(tensor=torch.zeros_like(piece.tensor)) for piece in mine]
    loaded = load_state(path, rank, {"parameters": empty})
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, empty)), loaded


def loaded(rank, path) -> list[object]:
    same, state = load(rank, path)
    restore_rng(state.rng)
    return [same, state.extra["ranks"], torch.rand(4).tolist()]


def damaged(rank, path) -> str:
    try:
        load(rank, path)
    except StateError as error:
        return str(error)
    return ""


def fails(rank, path) -> str:
    if rank == 1:
        saving._write = _no_room
    try:
        save(rank, path)
    except StateError as error:
        return str(error)
    return ""


def _no_room(*args: object) -> None:
    raise OSError(28, "No space left on device", "rank 1's file")


def resumed(rank, path) -> list[list[float]]:
    """Two steps on from a training that was saved, at ZeRO 3."""
    from training import resumes

    parameters = resumes(rank, {"zero": 3}, "AdamW", 2, path)[1]
    return [p.flatten().tolist() for p in parameters.values()]


def stopped(rank, path) -> None:
    """Two steps at ZeRO 2, and a save."""
    from training import saves

    saves(rank, {"zero": 2}, "AdamW", 2, path)


PROGRAMS = {f.__name__: f for f in (save, loaded, damaged, fails, resumed, stopped)}

if __name__ == "__main__":
    program = PROGRAMS[sys.argv[1]]
    run = emu.launch(program, emu.Mesh(dp=int(os.environ["WORLD_SIZE"])), args=(sys.argv[2],))
    results = run.gather_results()
    if int(os.environ["RANK"]) == 0:
        print("RESULTS", repr(results))
