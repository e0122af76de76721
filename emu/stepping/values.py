"""Values of tensors as plain data, in as few digits as say them exactly."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emu.canvas.record import plain
from emu.stepping.chunks import Walk
from emu.virtual.kernel import name_of

ELEMENTS = 1024  # the most of one tensor that a page is given


def plain_values(t: Tensor, most: int = ELEMENTS) -> Any:
    """Nested lists of a tensor's values; None if they are more than `most`, or if there are none (shapes alone).

    Numbers have as many digits as their dtype needs: 0.1 in float32 is 0.1. What JSON has no number for is text.
    """
    if t.is_meta or t.numel() > most:
        return None
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        t = settled(t.detach())
        if not t.dtype.is_floating_point or t.dtype == torch.float64:
            return plain(t.tolist())
        narrow = t.to(torch.float32).contiguous().numpy()
    return plain(narrow.astype(str).astype(np.float64).tolist())


def settled(t: Tensor) -> Tensor:
    """The same values in memory as they are read: torch conjugates, negates and zeroes some tensors only once they are used."""
    if t._is_zerotensor():
        return torch.zeros_like(t)
    return t.resolve_conj().resolve_neg()


def bytes_of(t: Tensor) -> bytes:
    """What a tensor holds, element after element. Much is asked of it, so the caller sees to a tensor of plain torch."""
    t = settled(t.detach()).contiguous()
    return ctypes.string_at(t.data_ptr(), t.nbytes)


def plain_walk(walk: Walk) -> dict[str, Any]:
    """The same as Walk.as_dict, as a page is given it, and of which dtype the numbers are."""

    def values(t: Tensor) -> Any:
        return plain_values(t, t.numel())

    return {
        "what": walk.what,
        "algorithm": walk.algorithm,
        "cuts": list(walk.cuts),
        "dim": walk.dim,
        "dtype": next((name_of(x.dtype) for x in walk.given.values()), ""),
        "given": {str(rank): values(x) for rank, x in walk.given.items()},
        "hops": [
            {
                "number": hop.number,
                "says": hop.says,
                "moves": [{**move._asdict(), "values": values(move.values)} for move in hop.moves],
                "held": {str(rank): values(x) for rank, x in hop.held.items()},
                "times_s": None if hop.times_s is None else list(hop.times_s),
            }
            for hop in walk.hops
        ],
    }
