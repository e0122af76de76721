"""Models of all kinds, under every stage of ZeRO: two steps of AdamW give plain torch's parameters, and nothing crashes."""

import pytest
import torch

import emu
from emu.trace.compare import first_difference

from .zoo import (
    ADAMW,
    BATCHES,
    MODELS,
    RANKS,
    STAGES,
    CalledTwice,
    FrozenLast,
    Lora,
    OddSizes,
    OutsideReentrant,
    Plain,
    Tied,
    launched,
    made,
    many_devices,
    one_device,
    same,
)

pytestmark = pytest.mark.usefixtures("float64")


every_way = pytest.mark.parametrize("how", STAGES.values(), ids=STAGES)


# Every model shards all it has, and meets a third of the other ways; every way meets a third of the models.
CASES = [
    (kind, name, name == "zero3" or (i + j) % 3 == 0) for i, kind in enumerate(MODELS) for j, name in enumerate(STAGES)
]


def named(cases):
    return [pytest.param(kind, STAGES[name], id=f"{kind.__name__}-{name}") for kind, name in cases]


@pytest.mark.parametrize(("kind", "how"), named((kind, name) for kind, name, often in CASES if often))
def test_every_model_trains_as_on_one_device(kind, how):
    right = one_device(kind)
    for found in launched(kind, how):
        same(found, right)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "how"), named((kind, name) for kind, name, often in CASES if not often))
def test_every_model_trains_as_on_one_device_in_every_other_way(kind, how):
    test_every_model_trains_as_on_one_device(kind, how)


def test_the_comparison_sees_a_step_that_is_a_little_longer():
    right = one_device(Plain)
    with pytest.raises(AssertionError):
        same(one_device(Plain, lr=0.0500001, weight_decay=0.1), right)


@every_way
def test_parameters_that_stay_whole_train_the_same(how):
    right = one_device(Tied)
    for found in launched(Tied, {**how, "replicated": ["*.bias", "first.*"]}):
        same(found, right)


@every_way
def test_there_may_be_more_ranks_than_elements_or_rows(how):
    right = one_device(OddSizes)
    for found in launched(OddSizes, how, ranks=8, sizes=[0, 2, 0, 0, 4, 0, 1, 0]):
        same(found, right)


@pytest.mark.parametrize(
    "how", [STAGES[name] for name in ("ddp", "zero1", "zero2", "zero3", "hsdp3", "owners3")], ids=str
)
@pytest.mark.parametrize("kind", [CalledTwice, FrozenLast, OutsideReentrant], ids=lambda kind: kind.__name__)
def test_neither_who_runs_first_nor_tracking_changes_a_bit_and_shapes_leave_the_same_trace(kind, how):
    def program(rank):
        return many_devices(rank, kind, sizes=[2, 1, 2, 2], **how)

    real = emu.launch(program, emu.Mesh(dp=RANKS))
    for launch in ({"order": 1}, {"track": False}):
        again = emu.launch(program, emu.Mesh(dp=RANKS), **launch)
        for some, others in zip(again.results, real.results):
            same(some, others, tolerance=0)
        assert launch == {"track": False} or first_difference(again.trace, real.trace) is None
    shapes = emu.launch(program, emu.Mesh(dp=RANKS), backend="shape")
    assert first_difference(shapes.trace, real.trace) is None


def test_adapters_alone_have_gradients_and_states():
    def program(rank, kind):
        dist = emu.DataParallel(made(kind), rank, "dp", zero=3)
        opt = dist.optimizer(torch.optim.AdamW, **ADAMW)
        dist.backward(BATCHES[0])
        opt.step()
        rank.mark("stepped")
        return dist, opt

    run = emu.launch(program, emu.Mesh(dp=2), args=(Lora,))
    lines = run.memory.series(0)[1]
    per_layer = 3  # of an adapter's 6 elements, a half
    assert lines["gradients"][-1] == 3 * per_layer * 8 and lines["optimizer"][-1] == 2 * 3 * per_layer * 8
    assert lines["parameters"][-1] == 3 * (per_layer + 6) * 8  # of the base's 12, a half
