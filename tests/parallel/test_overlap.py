"""Communication hides behind computation, if there is enough of it, and if the strategy lets it."""

import pytest
import torch
from torch import nn

import emu
from emu.cost import price

RANKS, LAYERS, WIDTH = 4, 12, 4096
MANY_ROWS, FEW_ROWS = 8192, 64  # of each rank: much and little computation for every byte of gradients


class Wide(nn.Module):
    """Layers of equal size. x: [rows, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(LAYERS))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x * x).sum()


def step(rank, rows, how):
    dist = emu.DataParallel(Wide(), rank, "dp", precision="bf16-mixed", **how)
    x, y = torch.empty(rows, WIDTH, device="meta"), torch.empty(rows, dtype=torch.long, device="meta")
    for start in ("first", "second"):  # a first step, in which the order of units is learnt
        rank.mark(start)
        dist.zero_grad()
        dist.loss_sum(x, y).backward()
        dist.finish(rows * RANKS)
    rank.mark("end")


def metrics(rows, **how):
    cluster = emu.cluster("h100", nodes=1)
    run = emu.launch(step, emu.Mesh(dp=RANKS, on=cluster), args=(rows, how), backend="shape")
    return price(run.trace.window("second", "end"), cluster).metrics()


def exposed(rows, **how):
    """The share of communication in which nothing is computed."""
    found = metrics(rows, **how)
    assert found.comm_s > 0
    return found.exposed_comm_s / found.comm_s


def test_reductions_of_buckets_hide_behind_backward_and_one_of_everything_cannot():
    assert exposed(MANY_ROWS) < 0.1
    assert exposed(MANY_ROWS, bucket_bytes=2**40) == pytest.approx(1, abs=1e-6)  # sums of times, rounded


def test_with_little_to_compute_nothing_hides_communication():
    assert exposed(FEW_ROWS) > 0.4


@pytest.mark.parametrize("zero", [1, 2])
def test_scattered_reductions_hide_as_well(zero):
    assert exposed(MANY_ROWS, zero=zero) < 0.1
    assert exposed(MANY_ROWS, zero=zero, bucket_bytes=2**40) == pytest.approx(1, abs=1e-6)


def test_prefetching_hides_the_gathers_of_fully_sharded_parameters():
    on_demand, ahead, further = (exposed(MANY_ROWS, zero=3, prefetch=depth) for depth in (0, 1, 2))
    assert on_demand > 0.5  # every gather is waited for; reductions are hidden
    assert ahead < 0.1 and further < 0.1
    assert metrics(MANY_ROWS, zero=3, prefetch=1).step_time_s < metrics(MANY_ROWS, zero=3, prefetch=0).step_time_s


def test_waiting_for_every_reduction_at_once_is_seen(monkeypatch):
    from emu.parallel.gradients import Gradients

    reduce = Gradients.reduce

    def reduces_and_waits(self):
        reduce(self)
        self.collect()

    monkeypatch.setattr(Gradients, "reduce", reduces_and_waits)
    assert exposed(MANY_ROWS) > 0.5


def test_the_plans_that_send_least_are_not_the_fastest_where_links_are_idle():
    """Parameters that stay whole between forward and backward save a gather that nobody waited for: no time."""
    kept, again = (metrics(MANY_ROWS, zero=3, reshard_after_forward=kept) for kept in (False, True))
    assert kept.comm_s < again.comm_s
    assert kept.step_time_s == pytest.approx(again.step_time_s, rel=0.05)  # the model of contention sees the links
