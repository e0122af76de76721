"""One step of a decoder under any strategy, with and without checkpointing."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import emu
from emu.models import Config, Decoder
from emu.parallel import DataParallel, Pipeline, shard_model
from emu.parallel.checkpointing import checkpointed

LAYERS = 6
GPT = Config(layers=LAYERS, width=16, heads=4, ffn=32, vocab=16, seq=8, dropout=0.2, attention_dropout=0.1, fused=False)
LLAMA = Config(
    layers=LAYERS,
    width=16,
    heads=4,
    kv_heads=2,
    ffn=24,
    vocab=16,
    seq=8,
    norm="rms",
    activation="swiglu",
    positions="rotary",
)
MOE = Config(layers=LAYERS, width=16, heads=2, ffn=16, vocab=16, seq=8, dropout=0.1, experts=4, top_k=2, balance=0.01)
POLICIES = ("full", "every:2", "every:4", "repeated:2", "naive", "nested:4,2", "halving")


def data(config: Config, rows: int = 4) -> emu.Batch:
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, config.vocab, (rows, config.seq), generator=g)
    return emu.Batch(x, x.roll(-1, 1), tokens=x.numel())


def step(rank: emu.Rank, config: Config, policy: str | None, sp: bool, how: dict[str, Any], operators: Any = ()):
    """A step of training: loss, gradients, parameters, and torch's random numbers."""
    model = Decoder(config, seed=0)
    axes = [axis for axis in ("dp",) if axis in rank.mesh.axes]
    inside = any(rank.mesh.axes.get(axis, 1) > 1 for axis in ("tp",)) or bool(rank.mesh.folds)
    sharding = shard_model(model, rank, sp=sp) if inside else None
    if policy is not None:
        checkpointed(model, policy, rank, operators=operators)
    torch.manual_seed(7)
    how = dict(how)
    if rank.mesh.axes.get("pp", 1) > 1:
        dist, more = Pipeline(model, rank, *axes, sharding=sharding, **how), {}
    else:
        more = {"microbatches": how.pop("microbatches", 1)}
        dist = DataParallel(model, rank, *axes, sharding=sharding, **how)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.5)
    found = [dist.backward(data(config), **more), *dist.gather_gradients().values()]
    optimizer.step()
    return [*found, *dist.gather_parameters().values(), torch.get_rng_state()]


@cache
def without(config: Config, axes: tuple[tuple[str, int], ...], sp: bool, how: tuple[tuple[str, Any], ...]):
    return launched(config, None, axes, sp, how).results


def launched(config, policy, axes, sp=False, how=(), operators=(), **more) -> emu.Run:
    return emu.launch(step, emu.Mesh(**dict(axes)), args=(config, policy, sp, dict(how), operators), **more)


def same(run: emu.Run, config, axes, sp=False, how=()) -> bool:
    """Whether every rank has, to the last bit, what it has without checkpointing."""
    right = without(config, tuple(axes), sp, tuple(how))
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(run.results, right, strict=True))
