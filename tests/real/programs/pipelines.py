"""Pipelines, for virtual and real devices alike.

torchrun pipelines.py <folder> writes what every rank got of all cases.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import emu
from emu.models import Config, Decoder
from emu.parallel import Pipeline

CONFIG = Config(layers=8, width=8, heads=2, ffn=7, vocab=11, seq=5, tied=True, positions="rotary")
ROWS = 7
STEPS = 2
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1f1b": ({"pp": 4}, {"schedule": "1f1b", "microbatches": 6}),
    "zb-h1": ({"pp": 4}, {"schedule": "zb-h1", "microbatches": 6}),
    "zb-v": ({"pp": 4}, {"schedule": "zb-v", "microbatches": 5}),
    "few": ({"pp": 4}, {"schedule": "gpipe", "microbatches": 2, "recompute": True}),
    "interleaved": ({"pp": 2, "dp": 2}, {"schedule": "interleaved", "chunks": 2, "microbatches": 3, "zero": 3}),
    "dualpipe": ({"dp": 2, "pp": 2}, {"schedule": "dualpipe", "microbatches": 3, "zero": 1}),
}


def batch(step: int) -> emu.Batch:
    """Some labels do not count."""
    g = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, CONFIG.vocab, (ROWS, CONFIG.seq), generator=g) for _ in "xy")
    return emu.Batch(x, y.masked_fill(torch.rand(y.shape, generator=g) < 0.25, -100))


def program(rank: emu.Rank, case: str) -> dict[str, Tensor]:
    """Losses, norms, the first step's gradients, the parameters after all, and the loss then: what this rank has."""
    axes, how = CASES[case]
    pipe = Pipeline(Decoder(CONFIG, seed=0).double(), rank, *(axis for axis in axes if axis == "dp"), **how)
    optimizer = pipe.optimizer(torch.optim.AdamW, clip=0.5, **ADAM)
    out: dict[str, Tensor] = {}
    for step in range(STEPS):
        out[f"loss {step}"] = pipe.backward(batch(step))
        if step == 0:
            out.update({f"gradient {k}": v.clone() for k, v in pipe.gather_gradients().items()})
        out[f"norm {step}"] = optimizer.step().norm
    out.update({f"parameter {k}": v.detach().clone() for k, v in pipe.gather_parameters().items()})
    out["loss after"] = pipe.evaluate(batch(STEPS))
    return out


if __name__ == "__main__":
    from safetensors.torch import save_file

    found: dict[str, Tensor] = {}
    here = 0
    for case, (axes, _) in CASES.items():
        ((here, mine),) = emu.launch(program, emu.Mesh(**axes), args=(case,)).results.items()
        found.update({f"{case}|{key}": value.contiguous().clone() for key, value in mine.items()})
    save_file(found, f"{sys.argv[1]}/pipelines{here}.safetensors")
