"""Data parallelism of every form, for virtual and real devices alike, and torch's own fully_shard beside it.

torchrun sharded.py <folder> writes what every rank got: emu's cases, and FSDP2's over the same processes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import emu
from emu.models import GPT, Config

# Rotary positions: without them the gradient of the keys' bias is truly 0, and noise would be compared with noise.
CONFIG = Config(layers=2, width=12, heads=2, ffn=7, vocab=13, seq=5, positions="rotary")
ROWS = {2: [3, 4], 4: [3, 0, 2, 2]}  # of every rank, by how many there are
STEPS = 3
LOOKS = (0, STEPS - 1)  # after which steps gradients are gathered
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
MIXED = "bf16-mixed"

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "ddp in buckets": {"zero": 0, "bucket_bytes": 700, "microbatches": 2},
    "zero 1": {"zero": 1, "bucket_bytes": 700, "clip": 0.5, "microbatches": 2},
    "zero 2": {"zero": 2, "bucket_bytes": 700, "clip": 0.5, "microbatches": 2},
    "zero 3": {"zero": 3},
    "zero 3, clipped, microbatches": {"zero": 3, "clip": 0.5, "microbatches": 3, "find_unused": True},
    "zero 3, kept whole": {"zero": 3, "reshard_after_forward": False, "prefetch": 2, "replicated": ["*norm*"]},
    "zero 3, one unit for each module": {"zero": 3, "units": ["embedding", "blocks.*.attention.?", "head"]},
    "by owner 2": {"zero": 2, "bucket_bytes": 700, "by_owner": True, "clip": 0.5},
    "by owner 3": {"zero": 3, "by_owner": True},
    "bf16": {"zero": 3, "precision": MIXED},
}
HYBRID: dict[str, dict[str, Any]] = {
    "hybrid 1": {"zero": 1, "replicate": 2, "clip": 0.5},
    "hybrid 2": {"zero": 2, "replicate": 2, "microbatches": 2},
    "hybrid 3": {"zero": 3, "replicate": 2, "clip": 0.5, "microbatches": 2},
    "as many replicas as ranks": {"zero": 3, "replicate": 4},
    "hybrid bf16": {"zero": 3, "replicate": 2, "precision": MIXED},
}


def cases(ranks: int) -> dict[str, dict[str, Any]]:
    return {**CASES, **(HYBRID if ranks == 4 else {})}


def batch(ranks: int, step: int) -> emu.Batch:
    """The whole batch of a step; some labels do not count."""
    g = torch.Generator().manual_seed(step)
    rows = sum(ROWS[ranks])
    x, y = (torch.randint(0, CONFIG.vocab, (rows, CONFIG.seq), generator=g) for _ in "xy")
    return emu.Batch(x, y.masked_fill(torch.rand(y.shape, generator=g) < 0.25, -100))


def model(dtype: torch.dtype = torch.float64) -> GPT:
    return GPT(CONFIG, seed=0).to(dtype)


def program(rank: emu.Rank) -> dict[str, Tensor]:
    """Every case's losses, norms, gradients of the first and the last step, and parameters in the end, whole."""
    out: dict[str, Tensor] = {}
    for case, options in cases(rank.group().size).items():
        out.update({f"{case}|{key}": value for key, value in trained(rank, **options).items()})
    return out


def trained(rank: emu.Rank, clip: float | None = None, microbatches: int = 1, **options: Any) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    dtype = torch.float32 if "precision" in options else torch.float64
    dist = emu.DataParallel(model(dtype), rank, "dp", **options)
    optimizer = dist.optimizer(torch.optim.AdamW, clip=clip, **ADAM)
    ranks = dist.group.size
    for step in range(STEPS):
        optimizer.zero_grad()
        out[f"{step} loss"] = dist.backward(batch(ranks, step), ROWS[ranks], microbatches)
        if step in LOOKS:
            out.update({f"{step} gradient {k}": v for k, v in dist.gather_gradients().items()})
        norm = optimizer.step().norm
        if norm is not None:
            out[f"{step} norm"] = norm
    out.update({f"parameter {k}": v for k, v in dist.gather_parameters().items()})
    return out


def fully_sharded(rank: int, ranks: int, divide: bool = True) -> dict[str, Tensor]:
    """The same steps by FSDP2: losses are sums, and the global number of tokens is its gradient divide factor.

    Args:
        divide: False leaves its own factor, the number of ranks: what a mean of sums would be.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded: Any = model()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), **ADAM)
    out: dict[str, Tensor] = {}
    first = sum(ROWS[ranks][:rank])
    rows = slice(first, first + ROWS[ranks][rank])
    for step in range(STEPS):
        whole = batch(ranks, step)
        if divide:
            for unit in (*sharded.blocks, sharded):
                unit.set_gradient_divide_factor(float(whole.tokens))
        optimizer.zero_grad()
        sharded.loss_sum(whole.x[rows], whole.y[rows]).backward()
        for name, p in sharded.named_parameters() if step in LOOKS else ():
            out[f"{step} gradient {name}"] = p.grad.full_tensor()
        optimizer.step()
    for name, p in sharded.named_parameters():
        out[f"parameter {name}"] = p.detach().full_tensor()
    return out


if __name__ == "__main__":
    from safetensors.torch import save_file

    folder, ranks = sys.argv[1], int(sys.argv[2])
    run = emu.launch(program, emu.Mesh(dp=ranks))
    (rank,) = run.results
    results = {
        "emu": run.results[rank],
        "fsdp2": fully_sharded(rank, ranks),
        "undivided": fully_sharded(rank, ranks, divide=False),
    }
    for name, tensors in results.items():
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, f"{folder}/{name}{rank}.safetensors")
