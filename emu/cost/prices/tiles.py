"""How a matrix product is cut, and what the cut wastes.

A GPU cuts the output into tiles and deals them out to its cores, one each; when all are done, the next so many: a wave.
A product of one tile more than there are cores takes two waves, as long as one of twice as many. Partial tiles cost as
much as whole ones. Libraries soften both: with tiles of half the size, at a lower rate, or by split-k, where several
cores share a tile, each with a part of k, and add up what they found; published step times are met best if either may
be chosen for any product. A systolic array (TPU) takes whole blocks of its own side instead, and has no waves.

Source: NVIDIA, Matrix Multiplication Background User's Guide (docs.nvidia.com/deeplearning/performance), tile and wave
quantisation.
"""

from __future__ import annotations

import math
from functools import lru_cache

# Output tiles that cuBLAS and CUTLASS have kernels for, and the share of the best tile's rate that each reaches: a small
# tile loads more operands for each multiply-add. Assumed, after the shared-memory traffic of each shape.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))
SPLITS = (1, 2, 3, 4, 5, 6, 8)


def tiled_share(batch: float, m: float, n: float, k: float, cores: int, ends_k: float) -> float:
    """Share of the best tile's rate that a product [m, k] x [k, n] reaches, batch times, on so many cores: 0-1.

    ends_k: what the start and the end of a tile cost, as so many more multiply-adds along k. A tile split along k pays
    them twice for each part: partial sums are written in float32, and read again.
    """
    best = min(products + ends_k * ends for products, ends in ways(batch, m, n, k, cores))
    return batch * m * n * k / (best * cores)


@lru_cache(maxsize=500_000)
def ways(batch: float, m: float, n: float, k: float, cores: int) -> tuple[tuple[float, float], ...]:
    """Ways to cut a product: multiply-adds that each core does, and results that it starts and ends, one of a kind.

    Both are in terms of the best tile's rate, padding and idle cores included. Ways that are worse than another in both
    are left out, which leaves a few.
    """
    found = []
    for rows, columns, rate in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        for parts in SPLITS:
            if parts > 1 and parts > k:
                break
            results = math.ceil(tiles * parts / cores) * rows * columns / rate
            found.append((results * k / parts, results * (2 if parts > 1 else 1)))
    best: list[tuple[float, float]] = []
    for products, ends in sorted(found):
        if not best or ends < best[-1][1]:
            best.append((products, ends))
    return tuple(best)


def padded_share(m: float, n: float, k: float, side: int) -> float:
    """Share of a systolic array's rate that a product reaches, its weights padded to whole blocks: 0-1.

    Rows of the other operand stream through and are padded to 8 only. Assumed: XLA puts the operand with more rows
    there, which is m here.
    """
    padded = 8 * math.ceil(m / 8) * side * math.ceil(n / side) * side * math.ceil(k / side)
    return m * n * k / padded
