"""All-gather: every rank gets all keys and values at once, and attends as if it held the whole sequence.

Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2: simpler than a ring, and document masks are easy; it takes memory
for all keys and values of one layer, and nothing hides the gathering. They are put in order of position, so that one call
attends to all that came before a chunk. Backward gathers them again, and a reduce-scatter gives each rank the sum of its
keys' gradients, in group order, in float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emu.parallel.attention import block
from emu.parallel.context.place import Gradients, Kept, Place, put


def forward(here: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
    """Attention of this rank's queries to all keys: see ring.forward."""
    everyones_k, everyones_v = _gathered(here, k, v)
    whole = here.attend(q, everyones_k, everyones_v, here.cut.block_of_all(here.group.rank), None)
    out, lse = block.nothing(q) if whole is None else whole
    out = out.to(q.dtype)
    return out, Kept(q, k, v, out.detach(), lse)


def backward(here: Place, grad: Tensor, kept: Kept) -> Gradients:
    """The gradients of this rank's queries, and of its keys and values through all queries: see ring.backward."""
    cut, dq = here.cut, torch.zeros_like(kept.out, dtype=kept.lse.dtype)
    k, v = _gathered(here, kept.k, kept.v)
    seen = cut.block_of_all(here.group.rank)
    of_all = put(here.backward(grad, kept, k, v, seen, dq), seen, dq.dtype)
    del k, v
    under_way = [
        here.group.reduce_scatter(cut.by_rank(x, 2), 2, cut.sizes, async_op=True, name="gradients of keys and values")
        for x in of_all
    ]
    dk, dv = (work.wait() for work in under_way)
    return Gradients(dq, dk, dv)


def _gathered(here: Place, k: Tensor, v: Tensor) -> list[Tensor]:
    """All keys and all values, in order of position."""
    under_way = [here.group.all_gather(x, 2, here.cut.sizes, async_op=True, name="keys and values") for x in (k, v)]
    return [here.cut.in_order(work.wait(), 2) for work in under_way]
