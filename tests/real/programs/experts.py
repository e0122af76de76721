"""Mixtures of experts whose experts lie on other processes, for virtual and real devices alike.

torchrun experts.py <folder> writes what every rank got.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

import emu
from emu.models import Config, Decoder
from emu.parallel import shard_model
from emu.spmd import Rank

CONFIG = {
    "layers": 1, "width": 8, "heads": 4, "kv_heads": 2, "ffn": 5, "vocab": 13, "seq": 7, "positions": "rotary", "norm": "rms",
    "activation": "swiglu", "bias": False, "experts": 5, "top_k": 2, "balance": 0.1,
}  # fmt: skip
ROWS = 3  # fewer than ranks: some have none
STEPS = 2

# Mesh, whether sequence parallel, what is special about DataParallel, and about the model.
Case = tuple[dict[str, int], bool, dict[str, Any], dict[str, Any]]
CASES: dict[int, dict[str, Case]] = {
    2: {
        "ep": ({"dp": 2, "ep": 2}, False, {}, {}),
        "etp": ({"dp": 2, "etp": 2}, False, {"zero": 1}, {"shared_ffn": 4}),
        "ep over tp": ({"dp": 1, "tp": 2, "ep": 2}, True, {}, {"capacity": 0.75}),
    },
    4: {
        "ep": ({"dp": 4, "ep": 4}, False, {}, {"top_k": 1}),
        "ep and edp": ({"dp": 4, "ep": 2}, False, {"zero": 3}, {}),
        "ep and etp": ({"dp": 4, "ep": 2, "etp": 2}, False, {"zero": 2}, {"balance_over": "batch"}),
        "all": ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, True, {}, {"balance_over": "batch", "capacity": 1.0}),
        "without sp": ({"dp": 2, "tp": 2, "ep": 4}, False, {}, {"shared_ffn": 4, "capacity": 0.75}),
    },
}


def mesh(ranks: int, case: str) -> emu.Mesh:
    return emu.Mesh(**CASES[ranks][case][0])


def trained(rank: Rank, case: str) -> dict[str, Tensor]:
    """Losses, and this rank's part of gradients and parameters, of some steps in float64."""
    _, sp, options, special = CASES[rank.world_size][case]
    model = Decoder(Config(**{**CONFIG, **special}), seed=0).double()
    dist = emu.DataParallel(model, rank, "dp", sharding=shard_model(model, rank, sp=sp), **options)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    out = {}
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        x, y = (torch.randint(0, CONFIG["vocab"], (ROWS, CONFIG["seq"]), generator=g) for _ in "xy")
        loss = dist.backward(emu.Batch(x, y), microbatches=2)
        out[f"loss {step}"] = loss.reshape(1)
        out |= {f"gradient {step} {name}": value for name, value in dist.gather_gradients().items()}
        optimizer.step()
    return {name: value.clone() for name, value in out.items()}


def main(folder: str) -> None:
    from safetensors.torch import save_file

    ranks = int(os.environ["WORLD_SIZE"])
    for case in CASES[ranks]:
        run = emu.launch(trained, mesh(ranks, case), args=(case,))
        ((rank, result),) = run.results.items()
        save_file(result, f"{folder}/{case} {rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
