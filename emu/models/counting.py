"""How large a decoder is and how much it computes, in closed form."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from emu.models.choices import Convention

if TYPE_CHECKING:
    from emu.models.config import Config


def n_params(config: Config) -> int:
    """Parameters of Decoder(config); a tied matrix counts once."""
    return config.vocab * config.width * (1 if config.tied else 2) + (
        (config.seq * config.width if config.positions == "learned" else 0)
        + config.layers * block_params(config)
        + _norm_params(config)
    )


def active_params(config: Config) -> int:
    """Those that one token meets: of each block's experts, top_k."""
    if not config.experts:
        return n_params(config)
    idle = (config.experts - config.top_k) * _matrices(config) * config.width * config.ffn
    return n_params(config) - config.layers * idle


def block_params(config: Config) -> int:
    """Parameters of one block, its two norms included."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.width * (2 * q + 2 * kv) + (q + 2 * kv + config.width if config.bias else 0)
    if not config.experts:
        branch = _mlp_params(config, config.ffn)
    else:
        experts = config.experts * _matrices(config) * config.width * config.ffn
        branch = config.experts * config.width + experts + _mlp_params(config, config.shared_ffn)
    return attention + branch + 2 * _norm_params(config)


def _matrices(config: Config) -> int:
    return 3 if config.activation == "swiglu" else 2  # gate, up and down, or up and down


def _mlp_params(config: Config, ffn: int) -> int:
    if not ffn:
        return 0
    biases = (_matrices(config) - 1) * ffn + config.width if config.bias else 0
    return _matrices(config) * config.width * ffn + biases


def _norm_params(config: Config) -> int:
    return config.width * (2 if config.norm == "layer" and config.bias else 1)


def block_flops(config: Config, batch: int, seq: int, attention: Convention) -> int:
    """Forward FLOPs of one block; see Config.flops."""
    if attention not in get_args(Convention):
        raise ValueError(f'attention={attention!r}: count "causal" or "full" pairs of a query and a key.')
    pairs = seq * (seq + 1) // 2 if attention == "causal" else seq * seq
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden = config.top_k * config.ffn + config.shared_ffn if config.experts else config.ffn
    linear = 2 * batch * seq * config.width * (2 * q + 2 * kv + _matrices(config) * hidden + config.experts)
    scores_and_values = 2 * 2 * batch * pairs * q
    return linear + scores_and_values
