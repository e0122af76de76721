"""What lies outside the layers: embedding on the first stage, head and cross entropy on the last."""

from __future__ import annotations

from typing import NamedTuple

from .layer import WIDE
from .params import embedding_params
from .placing import in_node
from .stacks import Stack
from .work import Message, Pass, Product, Work
from .workload import Workload


class Ends(NamedTuple):
    """Kernels of a micro-batch; cross entropy and gradients of the embedding's size apart, as constants price them.

    logits: how many a rank computes; vocabulary: parameters of its part of the embedding.
    """

    first: tuple[Work, ...]
    last: tuple[Work, ...]
    logits: float
    vocabulary: float
    message: Message


def end_work(w: Workload, stack: Stack, micro_batch: int) -> Ends:
    """Kernels of embedding and head; under tensor parallelism each holds a part of the vocabulary."""
    tokens = w.seq * micro_batch / w.cp
    part = w.vocab / w.tp
    looked_up = tokens * w.hidden * 8
    first = (
        Pass("embedding", "forward", "elementwise", looked_up, 3),
        Pass("embedding", "input", "elementwise", looked_up, 3),
    )
    dtype = WIDE[w.precision]
    last = [
        Product("head", "forward", tokens, part, w.hidden, dtype=dtype),
        Product("head", "input", tokens, w.hidden, part, dtype=dtype),
    ]
    if not w.adapters:
        last.append(Product("head", "weight", part, w.hidden, tokens, dtype=dtype))
    return Ends(
        first,
        tuple(last),
        tokens * part,
        0.0 if stack.fused else embedding_params(w) / w.tp,
        Message("head", "all_reduce", tokens * w.hidden * 2, w.tp, in_node(w, w.tp)),
    )
