"""Faults that data parallelism really had elsewhere, and the right numbers here, from plain torch in float64.

Numbers and inputs are ours; the reports are linked.
"""

import pytest
import torch
import torch.nn.functional as F

import emu
from emu.equivalence import check

SAME = 1e-9  # float64 against float64, in another order of sums: far above rounding, far below the faults (1e-1)


pytestmark = pytest.mark.usefixtures("float64")


class Uneven:
    """Ranks with 3, 2 and 2 of 7 samples. https://github.com/pytorch/pytorch/issues/67253"""

    sizes = (3, 2, 2)

    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y, self.w = (
            torch.randn(*shape, generator=g, dtype=torch.float64) for shape in [(7, 4), (7, 2), (4, 2)]
        )

    def gradient(self, x, y):
        w = self.w.clone().requires_grad_()
        ((x @ w - y) ** 2).mean().backward()
        return w.grad

    def right(self):
        return self.gradient(self.x, self.y)

    def mean_of_means(self):
        return sum(self.gradient(*rows) for rows in self.cut()) / 3

    def cut(self):
        return zip(self.x.split(self.sizes), self.y.split(self.sizes))


class Model(torch.nn.Module):
    """y = x W; the loss is a sum, as every strategy wants it: divided once, late, by all that count."""

    def __init__(self, w, kind):
        super().__init__()
        self.w, self.kind = torch.nn.Parameter(w.clone().to(torch.get_default_dtype())), kind

    def loss_sum(self, x, y):
        out = x.to(self.w.dtype) @ self.w
        if self.kind == "squares":
            return ((out - y.to(self.w.dtype)) ** 2).sum()
        return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100)


def test_scenario_1_ranks_of_unequal_size_weigh_what_their_samples_weigh():
    given = Uneven()
    batch = emu.Batch(given.x, given.y, tokens=given.y.numel())  # the mean is over every number of y

    def program(rank):
        ddp = emu.DataParallel(Model(given.w, "squares"), rank, "dp")
        ddp.backward(batch, sizes=given.sizes)
        return ddp.model.w.grad

    results = emu.launch(program, emu.Mesh(dp=3)).results
    closed_form = 2 * given.x.T @ (given.x @ given.w - given.y) / 14
    assert torch.allclose(given.right(), closed_form, rtol=SAME, atol=SAME)  # the oracle itself
    for gradient in results:
        assert torch.allclose(gradient, given.right(), rtol=SAME, atol=SAME)


def test_scenario_1_the_mean_of_rank_means_is_wrong_here_as_it_was_there():
    given = Uneven()

    def program(rank):
        """Every rank's own mean, averaged."""
        w = given.w.clone().to(torch.get_default_dtype()).requires_grad_()
        x, y = emu.Batch(given.x, given.y).shard(rank, "dp", sizes=given.sizes)
        ((x.to(w.dtype) @ w - y.to(w.dtype)) ** 2).mean().backward()
        return rank.group("dp").all_reduce(w.grad, op="avg")

    gradient = emu.launch(program, emu.Mesh(dp=3)).results[0]
    assert torch.allclose(gradient, given.mean_of_means(), rtol=SAME, atol=SAME)  # emu computes what was written
    assert float((gradient - given.right()).abs().max()) > 0.1  # and that is far from right
    for tier in ("exact", "float64", "float32"):
        found = check(program, emu.Mesh(dp=3), lambda: given.right(), tier=tier)
        assert not found and found.first_divergence == "result"


VALID = ((5, 0, 3), (1, 4, 2))  # tokens that count, by rank and microbatch


class Accumulated:
    """Two ranks, three microbatches each, with unequal numbers of valid tokens, one of them 0.
    https://github.com/meta-pytorch/torchtune/pull/1875
    """

    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(2, 3, 5, 4, generator=g, dtype=torch.float64)  # [rank, microbatch, tokens, width]
        self.w = torch.randn(4, 7, generator=g, dtype=torch.float64)
        self.y = torch.randint(0, 7, (2, 3, 5), generator=g)
        for rank, counts in enumerate(VALID):
            for m, n in enumerate(counts):
                self.y[rank, m, n:] = -100

    def gradient(self, x, y, divisor):
        w = self.w.clone().requires_grad_()
        loss = F.cross_entropy(x.reshape(-1, 4) @ w, y.reshape(-1), ignore_index=-100, reduction="sum") / divisor
        loss.backward()
        return w.grad

    def right(self):
        return self.gradient(self.x, self.y, 15.0)


def accumulate(rank, given, order=(0, 1, 2), pieces=1):
    """Data parallelism with gradient accumulation: sums everywhere, one division at the end."""
    model = Model(given.w, "tokens")
    dist = emu.DataParallel(model, rank, "dp")
    for m in order:
        for x, y in zip(given.x[rank, m].chunk(pieces), given.y[rank, m].chunk(pieces)):
            with dist.no_sync():
                dist.loss_sum(x, y).backward()
    dist.finish(tokens=int((given.y != -100).sum()))
    return model.w.grad


@pytest.mark.parametrize(("order", "pieces"), [((0, 1, 2), 1), ((2, 0, 1), 1), ((0, 1, 2), 5)])
def test_scenario_3_accumulation_gives_the_gradient_over_all_tokens_however_they_are_cut(order, pieces):
    given = Accumulated()
    for gradient in emu.launch(accumulate, emu.Mesh(dp=2), args=(given, order, pieces)).results:
        assert torch.allclose(gradient, given.right(), rtol=SAME, atol=SAME)


def test_scenario_3_has_one_reduction_a_step_however_many_microbatches():
    from emu.trace.events import Collective

    run = emu.launch(accumulate, emu.Mesh(dp=2), args=(Accumulated(),))
    reductions = [event for _, event in run.trace.of(Collective, rank=0) if event.kind == "all_reduce"]
    assert [event.bytes for event in reductions] == [4 * 7 * 8]


def test_scenario_3_means_of_means_and_local_denominators_are_told_apart():
    given = Accumulated()

    def mean_of_micro_means(rank):
        total = sum(given.gradient(given.x[rank, m], given.y[rank, m], max(VALID[rank][m], 1)) for m in range(3))
        return rank.group("dp").all_reduce(total).div_(6)

    def local_denominators(rank):
        total = sum(given.gradient(given.x[rank, m], given.y[rank, m], sum(VALID[rank])) for m in range(3))
        return rank.group("dp").all_reduce(total).div_(2)

    def averaged_and_not_undone(rank):
        total = sum(given.gradient(given.x[rank, m], given.y[rank, m], 15) for m in range(3))
        return rank.group("dp").all_reduce(total, op="avg")

    def right(rank):
        total = sum(given.gradient(given.x[rank, m], given.y[rank, m], 15) for m in range(3))
        return rank.group("dp").all_reduce(total)

    assert check(right, emu.Mesh(dp=2), given.right, tier="float64")
    for wrong in (mean_of_micro_means, local_denominators, averaged_and_not_undone):
        found = check(wrong, emu.Mesh(dp=2), given.right, tier="float64")
        assert not found and found.max_rel_err > 1e-3, wrong.__name__
