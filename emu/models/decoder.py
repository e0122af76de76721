"""A decoder-only transformer in plain torch: GPT or Llama, as its config says. It knows nothing of other devices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from emu.models.attention import Attention, causal_mask, document_mask
from emu.models.config import Config
from emu.models.layers import Dropout, Embedding, Linear, draw_, norm
from emu.models.loss import IGNORED, CrossEntropy
from emu.models.mlp import mlp
from emu.models.moe import Experts, MoE
from emu.models.rotary import Rotation, rotation
from emu.models.router import Router


class Block(nn.Module):
    """One layer: x + attention(norm1(x)), then x + mlp(norm2(x)), or moe in place of mlp."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm1 = norm(config)
        self.attention = Attention(config)
        self.norm2 = norm(config)
        self.branch = "moe" if config.experts else "mlp"  # the name of the second branch, of which there is only one
        self.add_module(self.branch, MoE(config) if config.experts else mlp(config))
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None = None, mask: Any = None) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]; rotation, mask: what all layers share, as for Attention."""
        x = x + self.dropout(self.attention(self.norm1(x), rotation, mask))
        return x + self.dropout(getattr(self, self.branch)(self.norm2(x)))


class Decoder(nn.Module):
    """A decoder-only transformer.

    Names: embedding, positions (learned ones only), blocks.{i}.norm1, blocks.{i}.attention.{q,k,v,o},
    blocks.{i}.norm2, blocks.{i}.mlp.{gate,up,down} (gate in SwiGLU only), norm, head, loss. With experts, in place of
    mlp: blocks.{i}.moe.{router,experts,shared,balance,capacity}.

    Args:
        config: its shape.
        seed: of the weights. They come from a generator of their own, on the CPU and in float32, so the same seed
            gives the same model on every rank, device and dtype (torch.get_default_dtype(), up to rounding) and
            leaves torch's global generator alone. Standard deviation 0.02, and 0.02 / sqrt(2 layers) where a branch
            joins the residual, as in GPT-2.
    """

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.width)
        if config.positions == "learned":
            self.positions = Embedding(config.seq, config.width)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.loss = CrossEntropy(config.label_smoothing)
        self._draw(seed)

    def _draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        std, std_residual = 0.02, 0.02 / math.sqrt(2 * self.config.layers)
        drawn = set()
        for name, module in self.named_modules():
            if isinstance(module, Experts):
                for part, weight in module.named_parameters():
                    draw_(weight, std_residual if part == "down" else std, generator)
            if not isinstance(module, (Linear, Embedding, Router)) or module.weight in drawn:
                continue
            drawn.add(module.weight)
            draw_(module.weight, std_residual if name.endswith((".o", ".down")) else std, generator)
            if isinstance(module, Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        """Logits for the token after each one.

        Args:
            tokens: [batch, seq], int32 or int64; batch may be 0.
            positions: where the tokens stand, [seq] or [batch, seq] (None: 0, 1, ...). Attention is causal in the
                order of the tokens whatever their positions.
            mask: what is hidden, or what attends, for every layer (see Attention). None: what follows from the tokens.

        Returns:
            [batch, seq, vocab].

        Raises:
            ValueError: tokens of a wrong shape or dtype, or longer than config.seq.
        """
        self._check_tokens(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)  # [batch, seq, width]
        tables = None
        if self.config.positions == "learned":
            x = x + self.positions(positions)
        else:
            tables = rotation(positions, self.config.head_dim, self.config.rope_base, x.dtype)
        x = self.dropout(x)
        mask = self._mask(tokens) if mask is None else mask
        for block in self.blocks:
            x = block(x, tables, mask)
        return self.head(self.norm(x))

    def documents(self, tokens: Tensor) -> Tensor | None:
        """Which document each token belongs to, if config.document_end says where documents end.

        Args:
            tokens: [batch, seq].

        Returns:
            [batch, seq] int64: 0, 1, ... along each sequence; the token that ends a document is its last. None: one document.
        """
        if self.config.document_end is None:
            return None
        ends = (tokens == self.config.document_end).long()
        return ends.cumsum(-1) - ends

    def _mask(self, tokens: Tensor) -> Tensor | None:
        """What is hidden from whom; None: fused attention knows by itself."""
        documents = self.documents(tokens)
        if documents is not None:
            return document_mask(documents)
        return None if self.config.fused else causal_mask(tokens.shape[1], tokens.device)

    def loss_sum(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        """The sum of the cross-entropies of all labels that are not -100, in nats, and what unevenly used experts cost.

        It is a sum so that parts of a batch add up: divide once, by the number of labels of the whole batch. Without
        any labels it is 0 and every gradient is 0.

        Args:
            tokens: [batch, seq], as for forward.
            labels: [batch, seq] int64, the token that follows each one, or -100 where it should not count.
            positions, mask: as for forward.

        Returns:
            A scalar, in float32 at least.

        Raises:
            ValueError: as forward, or labels of another shape or dtype than int64.
        """
        if labels.shape != tokens.shape or labels.dtype != torch.int64:
            raise ValueError(
                f"labels are {tuple(labels.shape)} {labels.dtype}, tokens {tuple(tokens.shape)}: give one int64 label "
                f"per token, the token that follows it, or {IGNORED} where there is none."
            )
        loss = self.loss(self(tokens, positions, mask), labels)
        uneven = self.balance_sum(labels)
        return loss if uneven is None else loss + uneven

    def balance_sum(self, labels: Tensor) -> Tensor | None:
        """What the last forward's use of experts costs: config.balance times the sum over layers and sequences of
        (labels of the sequence that count) * (its balance).

        Divided by all labels, as the loss is, that is config.balance times a mean over sequences, in which each
        weighs as much as it has labels, however a batch was cut into parts. Each layer's balance is given up to it:
        a second call has nothing to add up.

        Args:
            labels: [batch, seq] int64, as for loss_sum.

        Returns:
            A scalar, in float32 at least; None where there is nothing to balance.
        """
        total, counted = None, None
        for block in self.blocks:
            moe = getattr(block, "moe", None)
            if moe is None or moe.balance_loss is None:
                continue
            each, moe.balance_loss = moe.balance_loss, None  # [batch], [1]; it holds on to its forward's graph
            counted = labels != IGNORED if counted is None else counted
            # One term a label, as of the cross-entropy, so that parts of a sequence add up as parts of a batch do.
            part = ((each * self.config.balance).unsqueeze(-1) * counted).sum()
            total = part if total is None else total + part  # layer by layer, so that layers may lie apart
        return total

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dim() != 2:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}: a decoder reads [batch, seq]. One sequence is tokens[None]."
            )
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens are {tokens.dtype}: an embedding looks up integers. Use tokens.long().")
        if tokens.shape[1] > self.config.seq:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than this model's {self.config.seq}: cut it, or "
                f"build the model with seq={tokens.shape[1]}."
            )


GPT = Decoder
