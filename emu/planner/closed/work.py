"""What a device does, as plain numbers that have no price yet: products, attention, passes over memory, messages.

A closed form first says what happens (these tuples, which depend on the workload and its software alone), then what it
costs (`prices.py`, which depends on chip, links and constants). A fit therefore builds the first once and prices it often.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal[
    "forward", "input", "weight"
]  # backward of inputs and of weights apart, as zero-bubble schedules need them
PassKind = Literal["elementwise", "scores", "cast", "exact"]


class Product(NamedTuple):
    """`count` equal matrix products [batch, m, k] @ [batch, k, n].

    grouped: products of experts with unequal numbers of tokens, of which m, n or k is the mean.
    """

    name: str
    phase: Phase
    m: float
    n: float
    k: float
    batch: float = 1
    dtype: str = "bfloat16"
    count: float = 1
    grouped: bool = False


class Attention(NamedTuple):
    """Fused attention of one layer."""

    name: str
    phase: Phase
    kind: str
    flops: float
    seq: float
    head_dim: int
    dtype: str = "bfloat16"


class Pass(NamedTuple):
    """`kernels` that read and write `bytes` in all, and compute next to nothing.

    kind: "elementwise" kernels move more than the least by how far the software fuses; "scores" are softmax and
    dropout over attention's scores; "cast" are conversions to fp8; "exact" move just this.
    """

    name: str
    phase: Phase
    kind: PassKind
    bytes: float
    kernels: float


class Message(NamedTuple):
    """A collective of `n` ranks, `per_node` of them in a node; `bytes` as in trace.events.Collective."""

    name: str
    kind: str
    bytes: float
    n: int
    per_node: int


Work = Product | Attention | Pass
