"""Inside the layer: tensor, sequence and expert parallelism of plain models, by a map of module names."""

from emu.parallel.tensor.apply import shard_model
from emu.parallel.tensor.cuts import Even, Heads, Parts, fused_gate_up, fused_qkv
from emu.parallel.tensor.held import Held, Sharding
from emu.parallel.tensor.maps import decoder_map, map_of
from emu.parallel.tensor.randomness import own_randomness, share_generators
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
    Whole,
)

__all__ = [
    "Balance",
    "Capacity",
    "Column",
    "Dropout",
    "Even",
    "Experts",
    "Heads",
    "Held",
    "Loss",
    "Moe",
    "Parts",
    "Region",
    "Router",
    "Row",
    "Sharding",
    "ShardingMap",
    "Tokens",
    "Vocab",
    "Whole",
    "decoder_map",
    "fused_gate_up",
    "fused_qkv",
    "map_of",
    "own_randomness",
    "shard_model",
    "share_generators",
]
