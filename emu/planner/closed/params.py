"""How many parameters a decoder has, in closed form: by layer, by kind, and on one rank."""

from __future__ import annotations

from typing import NamedTuple

from .workload import Workload

# DeepSeek-V3's attention: ranks of its low-rank queries and keys and values, parts of a head
# (https://arxiv.org/abs/2412.19437, section 4.2).
MLA_QUERY_RANK, MLA_KV_RANK, MLA_NOPE, MLA_ROPE, MLA_VALUE = 1536, 512, 128, 64, 128


class LayerParams(NamedTuple):
    """Parameters of one layer.

    shared: those that every rank of data parallelism has (attention, norms, an MLP); cut over tp.
    experts: those of all experts; cut over ep and etp.
    """

    shared: float
    experts: float


def attention_params(w: Workload) -> int:
    """Matrices of attention."""
    h, a = w.hidden, w.heads
    if w.moe is not None and w.moe.mla:
        down = h * (MLA_QUERY_RANK + MLA_KV_RANK + MLA_ROPE)
        queries = MLA_QUERY_RANK * a * (MLA_NOPE + MLA_ROPE)
        return down + queries + MLA_KV_RANK * a * (MLA_NOPE + MLA_VALUE) + a * MLA_VALUE * h
    return h * w.head_dim * (2 * a + 2 * w.kv_heads)


def layer_params(w: Workload, expert: bool) -> LayerParams:
    """Parameters of one layer, with experts or with an ordinary MLP, its norms and biases included.

    Models without a gate (GPT) have biases and layer norms, those with one (Llama) have neither biases nor norms' means.
    """
    h, matrices = w.hidden, 3 if w.gated else 2
    norms = 2 * h if w.gated else 4 * h
    biases = 0 if w.gated else (w.heads + 2 * w.kv_heads) * w.head_dim + h
    attention = attention_params(w) + biases + norms
    if expert and w.moe is not None:
        router_and_shared = h * w.moe.experts + matrices * h * w.moe.ffn * w.moe.shared
        return LayerParams(attention + router_and_shared, matrices * h * w.moe.ffn * w.moe.experts)
    return LayerParams(attention + matrices * h * w.ffn + (0 if w.gated else w.ffn + h), 0)


def embedding_params(w: Workload) -> int:
    """One matrix of vocabulary times hidden."""
    return w.vocab * w.hidden


def end_params(w: Workload) -> int:
    """What lies outside layers: embedding, head if it is a matrix of its own, learned positions, the last norm."""
    positions = 0 if w.gated else w.seq * w.hidden
    return embedding_params(w) * (1 if w.tied else 2) + positions + (w.hidden if w.gated else 2 * w.hidden)


def n_params(w: Workload) -> int:
    """All parameters of the model."""
    dense, expert = layer_params(w, expert=False), layer_params(w, expert=True)
    moe_layers = w.layers - w.dense_layers
    return int(w.dense_layers * dense.shared + moe_layers * (expert.shared + expert.experts) + end_params(w))


def on_rank(w: Workload, layer: LayerParams) -> tuple[float, float]:
    """Parameters of a layer on one rank before ZeRO or FSDP cut them: those that dp shares, and those of its experts."""
    return layer.shared / w.tp, layer.experts / (w.ep * w.expert_tp)
