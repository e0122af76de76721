"""Random numbers under tensor parallelism: the same where activations are replicated, different where they are sharded.

The rule:

* the ranks of a tensor-parallel group share the state of torch's global generator. What they draw from it is the same, so a
  dropout mask on an activation that each of them has whole is one mask (different masks would make replicas drift apart);
* data ranks, stages, and whatever else differs along another axis of the mesh have other states: their coordinates along
  all other axes are mixed into the seed;
* where an activation is sharded (within a region, and under sequence parallelism everywhere) ranks draw from a generator
  of their own, seeded from one number of the shared one mixed with their index: masks of different heads or tokens are
  independent. Every rank of the group takes that number, also one whose shard is empty, so the shared state stays shared;
* nothing is kept but the generators' states, so checkpointing, which puts them back to recompute, draws the same masks.

Megatron-LM keeps two generators and switches between them (arXiv 1909.08053, appendix B). Here the second one is derived
from the first whenever it is used, so there is one state to save. Python's and numpy's generators stay as they are.

On the CPU, torch's generator takes 32 bits of a seed: of two masks that should differ, 1 in 4e9 do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from emu.spmd import EmuError, Group, Rank

_BITS = 2**64 - 1


def mixed(*numbers: int) -> int:
    """A 64-bit hash of whole numbers: one bit more or less in any of them changes half of all its bits.

    Each is absorbed by the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014). A sum would not do: seed 1 on rank 2 would be seed 2 on rank 1.
    """
    hashed = 0
    for number in numbers:
        z = ((hashed ^ number) + 0x9E3779B97F4A7C15) & _BITS
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        hashed = z ^ (z >> 31)
    return hashed


def share_generators(rank: Rank, group: Group) -> None:
    """Gives the ranks of a group one state of torch's global generators, and others than all other groups.

    One seed is drawn on the group's first rank, so torch.manual_seed before it decides all. The generator of the CPU is
    seeded, and that of the rank's device. Call it again after states were loaded that ranks saved on another mesh.

    Args:
        rank: this rank.
        group: whose ranks hold replicas of activations: rank.group("tp").
    """
    drawn = _draw() if group.rank == 0 else 0
    seed = torch.full((1,), drawn, dtype=torch.int64, device=rank.device)
    group.broadcast(seed, name="random seed")
    number = 0
    if not seed.is_meta:  # a shape run draws nothing
        with torch._C._DisableTorchDispatch():
            number = int(seed)
    inside = [rank.mesh.coords(member) for member in group.members]
    others = [i for axis, i in rank.coords.items() if all(coords[axis] == i for coords in inside)]
    seed_here = mixed(number, *others)
    torch.default_generator.manual_seed(seed_here)
    if rank.device.type == "cuda":
        with torch.cuda.device(rank.device):
            torch.cuda.manual_seed(seed_here)


@contextmanager
def own_randomness(group: Group) -> Iterator[None]:
    """Within it, what this rank draws is independent of what the other ranks of the group draw. A group of one is plain torch.

    All ranks of the group must enter it equally often. It is no part of the record, and waits for no device: its one
    number comes from the CPU's generator.

    Args:
        group: whose ranks have shards: rank.group("tp").
    """
    if group.size == 1:
        yield
        return
    seed = mixed(_draw(), group.rank)
    generators = _generators()
    with torch._C._DisableTorchDispatch():
        shared = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
    try:
        yield
    finally:
        with torch._C._DisableTorchDispatch():
            for generator, state in zip(generators, shared):
                generator.set_state(state)


class ShardedDraws:
    """Beside a module's own class: while it trains, its forward draws within own_randomness."""

    own_group: Group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        module: Any = self
        if not module.training or getattr(self, "p", None) == 0:  # draws nothing
            return plain.forward(*args, **kwargs)
        with own_randomness(self.own_group):
            return plain.forward(*args, **kwargs)


def become_sharded_dropout(module: nn.Module, group: Group) -> None:
    """Makes a module that draws in its forward, such as nn.Dropout, one that draws for this rank's shard, in place.

    Args:
        module: keeps its class's behaviour, as a subclass of it.
        group: whose ranks have shards of its input.

    Raises:
        EmuError: no module.
    """
    if not isinstance(module, nn.Module):
        raise EmuError(f"a {type(module).__name__} is no module that draws", "pass an nn.Dropout, or another module")
    made: Any = module
    if not isinstance(module, ShardedDraws):
        made.__class__ = _sharded(type(module))
    made.own_group = group


@cache
def _sharded(plain: type[nn.Module]) -> type[nn.Module]:
    return type(f"Sharded{plain.__name__}", (ShardedDraws, plain), {"__module__": plain.__module__})


def _draw() -> int:
    """One number of the CPU's global generator, unseen by whoever records what the rank does."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _generators() -> list[torch.Generator]:
    """Those that ops of this rank draw from: the CPU's, and the current GPU's once there is one in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
    return [torch.default_generator]
