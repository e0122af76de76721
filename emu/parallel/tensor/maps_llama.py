"""The sharding map of transformers' LlamaForCausalLM, which is found by its names: transformers is not imported."""

from __future__ import annotations

from typing import Any

from emu.parallel.tensor.cuts import Even, Heads
from emu.parallel.tensor.styles import Column, Loss, Region, Row, ShardingMap, Tokens, Vocab


def llama_map(model: Any) -> ShardingMap:
    """Of a stock LlamaForCausalLM, or a subclass whose modules are the stock ones.

    Where it has a submodule `loss` that takes (logits, labels), logits stay cut along the vocabulary; otherwise every rank
    gets them whole.

    Args:
        model: with the stock class's module names and config.
    """
    config = model.config
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, kv = Heads(*heads, "q"), Heads(*heads, "kv")
    vocabulary = Even(may_be_empty=True)
    found: ShardingMap = {
        # Whole on every rank at first, under sp, too: the model takes positions and mask from the length of what it gets.
        "model.embed_tokens": Vocab(scatter=False),
        "model.layers.0": Tokens(scatter="input"),
        "model.layers.*.input_layernorm": Tokens(),
        "model.layers.*.self_attn": Region(draws=bool(config.attention_dropout)),
        "model.layers.*.self_attn.q_proj": Column(q),
        "model.layers.*.self_attn.[kv]_proj": Column(kv),
        "model.layers.*.self_attn.o_proj": Row(q),
        "model.layers.*.post_attention_layernorm": Tokens(),
        "model.layers.*.mlp": Region(),
        "model.layers.*.mlp.gate_proj": Column(),
        "model.layers.*.mlp.up_proj": Column(),
        "model.layers.*.mlp.down_proj": Row(),
        "model.norm": Tokens(),
        "lm_head": Column(vocabulary),
        "loss": Loss(config.vocab_size),
    }
    if not hasattr(model, "loss"):
        del found["loss"]
        found["lm_head"] = Column(vocabulary, gather=True)
    return found
