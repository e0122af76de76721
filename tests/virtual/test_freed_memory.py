"""A tensor whose storage was emptied is told of, where torch would read address 0."""

import pytest
import torch

import emu
from emu.equivalence import check
from emu.spmd import FreedMemory


def on_a_rank(program):
    return emu.launch(program, emu.Mesh(dp=1)).results[0]


@pytest.mark.parametrize(
    "use", [lambda x: x + 1, lambda x: x.view(2, 4).sum(), lambda x: x.fill_(0), lambda x: [x.mul(2)]]
)
def test_an_op_on_emptied_memory_is_refused(use):
    def program(rank, empty=True):
        x = torch.ones(8)
        if empty:
            x.untyped_storage().resize_(0)
        return use(x)

    on_a_rank(lambda rank: program(rank, empty=False))
    with pytest.raises(
        FreedMemory, match=r"rank 0: .* of shape \([\d, ]+\) whose memory was freed.*test_freed_memory.py"
    ):
        on_a_rank(program)


def test_what_a_rank_leaves_empty_can_be_printed_afterwards():
    def program(rank):
        x = torch.ones(8)
        x.untyped_storage().resize_(0)
        return [x]

    for track in (True, False):
        (x,) = emu.launch(program, emu.Mesh(dp=1), track=track).results[0]
        assert x.untyped_storage().nbytes() == 32 and "tensor" in repr(x)


class Leaking(torch.nn.Linear):
    def forward(self, x):
        self.kept = self.weight.detach().t()
        return super().forward(x)


class Keeps(torch.nn.Module):
    """May use a view of a sharded parameter beyond its forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Leaking(2, 2) for _ in range(2)])

    def loss_sum(self, x, y):
        loss = self.layers[1](self.layers[0](x)).sum()
        return loss + (self.layers[0].kept.sum() if y.any() else 0)


def test_a_view_kept_of_a_sharded_parameter_is_told_of_with_its_unit_also_by_a_check():
    def program(rank, keep=True):
        torch.manual_seed(0)
        dist = emu.DataParallel(Keeps(), rank, "dp", zero=3)
        return dist.loss_sum(torch.ones(1, 2), torch.full((1,), float(keep))).detach().clone()

    assert torch.isfinite(on_a_rank(lambda rank: program(rank, keep=False)))
    with pytest.raises(FreedMemory, match=r"parameters of layers\.0.*\n.*within `with dist.gathered\(\):`"):
        on_a_rank(program)
    with pytest.raises(FreedMemory):
        check(program, emu.Mesh(dp=2), lambda: torch.ones(()))
