"""What sharded training costs on virtual devices, against torch's own: `python tests/benchmarks/bench_sharding.py`.

CPU time of one training step of bench_tracking.py's small GPT (global batch 16, float32, SGD) on one thread: the single
device; emu's data parallelism with buckets over 8 ranks; emu's ZeRO-3, gathered block by block, over 4 and 8 ranks, with
tracking and without; and torch's `fully_shard` (FSDP2) of every block and the root, over 4 and 8 ranks of its threaded
process group, which tracks nothing. Every round runs all of them after each other, in turning order; a round's ratio is
to its own single device, and medians over rounds are reported, with the middle half of the rounds beside them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from bench_tracking import BATCH, CONFIG, Stopwatch, batch, in_threads, single
from rounds import compared

import emu
from emu.models import Decoder
from emu.parallel import DataParallel
from emu.virtual.launch import run_virtual

BUCKET_BYTES = 2 * 2**20  # about eight buckets of this model's 15 MB


class Sharded:
    """One rank's model under emu's data parallelism."""

    def __init__(self, rank: Any, **options: Any) -> None:
        self.dist = DataParallel(Decoder(CONFIG, seed=0), rank, "dp", **options)
        self.optimizer = self.dist.optimizer(torch.optim.SGD, lr=0.1)
        self.rows = batch(rank.id, rank.group("dp").size)

    def step(self, _: Any = None) -> None:
        self.optimizer.zero_grad()
        self.dist.loss_sum(*self.rows).backward()
        self.dist.finish(BATCH * CONFIG.seq)
        self.optimizer.step()


class FullySharded:
    """One rank's model under torch's FSDP2. The root module's own call gathers, so the loss is made of its logits."""

    def __init__(self, rank: int, ranks: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = Decoder(CONFIG, seed=0)
        mesh = init_device_mesh("cpu", (ranks,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rows = batch(rank, ranks)

    def step(self, _: Any = None) -> None:
        self.optimizer.zero_grad()
        (self.model.loss_sum(*self.rows) / (BATCH * CONFIG.seq)).backward()
        self.optimizer.step()


def ours(steps: int, ranks: int, track: bool, **options: Any) -> float:
    watch = Stopwatch()

    def program(rank: Any) -> None:
        watch.train(Sharded(rank, **options), steps, rank.group("dp").barrier)

    run_virtual(program, emu.Mesh(dp=ranks), track=track)
    return watch.per_step_s(steps)


def peer(steps: int, ranks: int) -> float:
    import torch.distributed as dist

    watch = Stopwatch()
    in_threads(ranks, lambda rank: watch.train(FullySharded(rank, ranks), steps, dist.barrier))
    return watch.per_step_s(steps)


def main(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float]] = {
        "single device": lambda: single(steps),
        "emu DDP, buckets, 8 tracked": lambda: ours(steps, 8, True, bucket_bytes=BUCKET_BYTES),
    }
    for n in (4, 8):
        ways |= {
            f"emu ZeRO-3, {n} untracked": lambda n=n: ours(steps, n, False, zero=3),
            f"emu ZeRO-3, {n} tracked": lambda n=n: ours(steps, n, True, zero=3),
            f"torch FSDP2, {n} threads": lambda n=n: peer(steps, n),
        }
    seconds = compared(ways, rounds)
    for n in (4, 8):
        pairs = zip(seconds[f"emu ZeRO-3, {n} tracked"], seconds[f"torch FSDP2, {n} threads"])
        print(
            f"ZeRO-3 tracked over torch's FSDP2, {n} ranks: {statistics.median(a / b for a, b in pairs):.3f} (at most 1.0)"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    main(given.rounds, given.steps)
