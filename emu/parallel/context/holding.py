"""Which tokens every rank holds, by the kind of cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NoReturn

from torch import Tensor

from emu.parallel.attention.tokens import Run, Tokens, tokens, tokens_by_row
from emu.parallel.context.dealing import zigzag, zigzag_of_documents
from emu.spmd import PlanError
from emu.spmd.layout import split_sizes

KINDS = ("ring", "zigzag", "striped", "all-gather", "ulysses", "usp")


def held(kind: str, length: int, ranks: int, documents: Tensor | None) -> list[Tokens]:
    """What each rank of a ring holds: "striped", contiguous ("ring"), or as much attended work as any other."""
    if kind == "striped":
        return [tokens([Run(i, length, ranks)], documents) for i in range(ranks)]
    if kind == "ring":
        sizes = split_sizes(length, ranks)
        return [tokens([Run(sum(sizes[:i]), sum(sizes[: i + 1]))], documents) for i in range(ranks)]
    if documents is None:
        return [tokens(_joined_runs(ranges)) for ranges in zigzag(length, ranks)]
    return [tokens_by_row(places, documents) for places in zigzag_of_documents(documents.numpy(), ranks)]


def parts_of(t: Tokens, sizes: Sequence[int]) -> list[Tokens]:
    """Tokens cut into contiguous parts of their own order."""
    out: list[Tokens] = []
    start = 0
    for size in sizes:
        runs, at = [], 0
        for run in t.runs or ():
            low, high = max(start - at, 0), min(start + size - at, len(run))
            if low < high:
                runs.append(Run(run.start + low * run.step, run.start + (high - 1) * run.step + 1, run.step))
            at += len(run)
        some = slice(start, start + size)
        documents = None if t.documents is None else t.documents[:, some]
        out.append(Tokens(None if t.runs is None else tuple(runs), t.positions[..., some], documents))
        start += size
    return out


def neighbours(kind: str, ranks: int, asked: int | None) -> int:
    """How many neighbours exchange heads."""
    if kind != "usp":
        alone = ranks if kind == "ulysses" else 1
        return alone if asked in (None, alone) else _misfit(kind, ranks, asked, alone)
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
    usual = max(n for n in fits if n <= isqrt(ranks))
    if asked is None:
        return usual
    return asked if asked in fits else _misfit(kind, ranks, asked, min(fits, key=lambda n: abs(n - asked)))


def _misfit(kind: str, ranks: int, asked: int | None, nearest: int) -> NoReturn:
    raise PlanError(
        f"context={kind!r} over {ranks} ranks cannot exchange heads among {asked!r} of them",
        f"say ulysses={nearest}" + (", or another divisor of the ranks" if kind == "usp" else ", or use context='usp'"),
        field="context",
        value=asked,
        nearest=nearest,
    )


def _joined_runs(ranges: Sequence[tuple[int, int]]) -> list[Run]:
    """As few runs as can be."""
    out: list[Run] = []
    for start, stop in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if out and out[-1].stop == start:
            start = out.pop().start
        out.append(Run(start, stop))
    return out
