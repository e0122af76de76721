"""The order of sums that emu.spmd replays is that of the steps which emu.cost lists."""

from __future__ import annotations

import pytest
import torch

from emu.cost.collectives import steps
from emu.hardware import cluster as preset
from emu.virtual.maths import reduced


def rough(n: int, length: int) -> list[torch.Tensor]:
    """Values of many magnitudes, whose sum shows its order in the last bits."""
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(length, generator=generator) * 10 ** torch.randn(length, generator=generator) for _ in range(n)]


def carried_out(kind: str, algorithm: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What every rank has when the steps have been carried out on numbers."""
    cluster = preset("h100", nodes=2)
    found = steps(kind, parts[0].numel(), range(len(parts)), cluster, algorithm)
    chunks = max(one.chunk for one in found) + 1
    have = [list(part.clone().chunk(chunks)) for part in parts]
    for step in sorted({one.step for one in found}):
        moving = [(one, have[one.src][one.chunk].clone()) for one in found if one.step == step]
        for one, values in moving:
            mine = have[one.dst][one.chunk]
            have[one.dst][one.chunk] = mine + values if one.adds else values
    return [torch.cat(chunks_of_one) for chunks_of_one in have]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_an_all_reduce_has_the_bits_of_its_steps(algorithm, n):
    parts = rough(n, 64 * n * (1 << (n.bit_length() - 1)))
    want = reduced(parts, "sum", algorithm)
    for got in carried_out("all_reduce", algorithm, parts):
        assert torch.equal(got, want)
    if n > 2:  # negative control: group order has other bits
        assert not torch.equal(want, reduced(parts, "sum"))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_a_reduce_scatter_has_the_bits_of_its_steps(algorithm, n):
    length = 96
    parts = rough(n, length * n)
    want = reduced(parts, "sum", algorithm, [length] * n).split(length)
    got = carried_out("reduce_scatter", algorithm, parts)
    for r in range(n):
        assert torch.equal(got[r].split(length)[r], want[r])


@pytest.mark.parametrize("algorithm", ["tree", "direct", "ring", "halving_doubling"])
def test_every_algorithm_sums_real_numbers(algorithm):
    parts = rough(8, 1024)
    want = torch.stack([part.double() for part in parts]).sum(0)
    for got in carried_out("all_reduce", algorithm, parts):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)
