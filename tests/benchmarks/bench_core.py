"""What the scheduler costs: 512 ranks run 100 all-reduces of 1,000 floats. Prints CPU seconds, the median of five.

python tests/benchmarks/bench_core.py [ranks]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from emu.spmd import Mesh
from emu.virtual.launch import run_virtual

LIMIT_S = 5.0


def program(rank):
    group, x = rank.group(), torch.ones(1000)
    for _ in range(100):
        group.all_reduce(x)
        x.fill_(1.0)


def main() -> None:
    torch.set_num_threads(1)
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    taken_s = []
    for _ in range(5):
        start_s = time.process_time()
        run_virtual(program, Mesh(ranks=ranks))
        taken_s.append(time.process_time() - start_s)
    median_s = statistics.median(taken_s)
    print(f"{ranks} ranks x 100 all-reduces of 1,000 floats: {median_s:.2f} s of CPU (limit {LIMIT_S:g} s at 512)")
    print(f"  {median_s / ranks / 100 * 1e6:.0f} us a rank and call; runs: {', '.join(f'{t:.2f}' for t in taken_s)}")


if __name__ == "__main__":
    main()
