"""The head of a safetensors file: names, dtypes, shapes and places, as JSON. The rest of the file is the bytes.

safetensors' own writer makes copies of all tensors, so a head is written here; any safetensors reader reads the file.
See https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED_BYTES = 64


class Entry(NamedTuple):
    """One tensor of a file: its name, its dtype (a key of DTYPES) and its shape."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def bytes(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count * DTYPES[self.dtype].itemsize


def head(entries: Sequence[Entry], about: Mapping[str, str]) -> bytes:
    """What comes before the tensors' bytes, which follow in the same order without gaps.

    Entries come with their widest dtypes first: then every element lies at a multiple of its own size.
    """
    described: dict[str, object] = {"__metadata__": dict(about)}
    at = 0
    for entry in entries:
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text
