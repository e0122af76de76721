"""One weight with rows [Q | K | V], cut over two ranks by heads, and put together again to be saved."""

import torch

import emu
from emu.clinic.examined import Case

ROWS = (12, 6, 6)  # of Q, K, V: 4 query heads, 2 key and value heads, of 3


def fused():
    return torch.arange(24 * 5.0).view(24, 5)


def shard(rank):
    """A rank's rows [q | k | v]: its part of each part."""
    return torch.cat([part.chunk(2)[rank] for part in fused().split(ROWS)])


def broken(rank):
    return {"qkv": rank.group("tp").all_gather(shard(rank))}  # the fault: q0 k0 v0 q1 k1 v1 is not Q K V


def mended(rank):
    own = shard(rank).split([n // 2 for n in ROWS])
    return {"qkv": torch.cat([rank.group("tp").all_gather(part) for part in own])}


def reference():
    return {"qkv": fused()}


CASE = Case(
    number=22,
    kind="fused layers",
    title="Shards of a fused QKV weight are saved end to end",
    report="Gathering each rank's fused rows by concatenation gave q0 k0 v0 q1 k1 v1, which another number of ranks reads "
    "as Q, K and V.",
    url="https://github.com/ndif-team/nnsight/pull/719",
    mesh=emu.Mesh(tp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Gather part by part: all ranks' q, then all k, then all v. A checkpoint then has the rows in the order of one "
    "device, and can be cut for any number of ranks. Fused gate and up are a case of the same.",
)
