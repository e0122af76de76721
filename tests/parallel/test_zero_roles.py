"""Low precision by role: every stage has stage 0's bits; ranks agree on norms and overflows; a shape run has the real trace."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.parallel.gradients import Gradients
from emu.spmd import Precision
from emu.trace.compare import first_difference as first_unlike

from . import training
from .programs import SMALL
from .training import ADAMW, SGD, Made, on_ranks

ROLES = [
    "bf16-mixed",
    "fp16-scaled",
    Precision(param="bf16", grad="fp32", reduce="fp32"),
    Precision(param="bf16", grad="bf16", reduce="bf16", master="bf16", moments="bf16"),
    Precision(param="fp32", activations="bf16"),
]
ODD = Made((3, 5, 3))


def launched(made, sizes, how, rule, steps=3):
    data = [made.batch(sum(sizes), seed) for seed in range(2)]
    return emu.launch(
        on_ranks, emu.Mesh(dp=len(sizes)), args=(made, data, rule, steps, sizes, how), track=False
    ).results


@given(training.models, st.integers(1, 6), st.data())
@example(ODD, 4, None)
def test_in_low_precision_too_every_stage_has_stage_0s_bits(made, ranks, data):
    if data is None:
        how, rule = {"zero": 2, "by_owner": True, "precision": "bf16-mixed"}, ADAMW
    else:
        how = data.draw(training.options(ranks, made.names(), ROLES))
        how["replicate"] = 1  # replicas sum in another order
        rule = training.fits(made.names(), data.draw(training.rules))._replace(clip=None)
    # torch's own a + alpha * b in bfloat16 depends on where in a tensor an element lies: vectors round once, the last
    # elements twice. So an optimizer in bfloat16 sees other positions in a shard than in the whole.
    in_float32 = Precision.preset(how["precision"]).master == torch.float32
    sizes, steps = [1 + r % 2 for r in range(ranks)], 3 if in_float32 else 1
    ours = launched(made, sizes, how, rule, steps)
    ddp = launched(made, sizes, {"zero": 0, "precision": how["precision"]}, rule, steps)
    for what in ("gradients", "values", "used") if in_float32 else ("gradients",):
        for found in ours:
            assert all(torch.equal(found[what][name], value) for name, value in ddp[0][what].items()), what
    right = {key: dict(zip((p.name for p in pieces), pieces)) for key, pieces in ddp[0]["states"].items()}
    for key, piece in ((key, p) for found in ours for key, pieces in found["states"].items() for p in pieces):
        whole = right[key][piece.name].tensor
        assert torch.equal(piece.tensor, whole[piece.start : piece.start + len(piece.tensor)]) or not in_float32


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 1}, {"zero": 2, "by_owner": True}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("made", [ODD, Made(SMALL)], ids=["mlp", "decoder"])
def test_on_one_rank_mixed_precision_is_plain_torch_with_a_master_copy(made, how):
    data = [made.batch(4, seed) for seed in range(3)]
    model = made.model().bfloat16()
    master = [nn.Parameter(p.detach().clone()) for p in made.model().parameters()]  # in float32, before it is rounded
    optimizer = torch.optim.AdamW(master, **ADAMW.options)
    for some in data:
        x = some.x.bfloat16() if some.x.is_floating_point() else some.x
        model.zero_grad()
        model.loss_sum(x, some.y).backward()
        for p, copy in zip(model.parameters(), master):
            copy.grad = p.grad.float().div_(some.tokens)  # late: a quotient may be too small for what its sum fits into
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(model.parameters(), master):
                p.copy_(copy)
    args = (made, data, ADAMW, 3, [4], {**how, "precision": "bf16-mixed"})
    found = emu.launch(on_ranks, emu.Mesh(dp=1), args=args, track=False).results[0]
    for (name, p), copy in zip(model.named_parameters(), master):
        assert torch.equal(found["values"][name], copy) and torch.equal(found["used"][name], p)
        assert torch.equal(found["gradients"][name], copy.grad)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_activations_may_be_narrower_than_parameters(zero, positions):
    made = Made(replace(SMALL, positions=positions))
    how = {"zero": zero, "precision": Precision(activations="bf16")}
    ours, plain = (launched(made, [1, 2], h, SGD)[0]["gradients"] for h in (how, {"zero": zero}))
    for name, value in plain.items():
        assert not torch.equal(ours[name], value)
        # bfloat16 has 8 bits; a gradient is a sum of a dozen products, each off by a few of its last bits
        assert (ours[name] - value).abs().max() < 0.1 * max(value.abs().max(), 1e-2)


CUT = [
    {"zero": 1},
    {"zero": 2, "by_owner": True},
    {"zero": 3},
    {"zero": 3, "replicate": 2},
    {"zero": 1, "replicated": ["*"]},
]


@pytest.mark.parametrize("roles", ["bf16-mixed", ROLES[3], None], ids=str)
@pytest.mark.parametrize("how", CUT, ids=str)
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_all_ranks_clip_by_one_norm_in_one_dtype(how, roles, norm):
    """An owner of nothing, too, brings its nothing in the dtype of the others."""

    def program(rank, how):
        dist = emu.DataParallel(ODD.model(), rank, "dp", precision=roles, **how)
        optimizer = dist.optimizer(torch.optim.SGD, lr=0.5, clip=0.01, norm=norm)
        dist.backward(ODD.batch(6))
        return optimizer.step().norm

    mesh = emu.Mesh(dp=4)
    ours, (whole, *_) = (emu.launch(program, mesh, args=(h,), track=False).results for h in (how, {"zero": 0}))
    assert all(torch.equal(found, ours[0]) for found in ours) and ours[0].dtype == whole.dtype
    # Squares are summed in another order: a few units in the last place of bfloat16 or float32.
    assert torch.allclose(ours[0].float(), whole.float(), rtol=4 * float(torch.finfo(whole.dtype).eps))


def scaled(rank, how, scale, bad):
    dist = emu.DataParallel(ODD.model(), rank, "dp", precision="fp16-scaled", **how)
    scale = emu.parallel.LossScale(scale)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.5, clip=1.0, scale=scale)
    before = dist.gather_parameters()
    dist.backward(ODD.batch(6), scale=scale)
    if bad:  # in one rank's part only
        for gradients in dist.gradients:
            own = gradients.own()
            if rank == 1 and len(own):
                own[0] = torch.inf
    step = optimizer.step()
    moved = any(not torch.equal(value, before[name]) for name, value in dist.gather_parameters().items())
    return step.skipped, scale.value, moved, dist.gather_parameters()


@pytest.mark.parametrize("how", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "replicate": 2}], ids=str)
def test_an_overflow_in_one_ranks_shard_is_everyones(how):
    """Scenario 54."""
    mesh = emu.Mesh(dp=4)
    for found in emu.launch(scaled, mesh, args=(how, 1024.0, True)).results:
        assert found[:3] == (True, 512.0, False)
    fine = emu.launch(scaled, mesh, args=(how, 1024.0, False)).results
    alike = emu.launch(scaled, mesh, args=(how, 512.0, False)).results  # a power of two changes no digit
    for found, other in zip(fine, alike):
        assert found[:3] == (False, 1024.0, True)
        assert all(torch.equal(value, fine[0][3][name]) for name, value in found[3].items())
        # float16's smallest numbers lose digits that larger ones keep
        assert all(torch.allclose(value, other[3][name], atol=2**-20) for name, value in found[3].items())


@pytest.mark.parametrize("zero", [0, 2])
def test_a_scale_is_divided_out_once(zero):
    def program(rank, twice):
        dist = emu.DataParallel(ODD.model(), rank, "dp", zero=zero)
        scale = emu.parallel.LossScale(1024.0)
        first, second = (
            dist.optimizer(torch.optim.SGD, [{"params": [f"layers.{i}.*"]}], lr=0.1, scale=scale) for i in range(2)
        )
        for step in range(2):  # after the next backward it is there again
            dist.backward(ODD.batch(6), scale=scale)
            (first if step else second).step()
        if twice:
            second.step()

    emu.launch(program, emu.Mesh(dp=2), args=(False,))
    with pytest.raises(emu.EmuError, match=r"out of these gradients already.*\n.*groups"):
        emu.launch(program, emu.Mesh(dp=2), args=(True,))


def test_an_overflow_that_only_one_rank_sees_is_seen(monkeypatch):
    import emu.parallel.optimizer as optimizing

    def looks_at_its_own(given, *where):
        return any(not bool(torch.isfinite(g).all()) for g in given)

    monkeypatch.setattr(optimizing, "any_overflow", looks_at_its_own)
    with pytest.raises(Exception):  # noqa: B017 -- ranks go different ways: whatever happens first
        for found in emu.launch(scaled, emu.Mesh(dp=4), args=({"zero": 2}, 1024.0, True)).results:
            assert found[:3] == (True, 512.0, False)


# Shape runs.


def unlike(made, ranks, how, rule, microbatches):
    """Where the trace of a shape run is another than that of the real run."""
    data = [made.batch(ranks + 1)]

    def program(rank):
        dist = emu.DataParallel(made.model(), rank, "dp", **how)
        groups = rule.cut(made.names())
        optimizer = dist.optimizer(rule.kind, groups, clip=rule.clip, norm=rule.norm, **rule.options)
        for _ in range(2):
            optimizer.zero_grad()
            dist.backward(data[0], microbatches=microbatches)
            optimizer.step()

    mesh = emu.Mesh(dp=ranks)
    return first_unlike(emu.launch(program, mesh, backend="shape").trace, emu.launch(program, mesh).trace)


@settings(max_examples=10)
@given(training.models, st.integers(1, 4), st.data(), st.integers(1, 2))
def test_a_shape_run_has_the_trace_of_the_real_one_at_every_stage(made, ranks, data, microbatches):
    # LayerNorm keeps bfloat16's statistics in bfloat16 on CPUs and in float32 on "meta": decoders stay in float32.
    roles = [None, "bf16-mixed"] if isinstance(made.of, tuple) else [None]
    how = data.draw(training.options(ranks, made.names(), roles))
    rule = training.fits(made.names(), data.draw(training.rules))
    assert unlike(made, ranks, how, rule, microbatches) is None


@pytest.mark.parametrize("how", [{"zero": 1}, {"zero": 0, "find_unused": True}, {"zero": 3, "by_owner": True}], ids=str)
def test_what_shape_runs_once_did_otherwise(how):
    assert unlike(ODD, 4, how, SGD, 1) is None


def test_a_shape_run_that_differs_is_seen(monkeypatch):
    collect = Gradients.collect

    def looks_at_values(self):
        collect(self)
        if self._whole is not None and not self._whole.is_meta:
            self._whole.mul_(1)

    monkeypatch.setattr(Gradients, "collect", looks_at_values)
    assert unlike(ODD, 4, {"zero": 1}, SGD, 1) is not None


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 1}, {"zero": 2, "by_owner": True}, {"zero": 3}], ids=str)
def test_a_gradient_too_small_for_float16_once_it_is_divided_is_not_lost(how):
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def loss_sum(self, x, y):
            return (self.w * x).sum().float()

    tokens = 2**17
    data = emu.Batch(torch.tensor([[16000.0, 3e-3]]), torch.zeros(1, 1), tokens=tokens)

    def program(rank):
        dist = emu.DataParallel(Line(), rank, "dp", precision="fp16-scaled", **how)
        optimizer = dist.optimizer(torch.optim.SGD, lr=float(tokens))
        dist.backward(data)
        optimizer.step()
        return dist.gather_parameters()["w"], dist.gather_gradients()["w"]

    for w, g in emu.launch(program, emu.Mesh(dp=2)).results:
        assert -w[1] == pytest.approx(3e-3, rel=2**-10) and float(w[0]) == -16000.0  # sums in float16, and no more
        assert torch.equal(g * tokens, -w)
    assert float(torch.tensor(3e-3, dtype=torch.float16) / tokens) == 0  # where they used to be divided


def test_a_low_precision_losss_total_is_not():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def loss_sum(self, x, y):
            return (self.w * x).sum()

    def program(rank, precision):
        dist = emu.DataParallel(Constant(), rank, "dp", precision=precision)
        return dist.backward(emu.Batch(torch.full((16, 1), 8191.0), torch.zeros(16, 1)), microbatches=8)

    for precision in ("fp16-scaled", "bf16-mixed", "fp32"):
        loss = emu.launch(program, emu.Mesh(dp=2), args=(precision,)).results[1]
        assert loss.dtype == torch.float32 and float(loss) == pytest.approx(8191, rel=2**-8), precision
