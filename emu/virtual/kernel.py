"""One kernel out of many ops: what rank.kernel(...) makes of what runs inside it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from emu.trace.ops import Op, default_work
from emu.virtual.hbm import Block, Ledger

_dtypes: dict[torch.dtype, str] = {}


def name_of(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return name


class Inner:
    """In place of a block: a storage made inside a kernel, which is this device's but takes none of its memory."""

    __slots__ = ("bytes", "category", "ledger", "scope", "uses", "watched")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.watched, self.bytes = ledger, True, 0
        self.category, self.scope = "temporary", ""
        self.uses = None


class OneKernel:
    """What happens inside rank.kernel(...)."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Any]] = []
        self.flops = self.bytes = 0
        self.dtype = "float32"
        self.dims: tuple[int, ...] = ()  # of the largest product inside: what tensor cores see of it
        self._most = 0
        self._read: set[int] = set()

    def saw(self, op: Op, args: Any, inputs: list[Tensor], outputs: Any) -> None:
        work = op.count(args, outputs) if op.count is not None else default_work(inputs, outputs)
        self.flops += work.flops
        if work.dims and work.flops > self._most:
            self._most, self.dims = work.flops, work.dims
        if outputs:
            self.dtype = name_of(outputs[0].dtype)
        for t in inputs:
            storage = t.untyped_storage()
            block = getattr(storage, "_emu", None)
            if type(block) is Block and id(storage) not in self._read:
                self._read.add(id(storage))
                self.bytes += t.nbytes
