"""Tensors as bytes in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from emu.parallel.state.blocks import Bytes

_COPIED = 1 << 20  # elements at a time
_NOT_NUMPYS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def memory_of(tensor: Tensor) -> Bytes | None:
    """The memory that a one-dimensional tensor lies in, to be read or written; None if it is a device's, or has gaps."""
    if tensor.device.type != "cpu" or tensor.stride(0) != 1:
        return None
    values = tensor.detach() if tensor.requires_grad else tensor
    return values.view(torch.uint8).numpy() if tensor.dtype in _NOT_NUMPYS else values.numpy().view(np.uint8)


def bytes_of(tensor: Tensor, start: int, stop: int) -> Iterator[Bytes]:
    """The bytes of elements [start, stop): as they lie in the host's memory, or copied there in small parts."""
    width, memory = tensor.element_size(), memory_of(tensor)
    if memory is not None:
        yield memory[start * width : stop * width]
        return
    for part in tensor.detach()[start:stop].split(_COPIED):
        yield torch.empty(len(part), dtype=part.dtype, device="cpu").copy_(part).view(torch.uint8).numpy()
