"""What one torch operator is to a device: which kernel it launches, how much it computes, and what memory it moves.

Both virtual and real devices record their kernels through this. Flops count a multiply-add as two. Attention counts
the pairs that it attends (causal: i + 1 keys for query i), four flops a pair and head dim forward and twice that
backward; that a fused backward computes scores again is a property of the kernel and not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Work(NamedTuple):
    """flops, bytes of device memory read plus written, and (batch, m, n, k) where tensor cores may serve."""

    flops: int
    bytes: int
    dims: tuple[int, ...]


class Op:
    """An operator's standing facts, worked out once.

    Attributes:
        name: its kernel's name.
        call: the operator itself, as torch's own wrapper calls it.
        launches: whether it launches a kernel at all; views and bare allocations do not.
        views: whether all it does is to look at a storage in another way.
        resizes: whether it changes the size of a storage in place.
        composite: whether torch only ever runs it as other operators.
        fresh: whether its results may be new storages.
        host_reads: whether the host waits for its value.
        pure: whether its results are new tensors that follow from its arguments, which it leaves alone.
        updates: whether it writes values into its first argument, and returns it.
        writes: positions of the arguments it writes in place.
        count: (args, outputs) -> Work, for operators whose work is more than touching what they are given.
    """

    __slots__ = (
        "call",
        "composite",
        "count",
        "fresh",
        "host_reads",
        "launches",
        "name",
        "out_names",
        "pure",
        "resizes",
        "updates",
        "views",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema, packet = func._schema, func.overloadpacket
        self.name = packet.__name__
        self.call = func._op
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        # Some have a kernel besides (silu_backward, ...): then that is what runs.
        self.composite = has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CPU")
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        self.writes = tuple(i for i, w in enumerate(written) if w and not schema.arguments[i].kwarg_only)
        self.out_names = tuple(a.name for a, w in zip(schema.arguments, written) if w and a.kwarg_only)
        self.launches = not (any(views) or packet in FREE or (not schema.returns and not any(written)))
        # torch.tensor(...) builds its value unseen and then lifts it: its storage is new here, whatever the schema says.
        lifts = packet is aten.lift_fresh
        self.fresh = lifts or (not any(views) and not (any(written) and all(r.alias_info for r in schema.returns)))
        self.host_reads = packet in HOST_READS
        self.resizes = packet is aten.resize_
        self.pure = self.fresh and not any(written) and not lifts
        self.updates = packet in UPDATES
        self.views = all(views) and bool(views) and not any(written) and not lifts
        self.count: Callable[[Sequence[Any], Sequence[Tensor]], Work] | None = COUNTS.get(packet) or (
            _foreach if self.name.startswith("_foreach_") else None
        )


def op_of(func: Any) -> Op:
    """The facts about an operator overload, worked out once and kept on it."""
    try:
        return func._emu_op
    except AttributeError:
        func._emu_op = op = Op(func)
        return op


FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.detach,
    aten.alias,
    aten.lift_fresh,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.resize_,
    aten.set_,
    aten.is_same_size,
    aten.is_pinned,
    aten._has_compatible_shallow_copy_type,
}
UPDATES = {
    *(aten.add_, aten.sub_, aten.mul_, aten.div_, aten.copy_, aten.zero_, aten.fill_, aten.neg_, aten.addmm_),
    *(aten.addcmul_, aten.addcdiv_, aten.lerp_, aten.masked_fill_, aten.exp_, aten.sqrt_, aten.index_add_),
}
HOST_READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.allclose,
}


def default_work(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
    """Reads every input and writes every output once, one flop for every element of the largest of them."""
    moved = most = 0
    for tensors in (inputs, outputs):
        for t in tensors:
            moved += t.nbytes
            n = t.numel()
            if n > most:
                most = n
    return tuple.__new__(Work, (most, moved, ()))


def _matmul(a: Tensor, b: Tensor, out: Tensor, extra: int = 0) -> Work:
    *batch, m, k = a.shape
    n = b.shape[-1]
    count = batch[0] if batch else 1
    return Work(2 * count * m * n * k, a.nbytes + b.nbytes + out.nbytes + extra, (count, m, n, k))


def _vector(a: Tensor, b: Tensor, out: Tensor, extra: int = 0) -> Work:
    return Work(2 * a.numel(), a.nbytes + b.nbytes + out.nbytes + extra, ())


def _added_to(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    """A product that is added to a first argument, which may be the output (then it is read and written)."""
    return _matmul(args[1], args[2], outs[0], args[0].nbytes)


def pairs(queries: int, keys: int, causal: bool) -> int:
    """How many (query, key) pairs are attended; causal masks count keys 0 to i for query i."""
    if not causal:
        return queries * keys
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def _attention(q: Tensor, k: Tensor, causal: bool, per_pair: int, touched: Sequence[Tensor]) -> Work:
    batch, heads, s, d = q.shape
    flops = per_pair * batch * heads * pairs(s, k.shape[2], causal) * d
    return Work(flops, sum(t.nbytes for t in touched), (batch * heads, s, k.shape[2], d))


def _flash(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    q, k, v = args[:3]
    return _attention(q, k, len(args) > 4 and bool(args[4]), 4, (q, k, v, *outs))


def _flash_backward(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    grad, q, k, v, out, lse = args[:6]
    return _attention(q, k, bool(args[7]), 8, (grad, q, k, v, out, lse, *outs))


def _rows(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    """Picks rows of a table: reads what it picks, not the table."""
    picked = sum(t.nbytes for t in outs)
    indices = sum(t.nbytes for t in args[1:] if isinstance(t, Tensor))
    return Work(0, 2 * picked + indices, ())


def _fill(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    return Work(0, sum(t.nbytes for t in outs), ())


def _copy(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    return Work(0, args[1].nbytes + args[0].nbytes, ())


def _convert(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    return Work(0, _touched(args, outs), ())


def _convolution(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    x, weight = args[:2]
    return Work(_products(x, weight, outs[0], args[6]), _touched(args, outs), ())


def _convolution_backward(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    """A convolution each for the gradient of the input and of the weight, where they are asked for."""
    grad, x, weight = args[:3]
    wanted = sum(map(bool, args[10][:2]))
    return Work(wanted * _products(x, weight, grad, args[7]), _touched(args, outs), ())


def _products(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    """Every output (of a transposed convolution: input) element is one product with a filter."""
    return 2 * (x if transposed else out).numel() * prod(weight.shape[1:])


def _foreach(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    """One kernel over lists of tensors; in place, what it reads first is what it writes."""
    first = list(args[0])
    return Work(sum(t.numel() for t in first), _touched(args, list(outs) or first), ())


def _fused_adam(args: Sequence[Any], outs: Sequence[Tensor]) -> Work:
    """A whole step in one kernel: reads parameters, gradients and moments, and writes all of them but the gradients."""
    gradients, *written = (sum(t.nbytes for t in args[i]) for i in (1, 0, 2, 3, 4))
    return Work(sum(t.numel() for t in args[0]), gradients + 2 * sum(written), ())


def _touched(args: Sequence[Any], outs: Sequence[Tensor]) -> int:
    flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
    return sum(t.nbytes for t in (*flat, *outs))


FILLS = (
    *(aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones),
    *(aten.new_full, aten.zero_, aten.fill_, aten.arange, aten.scalar_tensor, aten.rand, aten.randn, aten.randint),
    *(aten.rand_like, aten.randn_like, aten.normal_, aten.uniform_, aten.bernoulli_),
)
COUNTS: dict[Any, Callable[[Sequence[Any], Sequence[Tensor]], Work]] = {
    aten.mm: lambda args, outs: _matmul(args[0], args[1], outs[0]),
    aten.bmm: lambda args, outs: _matmul(args[0], args[1], outs[0]),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_), _added_to),
    aten.mv: lambda args, outs: _vector(args[0], args[1], outs[0]),
    **dict.fromkeys((aten.addmv, aten.addmv_), lambda args, outs: _vector(args[1], args[2], outs[0], args[0].nbytes)),
    aten.dot: lambda args, outs: _vector(args[0], args[1], outs[0]),
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    **dict.fromkeys((aten.embedding, aten.index_select, aten.gather, aten.index), _rows),
    **dict.fromkeys(FILLS, _fill),
    aten.copy_: _copy,
    **dict.fromkeys((aten.clone, aten._to_copy, aten.cat, aten.stack), _convert),
    **dict.fromkeys((aten._fused_adam_, aten._fused_adamw_), _fused_adam),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}
