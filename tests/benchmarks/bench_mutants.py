"""What a proof costs: 64 ranks, dp 2, cp 2, pp 4, tp 4, on a toy of 4 layers, against one step of the same program.

CPU time of `emu.verify` without mutants, and of one mutant, each as so many steps; then the time by the clock of some
mutants in one process and in one a core, whose verdicts are the same.

python tests/benchmarks/bench_mutants.py [mutants] [rounds]
"""

from __future__ import annotations

import sys
import time

import torch
from rounds import compared

import emu
import emu.equivalence.scoring as scoring
from emu.models import Config, Decoder
from emu.parallel import mesh_of

TOY = Config(layers=4, width=16, heads=4, kv_heads=4, ffn=32, vocab=17, seq=16, norm="rms", positions="rotary")
PLAN = emu.Plan("dp=2,cp=2,pp=4,tp=4", global_batch=4, seq=16, microbatches=2, sp=True, zero=1)
BATCH = (torch.randint(0, 17, (4, 16)), torch.randint(0, 17, (4, 16)))


def program(rank):
    distributed = emu.parallelize(Decoder(TOY), PLAN, rank)
    optimizer = distributed.optimizer(torch.optim.SGD, lr=0.1)
    distributed.backward(BATCH)
    optimizer.step()


def step() -> float:
    start_s = time.process_time()
    emu.launch(program, mesh_of(PLAN))
    return time.process_time() - start_s


def verified(mutants: int, processes: int, clock=time.process_time) -> float:
    shared_out, scoring.worth = scoring.worth, lambda jobs, seconds: processes
    start_s = clock()
    try:
        assert emu.verify(lambda: Decoder(TOY), PLAN, mutants=mutants)
    finally:
        scoring.worth = shared_out
    return clock() - start_s


def main() -> None:
    torch.set_num_threads(1)
    mutants, rounds = (int(word) for word in (*sys.argv[1:], "8", "3")[:2])
    compared(
        {"single: launch": step, "verify": lambda: verified(0, 1), "and 2 mutants": lambda: verified(2, 1)}, rounds
    )
    processes = scoring.worth(mutants, 1e3)
    alone_s, shared_s = (verified(mutants, n, time.perf_counter) for n in (1, processes))
    print(f"{mutants} mutants by the clock: {alone_s:.1f} s in one process, {shared_s:.1f} s in {processes}")


if __name__ == "__main__":
    main()
