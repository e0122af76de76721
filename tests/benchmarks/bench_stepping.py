"""What stepping costs: `python tests/benchmarks/bench_stepping.py [ranks]`.

A training step of a small GPT is launched as ever, and stepped to its end; then single steps forth, steps back with a look at
a tensor, and looks at the state are timed. Prints CPU time against the launch, and the median of single calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

import emu
from emu.models import Config, Decoder

CONFIG = Config(layers=2, width=64, heads=4, vocab=256, seq=32, bias=False)


def program(rank: emu.Rank) -> None:
    model = Decoder(CONFIG, seed=0)
    rank.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, CONFIG.vocab, (2, CONFIG.seq + 1), generator=torch.Generator().manual_seed(int(rank)))
    model.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    for p in model.parameters():
        rank.group("dp").all_reduce(p.grad)
    optimizer.step()


def cpu_s(act: Callable[[], object]) -> float:
    start_s = time.process_time()
    act()
    return time.process_time() - start_s


def wall_ms(act: Callable[[], object], times: int = 15) -> float:
    took = []
    for _ in range(times):
        start_s = time.perf_counter()
        act()
        took.append(time.perf_counter() - start_s)
    return statistics.median(took) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    mesh = emu.Mesh(dp=ranks)
    emu.launch(program, mesh)
    launches = [cpu_s(lambda: emu.launch(program, mesh)) for _ in range(5)]
    stepped = []
    for _ in range(5):
        with emu.step(program, mesh) as s:
            stepped.append(cpu_s(lambda s=s: s.next(10**9)))
            steps = s.index
    launch_s, step_s = statistics.median(launches), statistics.median(stepped)
    print(f"{ranks} ranks, {steps} steps: launched in {launch_s:.3f} s of CPU, stepped to the end in {step_s:.3f} s")
    print(f"  {step_s / launch_s:.2f} times as long; {(step_s - launch_s) / steps * 1e6:.1f} us a step more")
    with emu.step(program, mesh) as s:
        s.until("optimizer")
        rank = s.op.rank
        name = next(iter(s.rank(rank).tensors()))
        print(f"  next(): {wall_ms(s.next):.2f} ms; next(rank={rank}): {wall_ms(lambda: s.next(rank=rank)):.2f} ms")
        print(f"  state(): {wall_ms(s.state):.1f} ms at step {s.index}; text: {wall_ms(lambda: repr(s)):.1f} ms")
        print(f"  tensors of a rank: {wall_ms(lambda: s.rank(rank).tensors()):.2f} ms")
        back_ms = wall_ms(s.back)
        print(
            f"  back(): {back_ms:.3f} ms; with a look at a tensor: {wall_ms(lambda: s.back().rank(rank).tensor(name), 3):.0f} ms"
        )


if __name__ == "__main__":
    main()
