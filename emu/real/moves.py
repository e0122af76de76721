"""How each collective moves its data over a backend of torch.distributed.

What is only copied travels as bytes: exact for every dtype, those the backend has never heard of included. What is
reduced travels in a dtype that holds every value of its own exactly:

    float64, float32, int32, int64      themselves
    float16, bfloat16                   float32 over gloo (rounded once, at the end); themselves over NCCL
    float8 kinds                        float32
    int8, uint8, int16, uint16          int64 over gloo, so that sums wrap as in their own dtype
    complex                             as pairs of reals, for sum and avg

and everything else (products of complex numbers; max and min of floats, where gloo and NCCL lose NaN) is gathered and
reduced in group order by torch. The backend adds in its own order, not in group order, whatever `algorithm` says.
Pieces of unequal length are padded to the longest where a backend wants equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from emu.real.links import Link
from emu.spmd.calls import Call

dist: Any = torch.distributed  # its stubs do not know all of its options

FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX,
       "min": dist.ReduceOp.MIN}  # fmt: skip
NATIVE = (torch.float64, torch.float32, torch.int32, torch.int64)
SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16)


def move(link: Link, call: Call) -> None:
    """Carries out this rank's part of a collective: reads the source, writes the target."""
    if call.kind == "barrier":
        _barrier(link)
        return
    source, target = call.source, call.target
    assert source is not None
    n, me = link.size, link.rank
    match call.kind:
        case "all_reduce" | "reduce":
            total = reduced(link, source, call.op, call.root if call.kind == "reduce" else None)
            if call.kind == "all_reduce" or me == call.root:
                _put(target, total)
        case "broadcast":
            _broadcast(link, source, target, call.root)
        case "all_gather" | "gather":
            shapes = [_with(source, call.dim, length) for length in call.sizes or (source.shape[call.dim],) * n]
            pieces = gathered(link, source, shapes, call.root if call.kind == "gather" else None)
            if target is not None and pieces is not None:
                torch.cat(pieces, call.dim, out=target)
        case "reduce_scatter":
            _put(target, _reduce_scattered(link, source, call))
        case "scatter":
            _scatter(link, source, target, call)
        case "all_to_all":
            assert target is not None
            sent = source.split(_cuts(call.sizes, source, call.dim, n), call.dim)
            shapes = [_with(target, call.dim, k) for k in _cuts(call.recv_sizes, target, call.dim, n)]
            torch.cat(exchanged(link, sent, shapes), call.dim, out=target)
        case "ring_shift":
            assert target is not None
            nothing = source.new_empty(0)
            to, fro = (me + call.by) % n, (me - call.by) % n
            sent = [source if i == to else nothing for i in range(n)]
            came = exchanged(link, sent, [target.shape if i == fro else nothing.shape for i in range(n)])
            _put(target, came[fro])
        case kind:
            raise AssertionError(f"no way to move {kind}")


# Reductions.


def reduced(link: Link, x: Tensor, op: str, root: int | None = None) -> Tensor | None:
    """The reduction of everyone's x, on every rank or on the root alone (None elsewhere); x keeps its value."""
    if not x.numel():
        return x
    carrier = _carrier(x.dtype, op, link.nccl)
    if carrier is None:
        pieces = gathered(link, x, [x.shape] * link.size, root)
        if pieces is None:
            return None
        total = pieces[0]
        for piece in pieces[1:]:
            total = FOLDS[op](total, piece)
    else:
        buffer = x.resolve_conj().to(carrier, copy=True, memory_format=torch.contiguous_format)
        flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        if root is None:
            options = dist.AllreduceOptions()
            options.reduceOp = OPS[op]
            link.finish(link.data.allreduce([flat], options))
        else:
            rooted = dist.ReduceOptions()
            rooted.reduceOp, rooted.rootRank = OPS[op], root
            link.finish(link.data.reduce([flat], rooted))
            if link.rank != root:
                return None
        total = buffer
    if op == "avg":
        total = total / link.size
    return total.to(x.dtype)


def _carrier(dtype: torch.dtype, op: str, nccl: bool) -> torch.dtype | None:
    """The dtype in which a reduction travels; None: gather, and reduce here."""
    if (op in ("max", "min") and dtype.is_floating_point) or (op == "prod" and dtype.is_complex):
        return None
    if dtype in NATIVE or (dtype.is_complex and dtype != torch.complex32):
        return dtype
    if dtype in (torch.float16, torch.bfloat16):
        return dtype if nccl else torch.float32
    if dtype.is_floating_point:
        return torch.float32
    if dtype in SMALL_INTEGERS:
        return torch.int64
    return None


def _reduce_scattered(link: Link, x: Tensor, call: Call) -> Tensor | None:
    """Over gloo, which has no uneven reduce_scatter: everyone's total, of which each keeps its piece."""
    cuts = _cuts(call.sizes, x, call.dim, link.size)
    if link.nccl and _carrier(x.dtype, call.op, True) == x.dtype and not x.is_complex():
        pieces = [p.contiguous() for p in x.split(cuts, call.dim)]
        out = torch.empty_like(pieces[link.rank])
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[call.op]
        link.finish(link.data.reduce_scatter([out], [pieces], options))
        return out / link.size if call.op == "avg" else out
    total = reduced(link, x, call.op)
    return None if total is None else total.split(cuts, call.dim)[link.rank]


# Copies, as bytes.


def _broadcast(link: Link, x: Tensor, target: Tensor | None, root: int) -> None:
    if x.numel():
        wire = as_bytes(x) if link.rank == root else x.new_empty(x.nbytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        link.finish(link.data.broadcast([wire], options))
        if link.rank != root:
            _put(target, from_bytes(wire, x, x.shape))


def gathered(link: Link, x: Tensor, shapes: Sequence[Sequence[int]], root: int | None = None) -> list[Tensor] | None:
    """Everyone's x, whose shapes are known, in group order; with a root None elsewhere."""
    most = max(_nbytes(x, shape) for shape in shapes)
    here = root is None or root == link.rank
    wires = [x.new_empty(most, dtype=torch.uint8) for _ in shapes] if here else []
    if most and root is None:
        link.finish(link.data.allgather([wires], [_padded(as_bytes(x), most)]))
    elif most:
        options = dist.GatherOptions()
        options.rootRank = root
        link.finish(link.data.gather([wires] if here else [], [_padded(as_bytes(x), most)], options))
    return [from_bytes(w[: _nbytes(x, shape)], x, shape) for w, shape in zip(wires, shapes)] if here else None


def _scatter(link: Link, x: Tensor, target: Tensor | None, call: Call) -> None:
    cuts = _cuts(call.sizes, x, call.dim, link.size)
    most = _nbytes(x, _with(x, call.dim, max(cuts)))
    if not most:
        return
    wires = [_padded(as_bytes(p), most) for p in x.split(cuts, call.dim)] if link.rank == call.root else []
    wire = x.new_empty(most, dtype=torch.uint8)
    options = dist.ScatterOptions()
    options.rootRank = call.root
    link.finish(link.data.scatter([wire], [wires] if wires else [], options))
    shape = _with(x, call.dim, cuts[link.rank])
    _put(target, from_bytes(wire[: _nbytes(x, shape)], x, shape))


def exchanged(link: Link, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Sends the i-th tensor to rank i; returns what came from each, whose shapes are known."""
    like = sent[0]
    wire = torch.cat([as_bytes(t) for t in sent])
    sizes = [_nbytes(like, shape) for shape in shapes]
    out = like.new_empty(sum(sizes), dtype=torch.uint8)
    link.finish(link.data.alltoall_base(out, wire, sizes, [t.nbytes for t in sent], dist.AllToAllOptions()))
    return [from_bytes(piece, like, shape) for piece, shape in zip(out.split(sizes), shapes)]


def _barrier(link: Link) -> None:
    token = torch.zeros(1, device="cuda" if link.nccl else "cpu")
    link.finish(link.data.allreduce([token], dist.AllreduceOptions()))
    if link.nccl:
        token.item()  # the host waits, too


def as_bytes(x: Tensor) -> Tensor:
    """The values of a tensor in order, as a flat tensor of bytes."""
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(wire: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of the given shape, with the dtype of `like`, that these bytes are."""
    return wire.view(like.dtype).view(tuple(shape))


def _padded(wire: Tensor, length: int) -> Tensor:
    return wire if wire.numel() == length else torch.cat([wire, wire.new_zeros(length - wire.numel())])


def _nbytes(like: Tensor, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * like.element_size()


def _with(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    return (*x.shape[:dim], length, *x.shape[dim + 1 :])


def _cuts(sizes: Sequence[int] | None, x: Tensor, dim: int, n: int) -> list[int]:
    return list(sizes) if sizes is not None else [x.shape[dim] // n] * n


def _put(target: Tensor | None, value: Tensor | None) -> None:
    if target is not None and value is not None:
        target.copy_(value)
