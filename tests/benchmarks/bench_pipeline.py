"""What pipelines cost on virtual devices, against torch's own: `python tests/benchmarks/bench_pipeline.py`.

CPU time of one training step of bench_tracking.py's small GPT (global batch 16, float32, SGD) in 8 microbatches on one
thread: the single device, which adds up the microbatches' gradients; emu's pipelines of 4 ranks, 1F1B untracked and tracked
and other schedules tracked (those with two stages a rank have twice the layers, and their own single device); and torch's
Schedule1F1B over 4 gloo processes (CPU time of all of them together), which tracks nothing. Every round runs all of them
after each other, in turning order; a round's ratio is to its own single device, and medians over rounds are reported, with
the middle half of the rounds beside them. `--schedules` measures how long it takes to build and check every schedule.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bench_tracking import BATCH, CONFIG, Stopwatch, batch
from rounds import compared
from torch import nn

import emu
from emu.models import Config, Decoder
from emu.parallel import Pipeline
from emu.parallel.pipeline import Schedule, Times, check, lowered, make
from emu.parallel.pipeline.needs import _kept
from emu.parallel.pipeline.schedules import SCHEDULES
from emu.spmd import PlanError
from emu.virtual.launch import run_virtual

RANKS, MICROBATCHES = 4, 8
DEEP = replace(CONFIG, layers=2 * CONFIG.layers)  # for two stages a rank
TOKENS = BATCH * CONFIG.seq


class Accumulated:
    """The single device: gradients of one microbatch after the other are added up."""

    def __init__(self, config: Config) -> None:
        self.model = Decoder(config, seed=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        x, y = batch(0, 1)
        self.microbatches = list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)))

    def step(self, _: Any = None) -> None:
        self.optimizer.zero_grad()
        for x, y in self.microbatches:
            self.model.loss_sum(x, y).backward()
        for p in self.model.parameters():
            p.grad.div_(TOKENS)  # type: ignore[union-attr]
        self.optimizer.step()


class Piped:
    """One rank of emu's pipeline."""

    def __init__(self, rank: Any, config: Config, schedule: str) -> None:
        chunks = 2 if schedule == "interleaved" else 1
        model = Decoder(config, seed=0)
        self.dist = Pipeline(model, rank, schedule=schedule, microbatches=MICROBATCHES, chunks=chunks)
        self.optimizer = self.dist.optimizer(torch.optim.SGD, lr=0.1)
        self.batch = batch(0, 1)

    def step(self, _: Any = None) -> None:
        self.optimizer.zero_grad()
        self.dist.backward(self.batch)
        self.optimizer.step()


def single(steps: int, config: Config = CONFIG) -> float:
    watch = Stopwatch()
    watch.train(Accumulated(config), steps)  # type: ignore[arg-type]
    return watch.per_step_s(steps)


def ours(steps: int, schedule: str, track: bool = True, config: Config = CONFIG) -> float:
    watch = Stopwatch()

    def program(rank: Any) -> None:
        watch.train(Piped(rank, config, schedule), steps, rank.group("pp").barrier)  # type: ignore[arg-type]

    run_virtual(program, emu.Mesh(pp=RANKS), track=track)
    return watch.per_step_s(steps)


class Stage(nn.Module):
    """A quarter of the model by hand, as torch's pipelining wants it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        model = Decoder(CONFIG, seed=0)
        each = CONFIG.layers // RANKS
        self.embedding = model.embedding if rank == 0 else None
        self.positions = model.positions if rank == 0 else None
        self.blocks = model.blocks[rank * each : (rank + 1) * each]
        self.norm = model.norm if rank == RANKS - 1 else None
        self.head = model.head if rank == RANKS - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None and self.positions is not None:
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _process(rank: int, steps: int, port: int, out: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    stage = Stage(rank)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    schedule = Schedule1F1B(
        PipelineStage(stage, rank, RANKS, torch.device("cpu")), MICROBATCHES, loss_fn=loss, scale_grads=False
    )
    x, y = batch(0, 1)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == RANKS - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        for p in stage.parameters():
            p.grad.div_(TOKENS)  # type: ignore[union-attr]
        optimizer.step()

    step()
    dist.barrier()
    start = time.process_time()
    for _ in range(steps):
        step()
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


def schedules(rounds: int, ranks: int = 16, microbatches: int = 128) -> None:
    """Every schedule; the automatic one, which has a limit of its own (2 s), at 1F1B's memory and twice that."""
    for chunks in (1, 2):
        for memory in (ranks, 2 * ranks):
            spent = []
            for i in range(rounds):
                times = Times(
                    11.325 / chunks + i * 1e-9, 11.308 / chunks, 8.109 / chunks, 0.378
                )  # another each: make remembers
                start = time.process_time()
                make("auto", ranks, microbatches, chunks, times=times, memory=memory, weight_share=0.43)
                spent.append((time.process_time() - start) * 1e3)
            print(
                f"auto x {chunks}, memory {memory}, ms: {min(spent):.0f}, median {statistics.median(spent):.0f} (at most 2000)"
            )
    print(f"p = {ranks}, m = {microbatches}, ms: {'build + check':>21} {'median':>7} {'lower':>6}  (at most 200)")
    for name, generator in SCHEDULES.items():
        for chunks in (1, 2, 4):
            built: list[float] = []
            lowering: list[float] = []
            try:
                for _ in range(rounds if name != "auto" else 0):
                    _kept.cache_clear()  # of equal schedules they are kept
                    start = time.process_time()
                    made = Schedule.of(generator, ranks, microbatches, chunks)  # anew: make() remembers
                    check(made)
                    stop = time.process_time()
                    lowered(made)
                    built.append((stop - start) * 1e3)
                    lowering.append((time.process_time() - stop) * 1e3)
            except PlanError:
                continue  # it has no such chunks
            if built:
                print(f"{name:18} x {chunks} {min(built):21.0f} {statistics.median(built):7.0f} {min(lowering):6.0f}")


def main(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float]] = {
        "single device, 8 microbatches": lambda: single(steps),
        "emu 1F1B, 4 untracked": lambda: ours(steps, "1f1b", track=False),
        "emu 1F1B, 4 tracked": lambda: ours(steps, "1f1b"),
        "emu GPipe, 4 tracked": lambda: ours(steps, "gpipe"),
        "emu ZB-H1, 4 tracked": lambda: ours(steps, "zb-h1"),
        "torch Schedule1F1B, 4 gloo": lambda: processes(steps),
    }
    seconds = compared(ways, rounds)
    base = seconds["single device, 8 microbatches"]
    print(
        f"emu 1F1B, 4 tracked, over the single device: "
        f"{statistics.median(t / b for t, b in zip(seconds['emu 1F1B, 4 tracked'], base)):.3f} (at most 1.3)"
    )
    compared(
        {
            "single device, 8 layers": lambda: single(steps, DEEP),
            "emu interleaved x 2, 4 tracked": lambda: ours(steps, "interleaved", config=DEEP),
            "emu ZB-V, 4 tracked": lambda: ours(steps, "zb-v", config=DEEP),
        },
        rounds,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedules", action="store_true")
    given = parser.parse_args()
    schedules(given.rounds) if given.schedules else main(given.rounds, given.steps)
