"""Sharding maps of models that emu knows: where Megatron-LM cuts a transformer (arXiv 1909.08053, 2205.05198)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from emu.parallel.tensor.cuts import Even, Heads
from emu.parallel.tensor.styles import (
    Balance,
    Capacity,
    Column,
    Dropout,
    Experts,
    Loss,
    Moe,
    Region,
    Router,
    Row,
    ShardingMap,
    Tokens,
    Vocab,
)
from emu.spmd import PlanError


def map_of(model: nn.Module) -> ShardingMap:
    """The sharding map of a model: its own attribute `sharding_map`, or that of a model that emu knows by its names.

    Raises:
        PlanError: a model without a map that emu does not know.
    """
    own = getattr(model, "sharding_map", None)
    if own is not None:
        return own
    kinds = [kind.__name__ for kind in type(model).__mro__]
    if {"LlamaForCausalLM", "MistralForCausalLM"} & {*kinds}:  # whose modules have the same names
        from emu.parallel.tensor.maps_llama import llama_map

        return llama_map(model)
    if "Decoder" in kinds and hasattr(model, "blocks") and hasattr(getattr(model, "config", None), "kv_heads"):
        return decoder_map(model)
    raise PlanError(
        f"there is no sharding map for {type(model).__name__}",
        'write one: {"blocks.*.mlp": Region(), "blocks.*.mlp.up": Column(), "blocks.*.mlp.down": Row()}, and pass it to '
        "emu.parallel.shard_model(model, rank, sharding_map), or make it the model's attribute `sharding_map`",
        field="sharding_map",
    )


def decoder_map(model: Any) -> ShardingMap:
    """Of emu.models' Decoder, whatever its config."""
    config = model.config
    q, kv = (Heads(config.heads, config.kv_heads, config.head_dim, role) for role in ("q", "kv"))
    names = {name for name, _ in model.named_modules()}
    found: ShardingMap = {
        "embedding": Vocab(),
        "positions": Tokens(scatter="index"),
        "blocks.*.norm?": Tokens(),
        "blocks.*.attention": Region(),
        "blocks.*.attention.q": Column(q),
        "blocks.*.attention.[kv]": Column(kv),
        "blocks.*.attention.o": Row(q),
        "blocks.*.attention.core.dropout": Dropout(own=True),  # of weights of this rank's heads
        "blocks.*.mlp": Region(),
        "blocks.*.mlp.gate": Column(),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
        "blocks.*.moe": Moe(),
        "blocks.*.moe.router": Router(),
        "blocks.*.moe.experts": Experts(),
        "blocks.*.moe.balance": Balance(),
        "blocks.*.moe.capacity": Capacity(),
        "blocks.*.moe.shared": Region(),
        "blocks.*.moe.shared.gate": Column(),
        "blocks.*.moe.shared.up": Column(),
        "blocks.*.moe.shared.down": Row(),
        "norm": Tokens(),
        "head": Column(Even(may_be_empty=True)),
        "loss": Loss(config.vocab),
    }
    return {pattern: style for pattern, style in found.items() if any(fnmatchcase(name, pattern) for name in names)}
