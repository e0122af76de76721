"""What goes into the trace for a call, as virtual devices record it."""

from __future__ import annotations

from torch import Tensor

from emu.spmd.calls import Call, Message
from emu.spmd.group import Group
from emu.trace.events import Collective, Transfer


def collective_event(group: Group, call: Call, seq: int, stream: str, after: str, work: int) -> Collective:
    """The event for a call. Its bytes are the whole message, and for all_to_all what this rank sends."""
    source, target, n = call.source, call.target, group.size
    whole, sizes, dtype = 0, (), ""
    if source is not None:
        dtype = dtype_name(source)
        whole = max(source.nbytes, target.nbytes if target is not None else 0)
        length = source.shape[call.dim] if source.dim() else 1
        if call.kind == "all_to_all":
            whole = source.nbytes
        elif call.kind == "gather" and call.sizes is None:
            whole = source.nbytes * n
        if call.sizes is not None or call.kind == "all_to_all":
            cut = call.sizes if call.sizes is not None else (length // n,) * n
            sizes = tuple(k * _row_bytes(source, call.dim) for k in cut)
            if call.kind == "gather":
                whole = sum(sizes)
    return Collective(
        call.kind, group.label, group.members, seq, whole, sizes, dtype, call.op, call.algorithm, call.root, stream, after,
        work, call.name,
    )  # fmt: skip


def transfer_event(group: Group, message: Message, seq: int, stream: str, after: str, work: int) -> Transfer:
    """The event for one half of a message."""
    src, dst = ends(group, message)
    x = message.tensor
    return Transfer(
        message.kind, group.label, src, dst, seq, x.nbytes, dtype_name(x), stream, after, work, message.name
    )


def ends(group: Group, message: Message) -> tuple[int, int]:
    """Global ranks of a message's sender and receiver."""
    me, peer = group.members[group.rank], group.members[message.peer]
    return (me, peer) if message.kind == "send" else (peer, me)


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _row_bytes(x: Tensor, dim: int) -> int:
    """Bytes of one index along dim."""
    rest = 1
    for at, length in enumerate(x.shape):
        rest *= 1 if at == dim else length
    return rest * x.element_size()
