"""Attention block by block, as the ranks of a ring would do it, and how far two results lie apart."""

import torch

from emu.parallel.attention.block import attend, backward, merged, nothing
from emu.parallel.attention.pieces import pieces

from .cuts import taken

FLOAT64 = 1e-12  # float64 sums in another order


def error(ours, theirs):
    """max |u - v| / max |v|, with a floor for what is truly zero."""
    return (
        float((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=1))
        if theirs.numel()
        else 0.0
    )


def blockwise(holders, q, k, v, grad, merge=merged):
    """out, dq, dk, dv, block by block, as the ranks of a ring would: each starts at its own keys."""
    parts = [[taken(x, own) for own in holders] for x in (q, k, v, grad)]
    ring = [[(i - j) % len(holders) for j in range(len(holders))] for i in range(len(holders))]
    rows = []
    for i, queries in enumerate(holders):
        row = nothing(parts[0][i])
        for j in ring[i]:
            row = merge(row, attend(parts[0][i], parts[1][j], parts[2][j], pieces(queries, holders[j])))
        rows.append(row)
    sums = [[torch.zeros_like(x, dtype=rows[0].out.dtype) for x in part] for part in parts[:3]]
    for i, queries in enumerate(holders):
        for j in ring[i]:
            found = pieces(queries, holders[j])
            grads = backward(parts[3][i], parts[0][i], parts[1][j], parts[2][j], rows[i].out, rows[i].lse, found)
            for total, at, part in zip(sums, (i, j, j), grads):
                total[at] += part
    return tuple(joined(x, holders) for x in ([row.out for row in rows], *sums))


def joined(parts, holders):
    """Back in order of position."""
    batch = parts[0].shape[0]
    places = torch.cat([h.positions.expand(batch, -1) for h in holders], 1)
    whole = torch.cat(parts, 2)
    return torch.stack([row[:, at.argsort()] for row, at in zip(whole, places)])
