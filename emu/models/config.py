"""The shape of a decoder: numbers and choices, from which its parameters and FLOPs follow in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from emu.models import counting
from emu.models.checks import ConfigError, check, check_count, check_width_divides
from emu.models.choices import Activation, BalanceOver, Convention, Norm, Positions, RouterOrder

__all__ = ["Config", "ConfigError"]


@dataclass(frozen=True)
class Config:
    """What a decoder looks like; it checks itself.

    Args:
        layers: number of blocks.
        width: size of the vector that stands for one token between blocks.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads (None: as many as heads; fewer is grouped-query attention).
        head_dim: size of one head (None: width / heads).
        ffn: width of the hidden layer of the MLP (None: 4 * width).
        vocab: number of different tokens.
        seq: longest sequence, in tokens.
        positions: "learned" adds a learned vector per position to the embedding; "rotary" turns queries and keys
            (RoPE, https://arxiv.org/abs/2104.09864).
        norm: "layer" (https://arxiv.org/abs/1607.06450) or "rms" (https://arxiv.org/abs/1910.07467).
        activation: "gelu" (two matrices) or "swiglu" (three: gate, up, down; https://arxiv.org/abs/2002.05202).
        bias: biases in every linear map but the head, and in layer norms.
        dropout: probability of zeroing an element, after the embedding and at the end of each residual branch.
        tied: the head uses the embedding's matrix.
        rope_base: the base of the rotary angles.
        norm_eps: added to the variance in norms.
        label_smoothing: the part of each label that is spread evenly over the vocabulary
            (https://arxiv.org/abs/1512.00567, section 7).
        fused: attention is one kernel, which keeps no scores; False spells it out, as it was before there were such
            kernels, and keeps them all (https://arxiv.org/abs/2205.05198 counts their bytes).
        document_end: the token that ends a document: sequences are packed of documents that do not see each other
            (https://arxiv.org/abs/2407.21783, section 3.2); None: each is one document.
        attention_dropout: probability of zeroing an attention weight; it needs fused=False.
        experts: how many MLPs each block has, of width ffn and without biases, of which every token meets top_k
            (https://arxiv.org/abs/1701.06538); 0: one MLP, a dense model.
        top_k: how many experts a token goes to.
        shared_ffn: width of the hidden layer of an MLP that every token passes besides
            (https://arxiv.org/abs/2401.06066); 0: none.
        router: "softmax-topk" weighs a token's experts by their probabilities among all; "topk-softmax" takes the
            softmax over the chosen ones alone (https://arxiv.org/abs/2401.04088, section 2.1).
        renormalize: divide the weights of "softmax-topk" by their sum.
        balance: coefficient of the loss that asks for an even use of experts; 0.0: none.
        balance_over: "sequence" asks for it within each sequence, "batch" over all tokens of a forward, which then
            depends on how a batch is cut.
        capacity: an expert takes at most ceil(capacity * seq * top_k / experts) choices of a sequence, the rest is
            dropped; None: it takes all.
        routing: what is taken for granted where tensors have shapes and no values: "uniform", "zipf:1.2", or None.

    Raises:
        ConfigError: names the field, the numbers and what to do.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int = cast(int, None)  # filled in by __post_init__
    head_dim: int = cast(int, None)
    ffn: int = cast(int, None)
    vocab: int = 256
    seq: int = 64
    positions: Positions = "learned"
    norm: Norm = "layer"
    activation: Activation = "gelu"
    bias: bool = True
    dropout: float = 0.0
    tied: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    label_smoothing: float = 0.0
    fused: bool = True
    attention_dropout: float = 0.0
    document_end: int | None = None
    experts: int = 0
    top_k: int = 2
    shared_ffn: int = 0
    router: RouterOrder = "softmax-topk"
    renormalize: bool = False
    balance: float = 0.0
    balance_over: BalanceOver = "sequence"
    capacity: float | None = None
    routing: str | None = "uniform"

    def __post_init__(self):
        for field in ("layers", "width", "heads"):
            check_count(self, field)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim is None:
            check_width_divides(self)
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if self.ffn is None:
            object.__setattr__(self, "ffn", 4 * self.width)
        check(self)

    def n_params(self) -> int:
        """The number of parameters of Decoder(self); a tied matrix counts once."""
        return counting.n_params(self)

    def active_params(self) -> int:
        """The number of parameters that one token meets: of each block's experts, top_k. All, if there are none."""
        return counting.active_params(self)

    def block_params(self) -> int:
        """The number of parameters of one block, its two norms included."""
        return counting.block_params(self)

    def flops(self, batch: int = 1, seq: int | None = None, attention: Convention = "causal") -> int:
        """Forward FLOPs of the matrix products; a multiply-add is two, and a training step is three times this.

        Every token pays for all linear maps, the head included, and of a block's experts for top_k, whether a
        capacity drops some or not. Looking up an embedding, norms, activations and softmax count nothing.
        Recomputation never counts as model FLOPs. Conventions of published tables:
        https://arxiv.org/abs/2205.05198 (full), https://arxiv.org/abs/2204.02311, appendix B (full).

        Args:
            batch: sequences.
            seq: tokens in a sequence (None: the config's longest).
            attention: "causal" counts the seq * (seq + 1) / 2 pairs of a query and a key that are attended to;
                "full" counts all seq * seq, as many published numbers do.
        """
        seq = self.seq if seq is None else seq
        head = 2 * batch * seq * self.width * self.vocab
        return self.layers * self.block_flops(batch, seq, attention) + head

    def block_flops(self, batch: int = 1, seq: int | None = None, attention: Convention = "causal") -> int:
        """Forward FLOPs of one block, counted as in flops().

        Fewer key and value heads make their projections cheaper, never the scores: every query head still meets
        every key.
        """
        return counting.block_flops(self, batch, self.seq if seq is None else seq, attention)
