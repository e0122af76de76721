"""Ring attention: keys and values go round, and every rank attends to them as they come by.

Liu, Zaharia, Abbeel 2023, https://arxiv.org/abs/2310.01889. The next keys and values travel while these are attended to.
Partial results merge by their log-sum-exp in float32 at least, so the error does not grow with the number of ranks.

Order of sums, forward: of rank i's queries, the keys of ranks i, i - 1, i - 2, ... (around the ring).
Backward, keys and values go round again, and the sums of their gradients follow them, one rank behind: of rank j's keys
they are begun by rank j + 1 and added to by j + 2, j + 3, ..., at last by j itself. So that neither the first keys to come
nor the sums on their last way home are waited for idly, a rank's own keys are done in two halves: the last ones first, the
first ones, which more queries see, at the end. So the gradient of queries adds up own last keys, those of ranks i - 1,
i - 2, ..., own first keys.

No rank holds more than two pairs of keys and values besides its own: those it reads and those that arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emu.parallel.attention import block
from emu.parallel.context.place import Gradients, Kept, Place, add, put
from emu.spmd import Work


def forward(here: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
    """Attention of this rank's queries to all keys.

    Args:
        q: [batch, heads, n, head_dim], n as the cut says.
        k, v: [batch, kv_heads, n, head_dim].

    Returns:
        what attention gives, as q, and what is to be kept for backward.
    """
    me, ranks = here.group.rank, here.group.size
    mine, whole = (k, v), None
    for step in range(ranks):
        arriving = _pass_on(here, [k, v], step, "keys and values") if step < ranks - 1 else None
        whole = here.attend(q, k, v, here.cut.block(me, (me - step) % ranks), whole)
        if arriving is not None:
            k, v = arriving.wait()
            del arriving  # which holds on to what was sent
    whole = block.nothing(q) if whole is None else whole
    out = whole.out.to(q.dtype)
    return out, Kept(q, *mine, out.detach(), whole.lse)


def backward(here: Place, grad: Tensor, kept: Kept) -> Gradients:
    """The gradients of this rank's queries, and of its keys and values through all queries.

    Args:
        grad: of the output, [batch, heads, n, head_dim].
        kept: what forward returned.
    """
    cut, me, ranks = here.cut, here.group.rank, here.group.size
    dq = torch.zeros_like(kept.out, dtype=kept.lse.dtype)
    k, v = kept.k, kept.v
    if ranks == 1:
        seen = cut.block(0, 0)
        return Gradients(dq, *put(here.backward(grad, kept, k, v, seen, dq), seen, dq.dtype))
    first, last = (cut.half_block(me, half) for half in (0, 1))
    going: Work | None = None
    arriving: Work | None = _pass_on(here, [k, v], 0, "keys and values")
    of_last = here.backward(grad, kept, k, v, last, dq)
    for step in range(1, ranks):
        assert arriving is not None
        k, v = arriving.wait()
        arriving = None  # it held on to what was sent
        if step < ranks - 1:
            arriving = _pass_on(here, [k, v], step, "keys and values")
        seen = cut.block(me, (me - step) % ranks)
        more = here.backward(grad, kept, k, v, seen, dq)
        sums = put(more, seen, dq.dtype) if going is None else add(going.wait(), more, seen.k)
        going = None
        going = _pass_on(here, sums, step, "gradients of keys and values")
        del more, sums
    del k, v
    of_first = here.backward(grad, kept, kept.k, kept.v, first, dq)
    assert going is not None
    sums = going.wait()
    add(sums, of_first, first.k)
    add(sums, of_last, last.k)
    return Gradients(dq, *sums)


def _pass_on(here: Place, tensors: list[Tensor], step: int, name: str) -> Work:
    """Sends to the next rank what belongs to the rank `step` places back, and gets what belongs to the one before that."""
    sizes, ranks = here.cut.sizes, here.group.size
    held = [sizes[(i - step) % ranks] for i in range(ranks)]
    return here.group.ring_shift(tensors, dim=2, sizes=held, async_op=True, name=name)
