"""The shape of a decoder: a dozen numbers and choices, from which its parameters and FLOPs follow in closed form."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

Positions = Literal["learned", "rotary"]
Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "swiglu"]
Convention = Literal["causal", "full"]


class ConfigError(ValueError):
    """A decoder that cannot be built.

    Args:
        field: the field of Config that is wrong.
        problem: what is wrong, with the numbers.
        hint: what to do about it.
    """

    def __init__(self, field: str, problem: str, hint: str):
        super().__init__(f"Config.{field}: {problem}. {hint}")
        self.field = field
        self.problem = problem
        self.hint = hint


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
        dropout: probability of zeroing an element, after the embedding and at the end of each residual branch;
            attention weights are never dropped, because the one kernel does not keep them.
        tied: the head uses the embedding's matrix.
        rope_base: the base of the rotary angles.
        norm_eps: added to the variance in norms.

    Raises:
        ConfigError: names the field, the numbers and what to do.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # filled in by __post_init__
    head_dim: int = None  # type: ignore[assignment]
    ffn: int = None  # type: ignore[assignment]
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

    def __post_init__(self):
        for field in ("layers", "width", "heads"):
            self._check_count(field)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim is None:
            self._check_width_divides()
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if self.ffn is None:
            object.__setattr__(self, "ffn", 4 * self.width)
        for field in ("kv_heads", "head_dim", "ffn", "vocab", "seq"):
            self._check_count(field)
        self._check_heads()
        self._check_choice("positions", get_args(Positions))
        self._check_choice("norm", get_args(Norm))
        self._check_choice("activation", get_args(Activation))
        self._check_numbers()
        if self.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(
                "head_dim",
                f"rotary positions turn pairs of numbers, but head_dim is {self.head_dim}, which is odd",
                f'Use head_dim={self.head_dim + 1}, or positions="learned".',
            )

    def _check_count(self, field: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(field, f"expected a whole number of at least 1, got {value!r}", f"Write e.g. {field}=4.")

    def _check_width_divides(self) -> None:
        if self.width % self.heads:
            near = max(1, round(self.width / self.heads)) * self.heads
            raise ConfigError(
                "heads",
                f"width {self.width} cannot be cut into {self.heads} heads of equal size",
                f"Use width={near}, or say how large a head is with head_dim=.",
            )

    def _check_heads(self) -> None:
        if self.heads % self.kv_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ConfigError(
                "kv_heads",
                f"every key and value head serves the same number of query heads, but {self.heads} heads cannot be "
                f"shared out evenly over {self.kv_heads}",
                f"Use a divisor of heads: one of {fitting}.",
            )

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.3)
            meant = f' Did you mean "{near[0]}"?' if near else ""
            listed = " or ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(field, f"there is no {value!r}", f"Use {listed}.{meant}")

    def _check_numbers(self) -> None:
        for field in ("bias", "tied"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(
                    field, f"expected True or False, got {getattr(self, field)!r}", f"Write {field}=True."
                )
        for field in ("dropout", "rope_base", "norm_eps"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(field, f"expected a number, got {value!r}", f"Write e.g. {field}=0.1.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                "dropout",
                f"a probability of at least 0 and below 1 is needed, got {self.dropout!r}",
                "Write dropout=0.1 to drop a tenth; at 1 nothing would be left.",
            )
        if not 1 < self.rope_base < float("inf"):
            raise ConfigError(
                "rope_base", f"needs a finite number above 1, got {self.rope_base!r}", "10000.0 is usual."
            )
        if not 0 < self.norm_eps < float("inf"):
            raise ConfigError("norm_eps", f"needs a finite number above 0, got {self.norm_eps!r}", "1e-5 is usual.")

    def n_params(self) -> int:
        """The number of parameters of Decoder(self); a tied matrix counts once."""
        return self.vocab * self.width * (1 if self.tied else 2) + (
            (self.seq * self.width if self.positions == "learned" else 0)
            + self.layers * self.block_params()
            + self._norm_params()
        )

    def block_params(self) -> int:
        """The number of parameters of one block, its two norms included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden = self.ffn * (2 if self.activation == "swiglu" else 1)  # gate and up, or up alone
        matrices = self.width * (2 * q + 2 * kv) + self.width * (hidden + self.ffn)
        biases = (q + 2 * kv + self.width) + (hidden + self.width)
        return matrices + (biases if self.bias else 0) + 2 * self._norm_params()

    def _norm_params(self) -> int:
        return self.width * (2 if self.norm == "layer" and self.bias else 1)

    def flops(self, batch: int = 1, seq: int | None = None, attention: Convention = "causal") -> int:
        """Forward FLOPs of the matrix products; a multiply-add is two, and a training step is three times this.

        Every token pays for all linear maps, the head included; looking up an embedding, norms, activations and
        softmax count nothing. Recomputation never counts as model FLOPs. Conventions of published tables:
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
        seq = self.seq if seq is None else seq
        if attention not in get_args(Convention):
            raise ValueError(f'attention={attention!r}: count "causal" or "full" pairs of a query and a key.')
        pairs = seq * (seq + 1) // 2 if attention == "causal" else seq * seq
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = 3 if self.activation == "swiglu" else 2
        linear = 2 * batch * seq * self.width * (2 * q + 2 * kv + matrices * self.ffn)
        scores_and_values = 2 * 2 * batch * pairs * q
        return linear + scores_and_values
