"""Runs of as many events as wanted, as pages."""

from __future__ import annotations

from pathlib import Path

import torch

import emu
from emu.canvas import page_html, run_record


def program(rank: emu.Rank, kernels: int) -> None:
    """Kernels of different lengths, an all_reduce after every tenth."""
    group, small, large = rank.group("dp"), torch.zeros(64, 64), torch.zeros(256, 256)
    for i in range(kernels):
        torch.mm(*(small, small) if i % 3 else (large, large))
        if i % 10 == 9:
            group.all_reduce(small)


def write_page(path: Path, ranks: int, steps: int) -> tuple[int, int]:
    """Writes the page of a run of about so many steps on all ranks together; says how many steps and events it has.

    A kernel is a step, and an event; what it makes, and what dies for it, are events that are no steps.
    """
    each = steps * 10 // (ranks * 11)
    run = emu.launch(program, emu.Mesh(dp=ranks), backend="shape", args=(each,))
    record = run_record(run).whole()
    path.write_text(page_html("a large run", record), encoding="utf-8")
    return record["known"], sum(len(run.trace[rank]) for rank in run.trace.ranks)
