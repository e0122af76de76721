"""What attention across ranks costs on virtual devices, against one device: `python tests/benchmarks/bench_context.py`.

CPU time of a forward and a backward of causal attention (2,048 tokens, 8 heads of 64, float32, one thread): torch's
scaled_dot_product_attention on one device; and emu.launch, with all it does around a program, of every kind of context
parallelism over 4 ranks, tracked, the zigzag ring untracked, too. Every round runs all of them after each other, in turning
order; a round's ratio is to its own single device, and medians over rounds are reported, with the middle half of the rounds
beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rounds import compared

import emu
from emu.parallel.context import KINDS, attention, make_cut

RANKS, TOKENS, HEADS, HEAD_DIM = 4, 2048, 8, 64


def data() -> list[torch.Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=g) for _ in range(4)]


def single() -> float:
    *inputs, grad = data()
    start = time.process_time()
    q, k, v = ((x * 1).requires_grad_() for x in inputs)  # in place of a model's projections
    F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)
    return time.process_time() - start


def ours(kind: str, track: bool = True) -> float:
    *inputs, grad = data()
    cut = make_cut(kind, TOKENS, RANKS)
    parts = [[cut.own(x, i, 2) for x in (*inputs, grad)] for i in range(RANKS)]

    def program(rank: Any) -> None:
        group = rank.group("cp")
        *mine, out_grad = parts[rank]
        q, k, v = ((x * 1).requires_grad_() for x in mine)
        attention(q, k, v, make_cut(kind, TOKENS, RANKS), group, rank).backward(out_grad)

    start = time.process_time()
    emu.launch(program, emu.Mesh(cp=RANKS), backend="virtual", track=track)
    return time.process_time() - start


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], float]] = {"one device, SDPA": single}
    ways |= {f"emu {kind}, {RANKS} tracked": lambda kind=kind: ours(kind) for kind in KINDS}
    ways[f"emu zigzag, {RANKS} untracked"] = lambda: ours("zigzag", track=False)
    seconds = compared(ways, rounds)
    ratios = [t / b for t, b in zip(seconds[f"emu zigzag, {RANKS} tracked"], seconds["one device, SDPA"])]
    print(f"emu zigzag, {RANKS} tracked, over the single device: {statistics.median(ratios):.3f} (at most 1.6)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    main(parser.parse_args().rounds)
