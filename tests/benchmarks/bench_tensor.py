"""What tensor parallelism costs on virtual devices, against torch's own: `python tests/benchmarks/bench_tensor.py`.

CPU time of one training step of bench_tracking.py's small GPT (global batch 16, float32, SGD) on one thread: the single
device; emu's tensor parallelism over 4 ranks, untracked and tracked, without and with sequence parallelism; and torch's
`parallelize_module` of the same blocks (DTensor, column- and row-parallel linear maps; embedding, norms and head whole)
over 4 ranks of its threaded process group, over 4 gloo processes (CPU time of all of them together), and under its
LocalTensorMode, none of which track anything. Every round runs all of them after each other, in turning order; a round's ratio
is to its own single device, and medians over rounds are reported, with the middle half of the rounds beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_tracking import BATCH, CONFIG, Stopwatch, batch, in_threads, single
from rounds import compared

import emu
from emu.models import Decoder
from emu.parallel import DataParallel, shard_model
from emu.virtual.launch import run_virtual

RANKS = 4


class Cut:
    """One rank's model under emu's tensor parallelism."""

    def __init__(self, rank: Any, sp: bool) -> None:
        model = Decoder(CONFIG, seed=0)
        self.dist = DataParallel(model, rank, sharding=shard_model(model, rank, sp=sp))
        self.optimizer = self.dist.optimizer(torch.optim.SGD, lr=0.1)
        self.rows = batch(0, 1)

    def step(self, _: Any = None) -> None:
        self.optimizer.zero_grad()
        self.dist.loss_sum(*self.rows).backward()
        self.dist.finish(BATCH * CONFIG.seq)
        self.optimizer.step()


class Parallelized:
    """One rank's model under torch's parallelize_module."""

    def __init__(self, rank: int = 0, ranks: int = RANKS) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (ranks,))
        self.model = Decoder(CONFIG, seed=0)
        columns, rows = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.o", "mlp.down")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {
            name: RowwiseParallel() for name in rows
        }
        for block in self.model.blocks:
            parallelize_module(block, mesh, plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)
        self.rows = batch(0, 1)

    def step(self, _: Any = None) -> None:
        self.optimizer.zero_grad()
        (self.model.loss_sum(*self.rows) / (BATCH * CONFIG.seq)).backward()
        self.optimizer.step()


def ours(steps: int, track: bool, sp: bool) -> float:
    watch = Stopwatch()

    def program(rank: Any) -> None:
        watch.train(Cut(rank, sp), steps, rank.group("tp").barrier)  # type: ignore[arg-type]

    run_virtual(program, emu.Mesh(tp=RANKS), track=track)
    return watch.per_step_s(steps)


def threaded(steps: int) -> float:
    import torch.distributed as dist

    watch = Stopwatch()
    in_threads(RANKS, lambda rank: watch.train(Parallelized(), steps, dist.barrier))  # type: ignore[arg-type]
    return watch.per_step_s(steps)


def _process(rank: int, steps: int, port: int, out: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    trainer = Parallelized()
    trainer.step()
    dist.barrier()
    start = time.process_time()
    for _ in range(steps):
        trainer.step()
    dist.barrier()
    out.put(time.process_time() - start)
    dist.destroy_process_group()


def processes(steps: int) -> float:
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_process, (steps, port, out), nprocs=RANKS)
    return sum(out.get() for _ in range(RANKS)) / steps


def local_tensors(steps: int) -> float:
    """All ranks in one thread: every tensor is a list of four."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode

    dist.init_process_group("fake", rank=0, world_size=RANKS)
    watch = Stopwatch()
    try:
        with LocalTensorMode(RANKS):
            watch.train(Parallelized(), steps)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    return watch.per_step_s(steps)


def main(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float]] = {
        "single device": lambda: single(steps),
        "emu TP, 4 untracked": lambda: ours(steps, False, False),
        "emu TP, 4 tracked": lambda: ours(steps, True, False),
        "emu TP + SP, 4 untracked": lambda: ours(steps, False, True),
        "emu TP + SP, 4 tracked": lambda: ours(steps, True, True),
        "torch DTensor, 4 threads": lambda: threaded(steps),
        "torch DTensor, 4 processes": lambda: processes(steps),
        "torch DTensor, LocalTensor 4": lambda: local_tensors(steps),
    }
    seconds = compared(ways, rounds)
    for name in ("emu TP, 4 tracked", "emu TP + SP, 4 tracked"):
        ratio = statistics.median(t / b for t, b in zip(seconds[name], seconds["single device"]))
        print(f"{name} over the single device: {ratio:.3f} (at most 1.7)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    main(given.rounds, given.steps)
