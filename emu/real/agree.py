"""Whether ranks mean the same: their calls are compared before any data moves.

A backend believes what it is told: ranks that call different collectives hang, or read each other's bytes as something
they are not. So before each collective every member sends the others a few numbers, a hash of what all must say alike
and, for all_to_all, what it sends to and expects from each: one small all_gather on the host, which costs about what a
small collective costs (half a millisecond between two processes). Only if they differ are the calls themselves
exchanged, in words, so that everyone raises the same error. Messages compare their halves the same way, which also makes
a send wait for its receiver.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from emu.real.links import Link
from emu.real.moves import gathered, move
from emu.real.records import ends
from emu.spmd.calls import Call, Message
from emu.spmd.errors import CollectiveMismatch
from emu.spmd.group import Group

CURES = {
    "kind": "let every rank of the group call the same collectives in the same order; look for one inside a branch "
    "that only some ranks take",
    "shape": "give every rank the same shape, or state uneven lengths with sizes=[...]",
    "dtype": "convert to one dtype before the call",
    "name": "reduce tensors in the same order on every rank",
}


def check_collective(link: Link, group: Group, call: Call, seq: int, line: str) -> None:
    """Compares this call with those of the other members.

    Raises:
        CollectiveMismatch: on every member, naming two ranks, their calls and their lines.
    """
    n = link.size
    mine = {"said": _signature(call), "call": described(call), "line": line}
    text = json.dumps(mine).encode()
    send, recv = _splits(call, n)
    head = torch.tensor([*_hash(mine["said"]), len(text), *send, *recv])
    records = _all_gather(link, head)
    if any(not torch.equal(r[:2], head[:2]) for r in records):
        texts = _exchange_texts(link, text, [int(r[2]) for r in records])
        raise _mismatch(group, seq, texts)
    if call.kind == "all_to_all":
        for i, record in enumerate(records):
            for k, other in enumerate(records):
                sent, expected = int(record[3 + k]), int(other[3 + n + i])
                if sent != expected:
                    src, dst = group.members[i], group.members[k]
                    raise CollectiveMismatch(
                        f"{group.label}.all_to_all number {seq}: pair ({src}->{dst}): rank {src} sent {sent}, "
                        f"rank {dst} expected {expected} (rank {group.members[link.rank]} called it at {line})",
                        "recv_sizes on one side must be send_sizes on the other, transposed",
                        ranks=(src, dst),
                        sent=sent,
                        expected=expected,
                    )


def check_message(link: Link, group: Group, message: Message, line: str) -> None:
    """Compares one half of a message with the other. `link` joins the two.

    Raises:
        CollectiveMismatch: on both, when shape, dtype or name differ.
    """
    x = message.tensor
    said = {"shape": list(x.shape), "dtype": _dtype(x), "name": message.name}
    text = json.dumps({"said": said, "line": line}).encode()
    head = torch.tensor([*_hash(said), len(text)])
    records = _all_gather(link, head)
    if torch.equal(records[0][:2], records[1][:2]):
        return
    texts = _exchange_texts(link, text, [int(r[2]) for r in records])
    src, dst = ends(group, message)
    a, b = texts if src < dst else texts[::-1]  # the link's first rank is the lower one
    raise CollectiveMismatch(
        f"message {src}->{dst} in group {group.label!r}: rank {src} sends {_half(a)}, rank {dst} expects {_half(b)}",
        "make both sides name the same shape and dtype, and post messages of a pair in the same order",
        ranks=(src, dst),
    )


def described(call: Call) -> str:
    """A call in words, e.g. "all_reduce(float32[4, 8], op=sum)"."""
    x = call.source
    parts = [] if x is None else [f"{_dtype(x)}{list(x.shape)}"]
    parts += [f"op={call.op}"] * bool(call.op) + [f"root={call.root}"] * (call.root >= 0)
    parts += [f"dim={call.dim}"] * bool(call.dim) + [f"sizes={list(call.sizes or ())}"] * (call.sizes is not None)
    parts += [f"by={call.by}"] * bool(call.by) + [f"algorithm={call.algorithm}"] * bool(call.algorithm)
    parts += [f"name={call.name!r}"] * bool(call.name)
    return f"{call.kind}({', '.join(parts)})"


def _signature(call: Call) -> dict[str, Any]:
    """What every member must say alike, as on virtual devices. A shape counts only as far as members share it."""
    x = call.source
    shape: list[Any] = list(x.shape) if x is not None else []
    uneven = call.kind in ("all_gather", "gather", "ring_shift") and call.sizes is not None
    if (uneven or call.kind == "all_to_all") and shape:
        shape[call.dim] = "any"
    return {
        "kind": call.kind,
        "shape": shape,
        "dtype": None if x is None else _dtype(x),
        "op": call.op,
        "root": call.root,
        "dim": call.dim,
        "sizes": list(call.sizes) if call.sizes is not None and call.kind != "all_to_all" else None,
        "shift": call.by,
        "algorithm": call.algorithm,
        "name": call.name,
    }


def _splits(call: Call, n: int) -> tuple[list[int], list[int]]:
    if call.kind != "all_to_all" or call.source is None or call.target is None:
        return [0] * n, [0] * n
    send = list(call.sizes) if call.sizes is not None else [call.source.shape[call.dim] // n] * n
    recv = list(call.recv_sizes) if call.recv_sizes is not None else [call.target.shape[call.dim] // n] * n
    return send, recv


def _mismatch(group: Group, seq: int, texts: list[dict[str, Any]]) -> CollectiveMismatch:
    first = texts[0]
    i, other = next((i, t) for i, t in enumerate(texts) if t["said"] != first["said"])
    field = next(f for f, value in first["said"].items() if other["said"][f] != value)
    a, b = group.members[0], group.members[i]
    what = f"{group.label}.{first['said']['kind']}" if field != "kind" else f"group {group.label!r}"
    return CollectiveMismatch(
        f"{what}: collective number {seq} of {list(group.members)} differs between ranks in its {field}: "
        f"rank {a} called {first['call']} ({first['line']}), rank {b} called {other['call']} ({other['line']})",
        CURES.get(field, f"pass the same {field} on every rank"),
        ranks=(a, b),
        field=field,
    )


def _hash(said: dict[str, Any]) -> list[int]:
    digest = hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]


def _all_gather(link: Link, head: Tensor) -> list[Tensor]:
    records = [torch.empty_like(head) for _ in range(link.size)]
    host = link.on_host
    host.finish(host.data.allgather([records], [head]))
    return records


def _exchange_texts(link: Link, text: bytes, lengths: list[int]) -> list[dict[str, Any]]:
    wire = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    pieces = gathered(link.on_host, wire, [(n,) for n in lengths]) or []
    return [json.loads(bytes(p.tolist())) for p in pieces]


def move_message(link: Link, group: Group, message: Message) -> None:
    """Moves a message's data, as bytes: a broadcast between two. Each direction has a link of its own."""
    src, dst = ends(group, message)
    x = message.tensor
    move(link, Call("broadcast", x, x, root=0 if src < dst else 1))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _half(record: dict[str, Any]) -> str:
    said = record["said"]
    named = f" named {said['name']!r}" if said["name"] else ""
    return f"{said['dtype']}{said['shape']}{named} ({record['line']})"
