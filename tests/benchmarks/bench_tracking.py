"""What running on virtual devices costs, against peers: `python tests/benchmarks/bench_tracking.py`.

CPU time of one training step of a small GPT (4 layers, width 256, 4 heads, sequence 128, vocabulary 1024, global batch 16,
float32; forward, backward, gradient sum, SGD) on one thread: the single device, a plain loop over 8 replicas, 8 virtual
ranks with and without tracking, and torch's own threaded process group with 8 ranks, which tracks nothing. Every round runs
all of them after each other, so that a busy machine slows all alike; a round's ratio is to its own single device, and the
median over rounds is reported. `--imports` measures how long it takes to import emu and to get through a first step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from emu.models import Config, Decoder
from emu.spmd.mesh import Mesh
from emu.virtual.launch import run_virtual

RANKS, BATCH = 8, 16
CONFIG = Config(layers=4, width=256, heads=4, vocab=1024, seq=128, bias=False)


def batch(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.seq + 1), generator=torch.Generator().manual_seed(0))
    rows = tokens[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
    return rows[:, :-1], rows[:, 1:]


class Trainer:
    """One replica: its model, its rows, its optimizer."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.model = Decoder(CONFIG, seed=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rows = batch(rank, ranks)

    def gradients(self) -> list[nn.Parameter]:
        self.optimizer.zero_grad()
        self.model.loss_sum(*self.rows).backward()
        return list(self.model.parameters())

    def step(self, reduce: Any = None) -> None:
        parameters = self.gradients()
        if reduce is None:
            for p in parameters:
                p.grad.div_(BATCH * CONFIG.seq)  # type: ignore[union-attr]
        else:  # in one bucket, as the peers were measured
            flat = torch.cat([p.grad.view(-1) for p in parameters])  # type: ignore[union-attr]
            reduce(flat)
            flat.div_(BATCH * CONFIG.seq)
            for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(piece.view_as(p))  # type: ignore[union-attr]
        self.optimizer.step()


class Stopwatch:
    """CPU time of the whole process from the first rank to begin to the last to end, after a warm-up that all share."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def train(self, trainer: Trainer, steps: int, barrier: Any = lambda: None, reduce: Any = None) -> None:
        trainer.step(reduce)
        barrier()
        self.starts.append(time.process_time())
        for _ in range(steps):
            trainer.step(reduce)
        barrier()
        self.ends.append(time.process_time())

    def per_step_s(self, steps: int) -> float:
        return (max(self.ends) - min(self.starts)) / steps


def single(steps: int) -> float:
    watch = Stopwatch()
    watch.train(Trainer(), steps)
    return watch.per_step_s(steps)


def replicas(steps: int) -> float:
    """The least that 8 ranks can cost: their arithmetic in a plain loop."""
    trainers = [Trainer(rank, RANKS) for rank in range(RANKS)]

    def step() -> None:
        parameters = [trainer.gradients() for trainer in trainers]
        for same in zip(*parameters):
            total = same[0].grad.clone()
            for p in same[1:]:
                total.add_(p.grad)
            for p in same:
                p.grad.copy_(total).div_(BATCH * CONFIG.seq)
        for trainer in trainers:
            trainer.optimizer.step()

    step()
    start = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start) / steps


def virtual(steps: int, track: bool) -> float:
    watch = Stopwatch()

    def program(rank: Any) -> None:
        dp = rank.group("dp")
        watch.train(Trainer(rank, RANKS), steps, dp.barrier, dp.all_reduce)

    run_virtual(program, Mesh(dp=RANKS), track=track)
    return watch.per_step_s(steps)


def threaded(steps: int) -> float:
    import torch.distributed as dist

    watch = Stopwatch()
    in_threads(RANKS, lambda rank: watch.train(Trainer(rank, RANKS), steps, dist.barrier, dist.all_reduce))
    return watch.per_step_s(steps)


def in_threads(ranks: int, program: Any) -> None:
    """Runs program(rank) on torch's threaded process group, as its own tests use it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg as pg

    failures: list[BaseException] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    pg._install_threaded_pg()
    store = dist.HashStore()

    def main(rank: int) -> None:
        torch.autograd.set_multithreading_enabled(False)  # a backward that waits must not keep the others' from running
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            program(rank)
        except BaseException as error:
            failures.append(error)
            pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        pg.ProcessLocalGroup.reset()
        pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    if failures:
        raise failures[0]


def tracking(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    ways = {
        "single device": single,
        "plain loop over 8 replicas": replicas,
        "8 virtual ranks, untracked": lambda n: virtual(n, track=False),
        "8 virtual ranks, tracked": lambda n: virtual(n, track=True),
        "torch's threaded group, 8": threaded,
    }
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round in range(rounds + 1):  # the first one warms up
        for name in names if round % 2 else names[::-1]:
            took = ways[name](steps)
            if round:
                seconds[name].append(took)
    base = seconds["single device"]
    print(f"{'CPU time of a step':30} {'median':>9} {'of single':>10} {'from - to':>14}")
    for name, times in seconds.items():
        ratios = [t / b for t, b in zip(times, base)]
        print(
            f"{name:30} {statistics.median(times) * 1e3:6.0f} ms {statistics.median(ratios):10.2f}"
            f" {min(ratios):7.2f} - {max(ratios):.2f}"
        )
    off, on, peer = (seconds[names[i]] for i in (2, 3, 4))
    over = statistics.median(a / b for a, b in zip(on, off))
    against = statistics.median(a / b for a, b in zip(on, peer))
    print(f"tracked over untracked: {over:.3f} (at most 1.2)")
    print(f"tracked over torch's threaded group: {against:.3f} (at most 1.0)")


IMPORT = """
import time, torch
start = time.perf_counter()
import emu
print(time.perf_counter() - start)
"""
FIRST = """
import time, torch
torch.optim.SGD([torch.zeros(1)])  # torch loads its compiler for any optimizer, which takes it a second
start = time.perf_counter()
import emu
from torch import nn
def program(rank):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    for p in model.parameters():
        rank.group("dp").all_reduce(p.grad)
    optimizer.step()
emu.launch(program, emu.Mesh(dp=8))
print(time.perf_counter() - start)
"""


def imports(rounds: int) -> None:
    for name, code, most in (
        ("import emu over import torch", IMPORT, 0.2),
        ("first step after import torch", FIRST, 1.0),
    ):
        out = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(rounds)]
        print(f"{name}: median {statistics.median(out):.3f} s, worst {max(out):.3f} s (at most {most})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--imports", action="store_true")
    given = parser.parse_args()
    imports(given.rounds) if given.imports else tracking(given.rounds, given.steps)
