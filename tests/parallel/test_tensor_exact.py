"""Tensor and sequence parallelism computes what one device computes, bit for bit: any width, heads, vocabulary and cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.equivalence import check, verify
from emu.models import GPT, Config
from emu.parallel import DataParallel, Plan, shard_model
from emu.parallel.tensor.region import _Enter
from tests.parallel.programs import batch


@st.composite
def cases(draw):
    """A decoder, and a mesh that can cut it: heads that divide, and everything else as it comes."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]))
    heads = tp * draw(st.integers(1, 3 if tp < 6 else 1))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if not heads % n]))
    config = Config(
        layers=draw(st.integers(1, 2)),
        width=draw(st.integers(4, 12)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2,
        ffn=draw(st.integers(tp, tp + 9)),
        vocab=draw(st.integers(2, 20)),
        seq=draw(st.integers(1, 6)),
        positions=draw(st.sampled_from(["learned", "rotary"])),
        norm=draw(st.sampled_from(["layer", "rms"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
    )
    dp = draw(st.sampled_from([1, 2, 3] if tp < 5 else [1]))
    return config, {"dp": dp, "tp": tp}, tp > 1 and draw(st.booleans())


def distributed(rank, config, data, sp, zero, microbatches):
    """One step of everything: loss, gradients, the clipped norm, and the loss after it."""
    model = GPT(config, seed=0)
    sharding = shard_model(model, rank, sp=sp)
    dist = DataParallel(model, rank, "dp", zero=zero, sharding=sharding)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1, clip=0.25)
    loss = dist.backward(data, microbatches=microbatches)
    gradients = dist.gather_gradients()
    norm = optimizer.step().norm
    with torch.no_grad():
        after = dist.loss_sum(*data.part(dist.group)).clone()
    dist.group.all_reduce(after)
    return {"loss": loss, "loss after": after / data.tokens, "norm": norm, "parameters": gradients}


def alone(config, data, sp, zero, microbatches):
    """Plain torch."""
    model = GPT(config, seed=0)
    loss = model.loss_sum(data.x, data.y)
    loss.backward()
    squares = torch.zeros(())
    for p in model.parameters():
        p.grad.div_(data.tokens)
        squares = squares + (p.grad * p.grad).sum()
    norm = squares.sqrt()
    gradients = emu.grads(model)
    gradients = {name: g.clone() for name, g in gradients.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad * (0.25 / (norm + 1e-6)).clamp(max=1.0))
        after = model.loss_sum(data.x, data.y)
    return {
        "loss": loss.detach() / data.tokens,
        "loss after": after / data.tokens,
        "norm": norm,
        "parameters": gradients,
    }


def is_one_device(case, rows, zero, microbatches):
    config, axes, sp = case
    args = (config, batch(config, rows), sp, zero, microbatches)
    verdict = check(distributed, emu.Mesh(**axes), alone, args=args, mutants="none")
    assert verdict.equivalent, str(verdict)


anyhow = given(cases(), st.integers(1, 5), st.sampled_from([0, 1, 2, 3]), st.integers(1, 2))


@settings(max_examples=15, deadline=None)
@anyhow
def test_any_decoder_cut_anyhow_is_one_device_bit_for_bit(case, rows, zero, microbatches):
    is_one_device(case, rows, zero, microbatches)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@anyhow
def test_many_decoders_cut_anyhow_are_one_device_bit_for_bit(case, rows, zero, microbatches):
    is_one_device(case, rows, zero, microbatches)


SHARED = Config(layers=1, width=8, heads=6, kv_heads=2, head_dim=2, ffn=7, vocab=11, seq=4, positions="rotary")


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 6])
def test_key_and_value_heads_that_ranks_share_are_summed_once(tp, sp):
    """2 heads over 3 ranks: the middle one holds both, and its query heads do not share them evenly."""
    verdict = verify(lambda: GPT(SHARED, seed=0), Plan(f"tp={tp}", sp=sp, global_batch=3, seq=4), mutants="none")
    assert verdict.equivalent, str(verdict)


@pytest.mark.parametrize("sp", [False, True])
def test_every_mutant_of_tensor_parallelism_is_killed(sp):
    config = Config(layers=1, width=8, heads=4, kv_heads=2, head_dim=2, ffn=8, vocab=11, seq=4, positions="rotary")
    plan = Plan("dp=2,tp=4", sp=sp, global_batch=4, seq=4)
    verdict = verify(lambda: GPT(config, seed=0), plan, mutants="all")
    assert verdict and verdict.mutants_killed + verdict.mutants_equivalent == verdict.mutants > 20, str(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("more", "plan"),
    [
        ({}, Plan("dp=2,tp=2", sp=True, ep=2, etp=2, global_batch=3, seq=4)),
        ({"balance_over": "batch", "capacity": 1.0}, Plan("dp=2,tp=2", ep=4, global_batch=3, seq=4, zero=3)),
    ],
)
def test_every_mutant_of_expert_parallelism_is_killed(more, plan):
    config = Config(layers=1, width=8, heads=4, kv_heads=2, head_dim=2, ffn=6, vocab=11, seq=4, positions="rotary",
                    activation="swiglu", experts=4, balance=0.1, shared_ffn=5, **more)  # fmt: skip
    verdict = verify(lambda: GPT(config, seed=0), plan, mutants="all")
    assert verdict and verdict.mutants_killed > 80, str(verdict)


def test_without_the_reduction_where_a_region_is_entered_the_check_fails(monkeypatch):
    """The negative control: gradients of norms and of what lies before a region are this rank's part alone."""

    def backward(ctx, other, ticket):
        region = ctx.under_way.region
        kept, region.group = region.group, rank_alone(region.group)
        try:
            return right(ctx, other, ticket)
        finally:
            region.group = kept

    class rank_alone:
        def __init__(self, group):
            self.group, self.label = group, group.label

        def all_reduce(self, x, **options):
            class Done:
                @staticmethod
                def wait():
                    return x

            return Done

    right = _Enter.backward
    monkeypatch.setattr(_Enter, "backward", staticmethod(backward))
    verdict = verify(lambda: GPT(SHARED, seed=0), Plan("tp=2", global_batch=3, seq=4), mutants="none")
    assert not verdict.equivalent and "norm1" in str(verdict)


def test_in_float64_a_mutant_that_changes_nothing_but_rounding_is_equivalent():
    """The maximum that the loss subtracts: scaled, stale or the minimum, it is another way to round the same loss."""
    verdict = verify(lambda: GPT(SHARED, seed=0), Plan("tp=2", global_batch=3, seq=4), tier="float64", mutants="all")
    assert verdict and verdict.max_rel_err < 1e-12, str(verdict)
    assert verdict.mutants_equivalent >= 4 and verdict.mutants_killed > 15
