"""FSDP by hand: eight layers, sharded over four ranks, each gathered before it is used, on devices that hold six."""

from dataclasses import replace

import torch

import emu
from emu.clinic.examined import Case, compared

LAYERS, WIDTH, RANKS = 8, 64, 4
UNIT = WIDTH * WIDTH * 4  # bytes of a whole layer


def small(name):
    """A cluster of chips that have room for six whole layers: all shards take two of these, which leaves four."""
    there = emu.cluster(name)
    return replace(there, name="small", chip=replace(there.chip, hbm_bytes=6 * UNIT))


def shards(rank):
    torch.manual_seed(62)
    mine = [torch.randn(WIDTH, WIDTH).chunk(RANKS)[rank].clone() / 8 for _ in range(LAYERS)]
    for shard in mine:
        rank.account(shard, "parameters")
    return mine


def broken(rank):
    dp, x = rank.group("dp"), torch.ones(1, WIDTH)
    works = [dp.all_gather(shard, async_op=True) for shard in shards(rank)]  # the fault: nothing holds it back
    for work in works:
        x = torch.tanh(x @ work.wait())
    return {"x": x}


def mended(rank):
    dp, x, mine = rank.group("dp"), torch.ones(1, WIDTH), shards(rank)
    following = dp.all_gather(mine[0], async_op=True)
    for i in range(LAYERS):
        whole = following.wait()
        following = dp.all_gather(mine[i + 1], async_op=True) if i + 1 < LAYERS else None
        x = torch.tanh(x @ whole)
    return {"x": x}


def reference():
    torch.manual_seed(62)
    x = torch.ones(1, WIDTH)
    for layer in [torch.randn(WIDTH, WIDTH) / 8 for _ in range(LAYERS)]:
        x = torch.tanh(x @ layer)
    return {"x": x}


def whole(run):
    """The most that gathered layers take at once, beside two layers."""
    held = max(run.memory.series(0)[1]["communication"])
    return compared("whole layers", 2 * UNIT, held, "bytes", "run.memory.series(0)")


CASE = Case(
    number=62,
    kind="prefetching",
    title="Gathering far ahead piles up whole layers",
    report="Whole parameters were gathered far ahead of their use, and kept too long: memory filled up with them.",
    url="https://github.com/pytorch/pytorch/issues/147168",
    mesh=emu.Mesh(dp=RANKS, on=small("h100-8")),
    broken=broken,
    mended=mended,
    reference=reference,
    question=whole,
    precision="fp32",
    tier="float64",
    cure="Gather one layer ahead: two are whole at a time, not eight. With d ahead it is 1 + d, so d is a choice between "
    "memory and waiting.",
)
