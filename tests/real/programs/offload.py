"""Layers' activations wait in the host's memory, under ZeRO-3, on virtual and real devices alike."""

from __future__ import annotations

import sys
from typing import Any

import torch

import emu
from emu.models import GPT, Config
from emu.parallel.checkpointing import checkpointed, offloaded

CONFIG = Config(layers=3, width=12, heads=2, ffn=7, vocab=13, seq=5, positions="rotary")
HOW: dict[str, dict[str, Any]] = {"plain": {}, "ahead": {"ahead": 2}, "checkpointed": {}}


def program(rank: emu.Rank) -> dict[str, Any]:
    """Gradients of every way, and of none."""
    out = {}
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, CONFIG.vocab, (4, CONFIG.seq), generator=g) for _ in "xy")
    for name in ("none", *HOW):
        model = GPT(CONFIG, seed=0).double()
        if name == "checkpointed":
            checkpointed(model, "full")
        if name in HOW:
            offloaded(model, rank, **HOW[name])
        dist = emu.DataParallel(model, rank, "dp", zero=3)
        dist.backward(emu.Batch(x, y))
        out |= {f"{name}|{key}": value for key, value in dist.gather_gradients().items()}
    return out


if __name__ == "__main__":
    from safetensors.torch import save_file

    from emu.trace.files import dumps

    run = emu.launch(program, emu.Mesh(dp=2))
    (rank,) = run.results
    save_file({k: v.contiguous().clone() for k, v in run.results[rank].items()}, f"{sys.argv[1]}/on{rank}.safetensors")
    with open(f"{sys.argv[1]}/trace{rank}.jsonl", "wb") as file:
        file.write(dumps(run.trace))
