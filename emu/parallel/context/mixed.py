"""Heads exchanged among neighbours, a ring across their groups: attention on two levels.

Fang, Zhao 2024 (USP), https://arxiv.org/abs/2405.07719: an all-to-all loads the nearest links, where neighbours lie, and a
ring, which compute hides, the far ones; and the number of heads limits the neighbours only. With all ranks neighbours there
is no ring, and it is Ulysses.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from emu.parallel.context import ring
from emu.parallel.context.place import Gradients, Kept, Place
from emu.parallel.context.ulysses import Heads, heads_of, to_heads, to_tokens
from emu.spmd import Group


def forward(here: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
    """Attention of this rank's queries to all keys: see ring.forward. What is kept has this rank's heads of all neighbours."""
    near, sizes = _neighbours(here)
    shares = heads_of(q.shape[1], k.shape[1], near.size)
    q, k, v = to_heads([q, k, v], [shares.queries, shares.keys, shares.keys], near, sizes, "tokens for heads")
    out, kept = ring.forward(_across(here, near, shares), q, k, v)
    return to_tokens([out], [shares.queries], near, sizes, "heads for tokens")[0], kept


def backward(here: Place, grad: Tensor, kept: Kept, kv_heads: int) -> Gradients:
    """The gradients of this rank's queries, and of its keys and values through all queries: see ring.backward.

    Args:
        kv_heads: how many key and value heads there are; this rank may have kept some only.
    """
    near, sizes = _neighbours(here)
    shares = heads_of(grad.shape[1], kv_heads, near.size)
    (whole,) = to_heads([grad], [shares.queries], near, sizes, "tokens for heads")
    dq, *rest = ring.backward(_across(here, near, shares), whole, kept)
    back = [dq.to(grad.dtype), *(rest if shares.shared else (x.to(grad.dtype) for x in rest))]
    dq, dk, dv = to_tokens(back, [shares.queries, shares.keys, shares.keys], near, sizes, "heads for tokens")
    return Gradients(dq, dk, dv)


def _neighbours(here: Place) -> tuple[Group, list[int]]:
    """The ranks that exchange heads with this one, and how many tokens each of them holds."""
    cut, group = here.cut, here.group
    start = group.rank - group.rank % cut.ulysses
    some = slice(start, start + cut.ulysses)
    if cut.ulysses == group.size:
        return group, cut.sizes
    return here.rank.group(members=group.members[some], label=f"{group.label}.heads"), cut.sizes[some]


def _across(here: Place, near: Group, shares: Heads) -> Place:
    """The ring of the ranks that have the same place among their neighbours, and so the same heads."""
    members = here.group.members[near.rank :: here.cut.ulysses]
    group = here.rank.group(members=members, label=f"{here.group.label}.ring")
    return replace(here, cut=here.cut.ring, group=group, readers=shares.readers(near.rank))
