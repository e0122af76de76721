"""Sixteen tokens in a zigzag over two ranks (0-3 and 12-15; 4-11), with rotary positions."""

import torch

import emu
from emu.clinic.examined import Case

HOLDS = (torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12))


def data():
    g = torch.Generator().manual_seed(35)
    return [torch.randn(16, 6, generator=g) for _ in "qkv"]


def rotary(x, positions):
    angles = positions[:, None] * 100.0 ** (-torch.arange(3) / 3)
    a, b = x[:, :3], x[:, 3:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], 1)


def attend(q, k, v, queries, keys):
    scores = (q @ k.T / 6**0.5).masked_fill(queries[:, None] < keys, -torch.inf)
    return scores.softmax(-1) @ v


def across(rank, positions):
    """Attention of this rank's queries to everyone's keys, back in the order of the sequence."""
    cp, mine = rank.group("cp"), HOLDS[rank]
    q, k, v = (x[mine] for x in data())
    k, v, keys = cp.all_gather(rotary(k, positions)), cp.all_gather(v), torch.cat(HOLDS)
    out = cp.all_gather(attend(rotary(q, positions), k, v, mine, keys))
    return {"out": out[keys.argsort()]}


def broken(rank):
    return across(rank, torch.arange(8))  # the fault: where tokens stand on this rank, not in the sequence


def mended(rank):
    return across(rank, HOLDS[rank])


def reference():
    (q, k, v), positions = data(), torch.arange(16)
    return {"out": attend(rotary(q, positions), rotary(k, positions), v, positions, positions)}


CASE = Case(
    number=35,
    kind="context parallel",
    title="Rotary positions that are not those of the tokens",
    report="Somebody asked whether rotary tables are cut by the same zigzag as the tokens are. Where they are not, nothing "
    "fails: the numbers are others.",
    url="https://github.com/NVIDIA/Megatron-LM/issues/560",
    mesh=emu.Mesh(cp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Cut positions as the tokens are cut, and turn queries and keys by where they stand in the whole sequence.",
)
