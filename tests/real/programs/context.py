"""Attention across ranks, for virtual and real devices alike.

torchrun context.py <folder> writes what every rank got of all cases, whole and joined.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

import emu
from emu.parallel.context import attention, make_cut

LENGTH, HEADS, KV_HEADS, HEAD_DIM, ROWS = 37, 4, 2, 6, 2
CASES: dict[str, tuple[str, bool]] = {  # kind, and whether sequences are packed
    "ring": ("ring", False),
    "zigzag": ("zigzag", False),
    "zigzag packed": ("zigzag", True),
    "striped": ("striped", False),
    "all-gather": ("all-gather", False),
    "all-gather packed": ("all-gather", True),
    "ulysses": ("ulysses", False),
    "usp": ("usp", True),
}


def documents() -> Tensor:
    """Of tokens, in every row others."""
    ends = torch.tensor([[5, 6, 20], [11, 30, 31]])
    return (torch.arange(LENGTH)[None, None] >= ends[:, :, None]).sum(1)


def tensors() -> list[Tensor]:
    """q, k, v, and the gradient of the output."""
    g = torch.Generator().manual_seed(6)
    shapes = [(ROWS, heads, LENGTH, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def program(rank: emu.Rank, case: str) -> dict[str, Tensor]:
    """The output and the gradients of this rank's tokens."""
    kind, packed = CASES[case]
    group = rank.group("cp")
    cut = make_cut(kind, LENGTH, group.size, documents() if packed else None)
    *inputs, grad = (cut.own(x, group.rank, 2).clone() for x in tensors())
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention(q, k, v, cut, group, rank)
    out.backward(grad)
    found: dict[str, Any] = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return found


if __name__ == "__main__":
    from safetensors.torch import save_file

    everything: dict[str, Tensor] = {}
    here = 0
    for case in CASES:
        run = emu.launch(program, emu.Mesh(cp=int(os.environ["WORLD_SIZE"])), args=(case,))
        ((here, mine),) = run.results.items()
        everything.update({f"{case}|{key}": value.contiguous().clone() for key, value in mine.items()})
    save_file(everything, f"{sys.argv[1]}/context{here}.safetensors")
