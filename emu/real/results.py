"""Carries results between ranks as JSON for their structure and bytes for their tensors; nothing is unpickled.

What can be carried: None, bool, int, float (NaN and infinities included), str; lists, tuples and dicts (keys: str, int,
float, bool, None) of these, nested; dense tensors of any dtype, which arrive on the CPU without autograd, and those of
shape runs, which have no values; Grads with their layouts; Layout, Shard, Slices, Replicate, Partial.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from emu.real.decoding import MOST_LEVELS, decode
from emu.real.links import Link
from emu.real.moves import as_bytes, from_bytes, gathered
from emu.spmd.errors import EmuError
from emu.spmd.layout import Layout, Only, Partial, Replicate, Shard
from emu.spmd.rank import Grads
from emu.spmd.slices import Slices

MOST_BITS = 10_000  # of a whole number: Python itself reads no text of many more digits


def encode(value: Any, tensors: list[Tensor], path: str = "result", level: int = 0) -> Any:
    """The structure of a value as JSON data; its tensors are appended to `tensors`.

    Raises:
        EmuError: a type that cannot be carried, what is nested deeper than MOST_LEVELS, a whole number of more than
            MOST_BITS; names its place.
    """
    if value is None or type(value) in (bool, str) or (type(value) is int and value.bit_length() <= MOST_BITS):
        return value
    if level > MOST_LEVELS:
        raise EmuError(f"{path[:60]}... is nested more than {MOST_LEVELS} levels deep", "return a flatter result")
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, Tensor) and value.is_meta:
        return {"meta": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensors.append(value.detach().to("cpu"))
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Grads):
        return {
            "grads": [_items(value, tensors, path, level), _items(value.layouts, tensors, f"{path}.layouts", level)]
        }
    if isinstance(value, Layout):
        return {"layout": _items(value.placements, tensors, path, level)}
    if isinstance(value, Shard):
        return {"shard": value.dim}
    if isinstance(value, Slices):
        return {"slices": [value.dim, value.ranges]}
    if isinstance(value, Only):
        return {"only": list(value.at)}
    if isinstance(value, Replicate):
        return {"replicate": None}
    if isinstance(value, Partial):
        return {"partial": value.op}
    if type(value) is list or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        parts = [encode(v, tensors, f"{path}[{i}]", level + 1) for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": parts}
    if isinstance(value, dict):
        return {"dict": _items(value, tensors, path, level)}
    raise EmuError(
        f"{path} is a {type(value).__name__}, which cannot be gathered from other processes",
        "return tensors, numbers, strings, None, emu.grads(...), and lists, tuples and dicts of these",
    )


def _items(items: Any, tensors: list[Tensor], path: str, level: int) -> list[Any]:
    return [
        [encode(k, tensors, f"a key of {path}", level + 1), encode(v, tensors, f"{path}[{k!r}]", level + 1)]
        for k, v in items.items()
    ]


def gather(link: Link, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank. All ranks must call it.

    Args:
        link: joins all ranks, with a control backend.

    Raises:
        EmuError: on every rank, when one has a value that cannot be carried.
    """
    tensors: list[Tensor] = []
    try:
        said: dict[str, Any] = {"value": encode(value, tensors)}
        said["tensors"] = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    except EmuError as error:
        said, tensors = {"error": error.message, "hint": error.hint}, []
    texts = [json.loads(bytes(wire.tolist())) for wire in _all(link, json.dumps(said).encode())]
    for rank, text in enumerate(texts):
        if "error" in text:
            raise EmuError(f"rank {rank}: {text['error']}", text["hint"], rank=rank)
    blobs = _all(link, torch.cat([torch.empty(0, dtype=torch.uint8), *map(as_bytes, tensors)]))
    return [decode(text["value"], _cut(blob, text["tensors"])) for text, blob in zip(texts, blobs)]


def _all(link: Link, data: bytes | Tensor) -> list[Tensor]:
    """Every rank's bytes."""
    wire = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
    control = link.on_host
    if link.size == 1:
        return [wire]
    lengths = gathered(control, torch.tensor([wire.numel()]), [(1,)] * link.size) or []
    return gathered(control, wire, [(int(n),) for n in lengths]) or []


def _cut(blob: Tensor, specs: list[Any]) -> list[Tensor]:
    tensors, at = [], 0
    for name, shape in specs:
        like = torch.empty(0, dtype=getattr(torch, name))
        n = torch.Size(shape).numel() * like.element_size()
        # A copy of its own: a slice may start at an address that the dtype cannot.
        tensors.append(from_bytes(blob[at : at + n].clone(), like, shape))
        at += n
    return tensors
