"""Faults that sharded and accumulated training really had elsewhere: the right numbers here, and each fault seen.

Right values come from plain torch in float64, or a closed form. Numbers and inputs are ours; the reports are linked.
"""

import math

import pytest
import torch
from torch import nn

import emu
from emu.parallel import Flat, LossScale, wrapping
from emu.spmd import BufferInFlight
from emu.trace.events import Collective

SAME = 1e-9  # float64 against float64, in another order of sums: far above rounding, far below the faults
STAGES = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "by_owner": True}]
SHARDED = STAGES[1:]


pytestmark = pytest.mark.usefixtures("float64")


def near(a, b):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=SAME, atol=SAME)


def normal(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


class Layers(nn.Module):
    """Some linear layers, each a unit."""

    def __init__(self, n=3, width=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - y) ** 2).sum()


class Dot(nn.Module):
    """Parameters of given sizes; the loss is their product with the rows, which are their gradient, then."""

    def __init__(self, *values):
        super().__init__()
        self.p = nn.ParameterList(value.clone() for value in values)

    def loss_sum(self, x, y):
        return (torch.cat([p.flatten() for p in self.p]) * x).sum()


def given(gradient):
    """A batch of one row, which one rank gets, whose gradient is that row."""
    return emu.Batch(gradient[None], torch.zeros(1), tokens=1)


def one_device(model, batches, kind=torch.optim.AdamW, clip=None, **options):
    """Plain torch. Returns the gradients before the last step, unclipped, and parameters."""
    opt, grads = kind([p for p in model.parameters() if p.requires_grad], **options), {}
    for data in batches:
        opt.zero_grad()
        (model.loss_sum(data.x, data.y) / data.tokens).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return grads, {n: p.detach().clone() for n, p in model.named_parameters()}


def rows(n=16, width=4, seed=0):
    return emu.Batch(*normal(seed, (n, width), (n, width)), tokens=n)


# 4. Sync turned off around a part of a microbatch. https://github.com/karpathy/build-nanogpt/pull/30


@pytest.mark.parametrize("form", ["both", "backward", "forward"])
def test_scenario_4_accumulation_gives_the_full_batch_wherever_sync_is_turned_off(form):
    batches = [rows(seed=1), rows(seed=2)]
    right = [one_device(Layers(), batches[:n], lr=0.1) for n in (1, 2)]  # after every step

    def program(rank):
        dist = emu.DataParallel(Layers(), rank, "dp", bucket_bytes=2**20)
        opt, seen = dist.optimizer(torch.optim.AdamW, lr=0.1), []
        for step, data in enumerate(batches):
            rank.mark(f"step {step}")
            x, y = data.shard(rank, "dp")
            for m in range(4):
                quiet = dist.no_sync() if m < 3 else None
                some = x[2 * m : 2 * m + 2], y[2 * m : 2 * m + 2]
                if quiet is None:
                    dist.loss_sum(*some).backward()
                elif form == "both":
                    with quiet:
                        dist.loss_sum(*some).backward()
                elif form == "backward":
                    loss = dist.loss_sum(*some)
                    with quiet:
                        loss.backward()
                else:
                    with quiet:
                        loss = dist.loss_sum(*some)
                    loss.backward()
            dist.finish(data.tokens)
            grads = {name: g.clone() for name, g in dist.gather_gradients().items()}
            opt.step()
            opt.zero_grad()
            seen.append((grads, {name: p.detach().clone() for name, p in dist.gather_parameters().items()}))
        return seen

    run = emu.launch(program, emu.Mesh(dp=2))
    for steps in run.results:
        for found, expected in zip(steps, right, strict=True):
            for some, others in zip(found, expected, strict=True):
                assert all(near(some[name], others[name]) for name in others)
    for name, p in run.results[0][-1][1].items():
        assert torch.equal(p, run.results[1][-1][1][name])
    if form == "both":
        step = run.window("step 0", "step 1").trace
        sent = [e.bytes for _, e in step.of(Collective, rank=0) if e.kind == "all_reduce"]
        assert sent == [3 * (16 + 4) * 8]  # one, of all parameters


def test_scenario_4_reducing_the_last_microbatch_alone_is_told_apart():
    data = rows()

    def program(rank, all_of_it):
        model = Layers()
        x, y = data.shard(rank, "dp")
        local, last = {}, {}
        for m in range(4):
            model.zero_grad()
            model.loss_sum(x[2 * m : 2 * m + 2], y[2 * m : 2 * m + 2]).backward()
            last = {n: p.grad.clone() for n, p in model.named_parameters()}
            local = {n: local.get(n, 0) + g for n, g in last.items()}
        group = rank.group("dp")
        if all_of_it:
            return {n: group.all_reduce(g) / 16 for n, g in local.items()}
        return {n: (local[n] - g + group.all_reduce(g.clone())) / 16 for n, g in last.items()}

    right = one_device(Layers(), [data], lr=0.1)[0]
    assert emu.launch(program, emu.Mesh(dp=2), args=(True,)).check(lambda *a: right, tier="float64", mutants="none")
    found = emu.launch(program, emu.Mesh(dp=2), args=(False,)).check(lambda *a: right, tier="float64", mutants="none")
    assert not found and "ranks 0 and 1" in found.why


# 9. Microbatches overwrite a shard instead of adding to it. https://github.com/ServiceNow/Fast-LLM/issues/550


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scenario_9_every_stage_adds_up_all_microbatches_at_any_size(ranks):
    data = rows(12)
    right = one_device(Layers(), [data], lr=0.1)[0]

    def program(rank, how, microbatches=3):
        dist = emu.DataParallel(Layers(), rank, "dp", **how)
        for _ in range(2):  # the second time with buffers that were used
            dist.backward(data, microbatches=microbatches)
        return dist.gather_gradients()

    for how in STAGES:
        for found in emu.launch(program, emu.Mesh(dp=ranks), args=(how,)).results:
            assert all(near(found[name], right[name]) for name in right), how


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scenario_9_an_overwritten_shard_is_told_apart(ranks):
    data = rows(12)
    right = torch.cat([g.flatten() for g in one_device(Layers(), [data], lr=0.1)[0].values()])

    def program(rank, adds):
        model, group = Layers(), rank.group("dp")
        x, y = data.shard(rank, "dp")
        shard = torch.zeros(60 // ranks)
        for some_x, some_y in zip(x.chunk(3), y.chunk(3)):
            model.zero_grad()
            model.loss_sum(some_x, some_y).backward()
            part = group.reduce_scatter(torch.cat([p.grad.flatten() for p in model.parameters()]))
            shard = shard + part if adds else part
        return group.all_gather(shard) / 12

    assert all(near(g, right) for g in emu.launch(program, emu.Mesh(dp=ranks), args=(True,)).results)
    assert all(not near(g, right) for g in emu.launch(program, emu.Mesh(dp=ranks), args=(False,)).results)


# 12. A unit with frozen and trainable parameters. https://github.com/pytorch/pytorch/issues/104690


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].frozen = nn.Parameter(torch.randn(10, 10), requires_grad=False)
        self.layers[0].trained = nn.Parameter(torch.randn(10, 2))
        self.layers[0].forward = lambda x: torch.tanh(x @ self.layers[0].frozen) @ self.layers[0].trained

    def loss_sum(self, x, y):
        return ((self.layers[0](x) - y) ** 2).sum()


def test_scenario_12_frozen_parameters_stay_and_cost_neither_gradients_nor_states():
    batches = [emu.Batch(*normal(seed, (6, 10), (6, 2)), tokens=6) for seed in (1, 2)]
    rule = {"lr": 0.1, "weight_decay": 0.1}
    right = one_device(PartlyFrozen(), batches, **rule)[1]

    def program(rank):
        dist = emu.DataParallel(PartlyFrozen(), rank, "dp", zero=3)
        opt = dist.optimizer(torch.optim.AdamW, **rule)
        for data in batches:
            dist.backward(data)
            opt.step()
        return opt, dist, dist.gather_parameters()  # returned, so that they live to the end

    run = emu.launch(program, emu.Mesh(dp=2))
    for rank, (_, _, found) in enumerate(run.results):
        assert torch.equal(found["layers.0.frozen"], PartlyFrozen().layers[0].frozen)
        assert near(found["layers.0.trained"], right["layers.0.trained"])
        held = {category: line[-1] for category, line in run.memory.series(rank)[1].items()}
        assert held["gradients"] == 10 * 8 and held["optimizer"] == 2 * 10 * 8


def test_scenario_12_decay_of_frozen_values_in_a_shared_vector_is_told_apart():
    frozen, trained = normal(12, (100,), (20,))

    def program(rank):
        """AdamW on this rank's half of one vector with everything; what is frozen has a gradient of 0."""
        shard = nn.Parameter(torch.cat([frozen, trained]).chunk(2)[rank].clone())
        opt = torch.optim.AdamW([shard], lr=0.1, weight_decay=0.1)
        shard.grad = torch.zeros(60)
        opt.step()
        return rank.group("dp").all_gather(shard.detach()), opt.state[shard]["exp_avg"].numel()

    for values, numel in emu.launch(program, emu.Mesh(dp=2)).results:
        assert not torch.equal(values[:100], frozen) and numel == 60  # not 10


# 13. Padding on several ranks. https://github.com/deepspeedai/DeepSpeed/pull/6974


def thirteen():
    g = torch.Generator().manual_seed(13)
    return (torch.randn(10, generator=g, dtype=torch.float64) for _ in "pg")


@pytest.mark.parametrize("how", [{"zero": 1}, {"zero": 2}, {"zero": 3}])
@pytest.mark.parametrize(("numel", "cuts"), [(10, (4, 4, 2, 0)), (2, (2, 0, 0, 0))])
def test_scenario_13_padding_may_fill_several_ranks(monkeypatch, how, numel, cuts):
    monkeypatch.setattr(wrapping, "Flat", lambda *args, **options: Flat(*args, align=8 if numel > 8 else 1, **options))
    p, g = (value[:numel] for value in thirteen())

    def program(rank):
        dist = emu.DataParallel(Dot(p), rank, "dp", **how)
        opt = dist.optimizer(torch.optim.Adam, lr=0.1, clip=1e9)
        dist.backward(given(g))
        done = opt.step()
        return dist.vectors[0].real, dist.vectors[0].slots, done.norm, dist.gather_parameters()["p.0"]

    slots, expected = (4, cuts) if numel > 8 else (1, (1, 1, 0, 0))
    for rank, (real, room, norm, found) in enumerate(emu.launch(program, emu.Mesh(dp=4)).results):
        assert (real, room) == (expected[rank], slots)
        assert near(norm, g.norm())
        assert near(found, p - 0.1 * g / (g.abs() + 1e-8))  # Adam's first step


def test_scenario_13_padding_taken_for_values_is_told_apart():
    _, g = thirteen()

    def program(rank, ends):
        padded = torch.cat([g, torch.full((6,), 3.0)])  # left over from what the buffer was used for
        mine = padded[4 * rank : 4 * rank + ends[rank]]
        return rank.group("dp").all_reduce((mine**2).sum()).sqrt()

    assert all(near(norm, g.norm()) for norm in emu.launch(program, emu.Mesh(dp=4), args=((4, 4, 2, 0),)).results)
    for ends in ((4, 4, 4, 4), (4, 4, 4, 0)):  # counted; and looked for on the last rank alone
        assert not any(near(norm, g.norm()) for norm in emu.launch(program, emu.Mesh(dp=4), args=(ends,)).results)


# 15. Every rank clips by the norm of its own shard. https://github.com/pytorch/pytorch/issues/170862


def fifteen():
    g = torch.Generator().manual_seed(15)
    return [torch.randn(n, generator=g, dtype=torch.float64) * 2 for n in (5, 4, 3)]


@pytest.mark.parametrize("how", STAGES)
@pytest.mark.parametrize("kind", [2.0, math.inf])
def test_scenario_15_all_ranks_clip_by_the_norm_of_all_gradients(how, kind):
    whole = torch.cat(fifteen())
    right = whole.norm() if kind == 2 else whole.abs().max()
    if kind == 2:
        assert abs(float(right) - 7.81165) < 1e-5

    def program(rank):
        dist = emu.DataParallel(Dot(*(torch.zeros_like(g) for g in fifteen())), rank, "dp", **how)
        opt = dist.optimizer(torch.optim.SGD, lr=1.0, clip=1.0, norm=kind)
        dist.backward(given(whole))
        return opt.step().norm, dist.gather_parameters()

    for norm, values in emu.launch(program, emu.Mesh(dp=2)).results:
        assert near(norm, right)
        assert near(-torch.cat(list(values.values())), whole / (right + 1e-6))


@pytest.mark.parametrize("wrong", ["local", "sum of norms"])
def test_scenario_15_local_norms_and_their_sum_are_told_apart(wrong):
    whole = torch.cat(fifteen())

    def program(rank):
        mine, group = whole[6 * rank : 6 * rank + 6], rank.group("dp")
        norm = mine.norm() if wrong == "local" else group.all_reduce(mine.norm())
        return norm, group.all_gather(mine / (norm + 1e-6))

    for norm, clipped in emu.launch(program, emu.Mesh(dp=2)).results:
        assert abs(float(norm) - 7.81165) > 0.1 and not near(clipped, whole / (whole.norm() + 1e-6))


# 54. Loss scaling: who skips, and what is clipped. https://github.com/pytorch/pytorch/pull/115710


def fifty_four():
    g = torch.Generator().manual_seed(54)
    return torch.randn(6, generator=g, dtype=torch.float64), torch.randn(6, generator=g, dtype=torch.float64) * 0.1


@pytest.mark.parametrize("how", STAGES)
def test_scenario_54_gradients_are_unscaled_then_clipped_and_an_overflow_is_everyones(how):
    p, g = fifty_four()
    overflow = torch.zeros(6)
    overflow[4] = math.inf  # in rank 1's shard alone

    def program(rank):
        scale = LossScale(1024.0)
        dist = emu.DataParallel(Dot(p), rank, "dp", **how)
        opt = dist.optimizer(torch.optim.SGD, lr=1.0, clip=1.0, scale=scale)
        seen = []
        for gradient in (g, overflow, 100 * g):
            dist.backward(given(gradient), scale=scale)
            skipped = opt.step().skipped
            opt.zero_grad()
            seen.append((skipped, scale.value, dist.gather_parameters()["p.0"]))
        return seen

    after = p - g  # its norm is below 1
    last = after - 100 * g / (100 * g.norm() + 1e-6)
    for first, second, third in emu.launch(program, emu.Mesh(dp=2)).results:
        assert first[:2] == (False, 1024.0) and near(first[2], after)
        assert second[:2] == (True, 512.0) and torch.equal(second[2], first[2])
        assert third[:2] == (False, 512.0) and near(third[2], last)


def test_scenario_54_one_rank_that_skips_alone_and_clipping_scaled_gradients_are_told_apart():
    p, g = fifty_four()

    def skips_alone(rank):
        mine, overflowed = g.chunk(2)[rank], rank == 1  # the flag is read before its reduction is done
        return rank.group("dp").all_gather(p.chunk(2)[rank] - (0 if overflowed else mine))

    def clips_first(rank):
        group, mine = rank.group("dp"), 1024 * g.chunk(2)[rank]
        norm = group.all_reduce((mine**2).sum()).sqrt()
        return group.all_gather(p.chunk(2)[rank] - mine / (norm + 1e-6) / 1024)

    assert not near(emu.launch(skips_alone, emu.Mesh(dp=2)).results[0], p)
    assert not near(emu.launch(clips_first, emu.Mesh(dp=2)).results[0], p - g)


# 60. What the stages take. https://github.com/deepspeedai/DeepSpeed/issues/5102


@pytest.mark.parametrize(
    ("numel", "ranks", "backend", "right"),
    [(10, 4, "virtual", (160, 76, 62, 48)), (10**9, 8, "shape", (16e9, 5.5e9, 3.75e9, 2e9))],
)
def test_scenario_60_model_states_take_the_bytes_of_the_closed_form(numel, ranks, backend, right):
    def program(rank, zero):
        model = Dot(torch.zeros(1, dtype=torch.float32).expand(numel) if backend == "shape" else torch.zeros(numel))
        dist = emu.DataParallel(model, rank, "dp", zero=zero, precision="bf16-mixed")
        opt = dist.optimizer(torch.optim.Adam, lr=0.1)
        dist.backward(emu.Batch(torch.ones(ranks, 1), torch.zeros(ranks), tokens=ranks))
        opt.step()
        rank.mark("stepped")
        return dist, opt

    for zero in range(4):
        only = {"ranks": [0]} if backend == "shape" else {}
        run = emu.launch(program, emu.Mesh(dp=ranks), args=(zero,), backend=backend, precision="fp32", **only)
        lines = run.memory.series(0)[1]
        assert sum(lines[category][-1] for category in ("parameters", "gradients", "optimizer")) == right[zero]
        estimate = 4 * numel + 16 * numel / ranks  # as if stage 2 kept all gradients
        assert zero != 2 or right[zero] != estimate


# 62. Prefetched units pile up. https://github.com/pytorch/pytorch/issues/147168


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_scenario_62_at_most_one_unit_more_than_are_prefetched_is_whole(depth):
    unit, shard = (16 + 4) * 8, (16 + 4) * 8 // 4

    def program(rank):
        dist = emu.DataParallel(Layers(8), rank, "dp", zero=3, prefetch=depth)
        rank.mark("trained")
        dist.backward(rows(8))

    run = emu.launch(program, emu.Mesh(dp=4))
    for rank in range(4):
        at, lines = run.memory.series(rank)
        start = next(i for i, e in enumerate(run.trace[rank]) if getattr(e, "name", "") == "trained")
        held = [n for i, n in zip(at, lines["parameters"]) if i > start]
        assert max(held) - 8 * shard == (1 + depth) * unit  # and not 8


def test_scenario_62_freeing_what_another_stream_still_fills_is_an_error():
    def program(rank):
        whole = torch.empty(8)
        work = rank.group("dp").all_gather(torch.ones(4), out=whole, async_op=True)
        whole.untyped_storage().resize_(0)
        work.wait()

    with pytest.raises(BufferInFlight, match="is freed by resize_"):
        emu.launch(program, emu.Mesh(dp=2))


@pytest.mark.parametrize("waits", [False, True])
def test_scenario_62_freeing_what_another_stream_still_reads_is_an_error(waits):
    """A whole layer that is let go of while the compute stream still multiplies by it."""

    def program(rank):
        whole, compute = torch.ones(8, 8), rank.stream("compute")
        compute.wait_stream(rank.stream("default"))
        with compute:
            out = whole @ whole
        if waits:
            rank.stream("default").wait_stream(compute)
        whole.untyped_storage().resize_(0)
        compute.synchronize()
        return out

    if waits:
        assert float(emu.launch(program, emu.Mesh(dp=1)).results[0][0, 0]) == 8
        return
    with pytest.raises(BufferInFlight, match="is freed by resize_") as caught:
        emu.launch(program, emu.Mesh(dp=1))
    assert "compute" in caught.value.streams


# Further faults of these kinds.


class Switched(nn.Module):
    """Uses one of two parameters, or the other. The unused one has no gradient, so AdamW leaves it alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def loss_sum(self, x, y):
        return (x * (self.a if bool(y[:1].sum() == 0) else self.b)).sum()


@pytest.mark.parametrize("how", STAGES)
def test_a_parameter_that_no_rank_uses_does_not_decay(how):
    """It got a gradient of zero, which decay and momentum took for one. https://github.com/pytorch/pytorch/issues/28294"""
    x = normal(1, (4, 3))[0]
    batches = [emu.Batch(x, torch.full((4,), label), tokens=4) for label in (1, 0, 0)]
    right = one_device(Switched(), batches, lr=0.1, weight_decay=0.5)[1]

    def program(rank):
        dist = emu.DataParallel(Switched(), rank, "dp", find_unused=True, **how)
        opt = dist.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        for data in batches:
            dist.backward(data)
            opt.step()
            opt.zero_grad()
        return dist.gather_parameters()

    for found in emu.launch(program, emu.Mesh(dp=2)).results:
        assert all(near(found[name], right[name]) for name in right)
    zero = nn.Parameter(torch.ones(3))
    zero.grad = torch.zeros(3)
    torch.optim.AdamW([zero], lr=0.1, weight_decay=0.5).step()
    assert not near(zero, torch.ones(3))  # the fault


class Shared(nn.Module):
    """A weight that two units use, and one for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight

    def loss_sum(self, x, y):
        return ((self.layers[1](torch.tanh(self.layers[0](x))) - y) ** 2).sum()


def norm_of(grads, **counted):
    return math.sqrt(sum(float((g**2).sum()) * counted.get(name, 1) for name, g in grads.items()))


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"zero": 2, "replicated": ["*.bias"]}, {"layers.0.bias": 4, "layers.1.bias": 4}),
        ({"zero": 3, "replicated": ["*.bias"]}, {"layers.0.bias": 4, "layers.1.bias": 4}),
        ({"zero": 2, "replicate": 2}, dict.fromkeys(["layers.0.weight", "layers.0.bias", "layers.1.bias"], 2)),
        ({"zero": 3, "replicate": 2}, dict.fromkeys(["layers.0.weight", "layers.0.bias", "layers.1.bias"], 2)),
        ({"zero": 1}, {"layers.0.weight": 2}),
        ({"zero": 3}, {"layers.0.weight": 2}),
    ],
)
def test_a_norm_counts_what_is_replicated_or_shared_once(how, fault):
    """Parameters that every rank has whole counted once per rank (https://github.com/mindspore-ai/hyper-parallel/issues/526),
    shards once per replica (https://github.com/ByteDance-Seed/VeOmni/pull/862), a tied weight once per name
    (https://github.com/NVIDIA/Megatron-LM/pull/7228).
    """
    data = rows(8)
    grads, right = one_device(Shared(), [data], torch.optim.SGD, clip=0.5, lr=1.0)

    def program(rank):
        dist = emu.DataParallel(Shared(), rank, "dp", **how)
        opt = dist.optimizer(torch.optim.SGD, lr=1.0, clip=0.5)
        dist.backward(data)
        return opt.step().norm, dist.gather_parameters()

    for norm, found in emu.launch(program, emu.Mesh(dp=4)).results:
        assert near(norm, norm_of(grads)) and all(near(found[name], right[name]) for name in right)
    assert norm_of(grads, **fault) > 1.05 * norm_of(grads)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_microbatch_reaches_every_replica(zero):
    """Sums over replicas must hold the earlier microbatches, too. https://github.com/pytorch/pytorch/pull/125484"""
    data = rows(8)
    right = one_device(Layers(), [data], lr=0.1)[0]

    def program(rank):
        dist = emu.DataParallel(Layers(), rank, "dp", zero=zero, replicate=2)
        x, y = data.shard(rank, "dp")
        with dist.no_sync():
            dist.loss_sum(x[:1], y[:1]).backward()
        dist.loss_sum(x[1:], y[1:]).backward()
        dist.finish(data.tokens)
        return dist.gather_gradients()

    def last_alone(rank):
        """The first microbatch is summed over the shard's group alone."""
        model, total = Layers(), None
        x, y = data.shard(rank, "dp")
        pair = [0, 1] if rank < 2 else [2, 3]
        for m in range(2):
            model.zero_grad()
            model.loss_sum(x[m : m + 1], y[m : m + 1]).backward()
            sums = {n: rank.group(members=pair).all_reduce(p.grad.clone()) for n, p in model.named_parameters()}
            if m:
                sums = {n: rank.group(members=[rank % 2, rank % 2 + 2]).all_reduce(g) for n, g in sums.items()}
            total = sums if total is None else {n: total[n] + g for n, g in sums.items()}
        return {n: g / 8 for n, g in total.items()}

    for found in emu.launch(program, emu.Mesh(dp=4)).results:
        assert all(near(found[name], right[name]) for name in right)
    wrong = emu.launch(last_alone, emu.Mesh(dp=4)).results
    assert not any(near(found["layers.0.weight"], right["layers.0.weight"]) for found in wrong)
    assert not near(wrong[0]["layers.0.weight"], wrong[2]["layers.0.weight"])  # replicas drift apart


def test_what_was_taken_while_parameters_were_gathered_stays():
    """It was freed, or overwritten, on the way out. https://github.com/facebookresearch/fairscale/pull/885"""
    right = Layers().state_dict()

    def program(rank):
        dist = emu.DataParallel(Layers(), rank, "dp", zero=3)
        with dist.gathered() as model:
            taken = model.state_dict()
        opt = dist.optimizer(torch.optim.SGD, lr=1.0)
        dist.backward(rows(4))
        opt.step()
        return {name: value.clone() for name, value in taken.items()}, dist.gather_parameters()

    for track in (True, False):
        for taken, now in emu.launch(program, emu.Mesh(dp=2), track=track).results:
            assert all(torch.equal(taken[name], right[name]) and not near(now[name], right[name]) for name in right)
