"""Wrong programs, one after another; each rank writes down what it was told, and how long that took."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from emu.real.launch import launch_real
from emu.spmd import EmuError, Mesh

first = int(os.environ["RANK"]) == 0


def other_kind(rank):
    x, world = torch.ones(4), rank.group()
    world.all_reduce(x)
    return world.all_reduce(x) if first else world.broadcast(x)


def other_shape(rank):
    rank.group().all_reduce(torch.ones(4 if first else 5))


def other_dtype(rank):
    rank.group().all_gather(torch.ones(4, dtype=torch.float32 if first else torch.float64))


def other_op(rank):
    rank.group().all_reduce(torch.ones(4), "sum" if first else "max")


def other_root(rank):
    rank.group().broadcast(torch.ones(4), root=rank.id)


def other_sizes(rank):
    rank.group().reduce_scatter(torch.ones(4), sizes=[1, 3] if first else [2, 2])


def other_order(rank):
    a, b = ("a", "b") if first else ("b", "a")
    rank.group().all_reduce(torch.ones(4), name=a, async_op=True)
    rank.group().all_reduce(torch.ones(4), name=b)


def other_splits(rank):
    rank.group().all_to_all(torch.ones(4), [1, 3], [1, 2 if first else 3])


def other_message(rank):
    world = rank.group()
    return world.send(torch.ones(4), 1) if first else world.recv(torch.ones(3), 0)


def leaves(rank):
    if first:
        rank.group().all_reduce(torch.ones(4))


def leaves_a_message(rank):
    return rank.group().recv(torch.ones(3), 1) if first else None


def both_send(rank):
    rank.group().send(torch.ones(4), 1 - rank.id)


def two_orders(rank):
    """Synchronous collectives of two groups in opposite order."""
    a, b = rank.group("dp"), rank.group(members=[1, 0])
    for group in (a, b) if first else (b, a):
        group.all_reduce(torch.ones(4))


def other_members(rank):
    rank.group(members=[0, 1] if first else [1, 0]).barrier()


def fails(rank):
    if not first:
        raise KeyError("no such token")
    rank.group().all_reduce(torch.ones(4))


def fails_late(rank):
    if not first:
        time.sleep(1)
        raise KeyError("no such token")


def slow(rank):
    """Not wrong: the other rank only computes for longer than a moment."""
    if not first:
        time.sleep(1.5)
    return rank.group().all_reduce(torch.ones(4))


def too_many_ranks(rank):
    raise AssertionError("never runs")


PROGRAMS = (other_kind, other_shape, other_dtype, other_op, other_root, other_sizes, other_order, other_splits,
            other_message, leaves, leaves_a_message, both_send, two_orders, other_members, fails, fails_late, slow,
            too_many_ranks)  # fmt: skip
told = {}
for program in PROGRAMS:
    start = time.monotonic()
    try:
        launch_real(program, Mesh(dp=3 if program is too_many_ranks else 2), timeout_s=40)
        kind, text, hint = "", "", ""
    except (EmuError, KeyError) as error:
        kind, text, hint = type(error).__name__, str(error), getattr(error, "hint", "")
    told[program.__name__] = {"kind": kind, "text": text, "hint": hint, "seconds": time.monotonic() - start}
with open(f"{sys.argv[1]}/told{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file, indent=1)
