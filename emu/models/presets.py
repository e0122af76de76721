"""Shapes by name: small ones to run, published ones to simulate."""

from __future__ import annotations

import difflib
from dataclasses import replace

from emu.models.config import Config

# Ours: large enough to learn English spelling, small enough for eight of them on a laptop.
_GPT_TINY = Config(layers=4, width=64, heads=4, ffn=256, vocab=256, seq=64)
_LLAMA_TINY = Config(
    layers=4, width=64, heads=4, kv_heads=2, ffn=192, vocab=256, seq=64, positions="rotary", norm="rms",
    activation="swiglu", bias=False,
)  # fmt: skip

_MOE_TINY = replace(_LLAMA_TINY, ffn=64, experts=8, top_k=2, renormalize=True, balance=0.01)

# GPT-2's smallest. https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
# table 2; heads as in https://github.com/openai/gpt-2, src/model.py and its hparams.json.
_GPT_SMALL = Config(layers=12, width=768, heads=12, vocab=50257, seq=1024, tied=True)

# https://arxiv.org/abs/2005.14165 table 2.1. Its alternating sparse attention is not modelled: all layers are dense.
_GPT3_175B = Config(layers=96, width=12288, heads=96, head_dim=128, vocab=50257, seq=2048, tied=True)

# https://arxiv.org/abs/2407.21783 table 3 (layers, width, ffn, heads, 8 KV heads, 128,000 tokens and 256 special
# ones, RoPE base 500,000); sequences of 8,192 in the first stage of pre-training (section 3.4.1).
_LLAMA3_8B = Config(
    layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192, positions="rotary", norm="rms",
    activation="swiglu", bias=False, rope_base=500_000.0,
)  # fmt: skip
_LLAMA3_70B = replace(_LLAMA3_8B, layers=80, width=8192, heads=64, ffn=28672)
_LLAMA3_405B = replace(_LLAMA3_8B, layers=126, width=16384, heads=128, ffn=53248)

# https://arxiv.org/abs/2401.04088 table 1, softmax over the chosen experts (section 2.1); RoPE base and norm_eps as in
# https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json. Its balance loss is not published there.
_MIXTRAL_8X7B = Config(
    layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=32768, positions="rotary", norm="rms",
    activation="swiglu", bias=False, rope_base=1_000_000.0, experts=8, top_k=2, router="topk-softmax",
)  # fmt: skip

# Smaller experts, and more of them. https://huggingface.co/databricks/dbrx-base/blob/main/config.json; norms without
# bias and weights renormalised as in https://github.com/huggingface/transformers, models/dbrx. That it cuts queries,
# keys and values off at 8 is not modelled.
_DBRX = Config(
    layers=40, width=6144, heads=48, kv_heads=8, ffn=10752, vocab=100352, seq=32768, positions="rotary", norm="layer",
    activation="swiglu", bias=False, rope_base=500_000.0, experts=16, top_k=4, renormalize=True,
)  # fmt: skip

PRESETS: dict[str, Config] = {
    "gpt-tiny": _GPT_TINY,
    "llama-tiny": _LLAMA_TINY,
    "moe-tiny": _MOE_TINY,
    "gpt-small": _GPT_SMALL,
    "gpt3-175b": _GPT3_175B,
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": _LLAMA3_70B,
    "llama3-405b": _LLAMA3_405B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "dbrx": _DBRX,
}


class UnknownModelError(ValueError):
    """No published shape has this name.

    Args:
        name: what was asked for.
        known: the names there are.
    """

    def __init__(self, name: str, known: tuple[str, ...]):
        near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.4)
        meant = f'Did you mean "{near[0]}"? ' if near else ""
        self.name = name
        self.known = known
        self.hint = f"{meant}Known models: {', '.join(known)}. Or build your own with emu.models.Config(...)."
        super().__init__(f"there is no model named {name!r}. {self.hint}")


def config(name: str, **changes) -> Config:
    """The shape of a named model.

    Args:
        name: a key of PRESETS, e.g. "gpt-tiny".
        changes: fields of Config to replace, e.g. layers=2.

    Raises:
        UnknownModelError: with the nearest name.
        ConfigError: the changes make no possible model.
    """
    if name not in PRESETS:
        raise UnknownModelError(name, tuple(PRESETS))
    return replace(PRESETS[name], **changes)
