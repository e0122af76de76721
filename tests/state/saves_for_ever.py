"""Runs that save one state after the other until they are killed, at moments that chance chooses.

python saves_for_ever.py folder rounds

Each round saves to folder/<round>, and prints the last state whose save had returned when it was killed. A state is one
number in every element, and the same number in the extra data.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

import emu
from emu.parallel.state import Piece, save_state

HALF = 15_000


def state(rank: int, value: int) -> dict[str, list[Piece]]:
    return {"parameters": [Piece("w", (2 * HALF,), rank * HALF, torch.full((HALF,), float(value)))]}


def program(rank, path, pipe):
    for value in range(1, 10_000):
        save_state(path, rank, state(rank, value), value)
        if rank == 0:
            os.write(pipe, f"{value}\n".encode())


def one_round(path: str, delay_s: float) -> int:
    from_child, to_parent = os.pipe()
    child = os.fork()  # no need to import torch anew
    if not child:
        emu.launch(program, emu.Mesh(dp=2), backend="virtual", track=False, args=(path, to_parent))
    os.close(to_parent)
    with os.fdopen(from_child) as said:
        last = [int(said.readline()) for _ in range(2)][-1]
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return int([last, *said.read().split()][-1])


if __name__ == "__main__":
    chance = random.Random(0)
    for number in range(int(sys.argv[2])):
        print(one_round(f"{sys.argv[1]}/{number}", chance.random() * 0.1))
