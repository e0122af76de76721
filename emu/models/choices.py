"""The words that a Config understands."""

from __future__ import annotations

from typing import Literal

Positions = Literal["learned", "rotary"]
Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "swiglu"]
Convention = Literal["causal", "full"]
RouterOrder = Literal["softmax-topk", "topk-softmax"]
BalanceOver = Literal["sequence", "batch"]
