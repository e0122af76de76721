"""Optimizers on shards: groups, schedules, clipping, loss scales and precision, as plain torch has them; and what they refuse."""

import math

import pytest
import torch
from torch import nn

import emu
from emu.parallel import LossScale
from emu.trace.events import Collective

from .zoo import BATCHES, RANKS, SAME, SIZES, STAGES, Frozen, Plain, Tied, made, rows

every_way = pytest.mark.parametrize("how", STAGES.values(), ids=STAGES)
FEW = {name: STAGES[name] for name in ("ddp", "zero1", "zero2", "zero3", "hsdp3", "owners2", "owners3")}
few_ways = pytest.mark.parametrize("how", FEW.values(), ids=FEW)


pytestmark = pytest.mark.usefixtures("float64")


def plain(kind, optimizer, groups=None, schedule=None, clip=None, norm=2.0, steps=3, model=Plain, **options):
    """Plain torch. Returns parameters, and the norms before clipping."""
    net = made(model)
    opt = optimizer(groups(net) if groups else net.parameters(), **options)
    scheduler, norms = schedule(opt) if schedule else None, []
    for i in range(steps):
        data = BATCHES[i % 2]
        opt.zero_grad()
        (net.loss_sum(data.x, data.y) / data.tokens).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip, norm))
        opt.step()
        if scheduler is not None:
            scheduler.step()
    return {n: p.detach().clone() for n, p in net.named_parameters()}, norms


def parallel(how, optimizer, groups=None, schedule=None, steps=3, model=Plain, ranks=RANKS, sizes=SIZES, **options):
    def program(rank):
        dist = emu.DataParallel(made(model), rank, "dp", find_unused=True, **how)
        opt = dist.optimizer(optimizer, groups(dist.model) if groups else None, **options)
        scheduler, norms = schedule(opt.torch) if schedule else None, []
        for i in range(steps):
            dist.backward(BATCHES[i % 2], sizes)
            norms.append(opt.step().norm)
            if scheduler is not None:
                scheduler.step()
            opt.zero_grad()
        return dist.gather_parameters(), norms

    return emu.launch(program, emu.Mesh(dp=ranks)).results


def equal(found, right):
    return all(torch.allclose(found[name], right[name], rtol=SAME, atol=SAME) for name in right)


# Groups.


def by_hand(net):
    return [
        {"params": [p for n, p in net.named_parameters() if n.endswith("weight")], "weight_decay": 0.3},
        {"params": [net.layers[0].bias, net.last.bias], "lr": 0.01},
    ]  # the other biases are not trained


GROUPS = {
    "objects": by_hand,
    "names": lambda net: [
        {"params": [n for n, _ in net.named_parameters() if n.endswith("weight")], "weight_decay": 0.3},
        {"params": ["layers.0.bias", "last.bias"], "lr": 0.01},
    ],
    "patterns": lambda net: [
        {"params": "*.weight", "weight_decay": 0.3},
        {"params": ["layers.0.b*", "last.bias"], "lr": 0.01},
    ],
    "a generator": lambda net: [
        {"params": (p for n, p in net.named_parameters() if n.endswith("weight")), "weight_decay": 0.3},
        {"params": ("layers.0.bias", net.last.bias), "lr": 0.01},
    ],
}


@few_ways
@pytest.mark.parametrize("form", GROUPS)
def test_groups_by_objects_names_and_patterns_are_those_of_plain_torch(form, how):
    right, _ = plain(Plain, torch.optim.AdamW, by_hand, lr=0.05)
    assert torch.equal(right["layers.2.bias"], made(Plain).layers[2].bias)  # which no group names
    for found, _ in parallel(how, torch.optim.AdamW, GROUPS[form], lr=0.05):
        assert equal(found, right)
    other, _ = plain(Plain, torch.optim.AdamW, lr=0.05)
    assert not equal(other, right)


@few_ways
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
        (torch.optim.NAdam, {"lr": 0.05}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
        (torch.optim.Rprop, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.05}),
    ],
)
def test_what_works_element_by_element_works_on_shards(kind, options, how):
    right, _ = plain(Plain, kind, **options)
    for found, _ in parallel(how, kind, **options):
        assert equal(found, right)


@few_ways
def test_two_optimizers_may_share_a_model(how):
    net = made(Plain)
    a = torch.optim.SGD([p for n, p in net.named_parameters() if "bias" in n], lr=0.1)
    b = torch.optim.AdamW([p for n, p in net.named_parameters() if "weight" in n], lr=0.1)
    (net.loss_sum(BATCHES[0].x, BATCHES[0].y) / 7).backward()
    a.step()
    b.step()

    def program(rank):
        dist = emu.DataParallel(made(Plain), rank, "dp", **how)
        opts = [
            dist.optimizer(torch.optim.SGD, [{"params": "*.bias"}], lr=0.1),
            dist.optimizer(torch.optim.AdamW, [{"params": "*.weight"}], lr=0.1),
        ]
        dist.backward(BATCHES[0], SIZES)
        for opt in opts:
            opt.step()
        return dist.gather_parameters()

    for found in emu.launch(program, emu.Mesh(dp=RANKS)).results:
        assert equal(found, {n: p.detach() for n, p in net.named_parameters()})


SCHEDULES = {
    "warmup": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: (step + 1) / 4),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10),
}


@few_ways
@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules_act_on_the_optimizer_within(name, how):
    right, _ = plain(Plain, torch.optim.AdamW, by_hand, SCHEDULES[name], lr=0.05)
    for found, _ in parallel(how, torch.optim.AdamW, by_hand, SCHEDULES[name], lr=0.05):
        assert equal(found, right)
    assert not equal(plain(Plain, torch.optim.AdamW, by_hand, lr=0.05)[0], right)


# Clipping.


@every_way
@pytest.mark.parametrize(
    ("norm", "replicated"), [(2.0, ()), (2.0, ("*.bias",)), (math.inf, ("*.bias",))], ids=["cut", "some whole", "inf"]
)
def test_clipping_takes_the_norm_of_all_gradients_each_counted_once(norm, replicated, how):
    options = {"lr": 0.1, "clip": 0.1, "norm": norm, "steps": 2}
    for model in (Tied, Frozen):
        right, norms = plain(None, torch.optim.SGD, model=model, **options)
        assert min(norms) > 0.1  # it does clip
        for found, seen in parallel({**how, "replicated": replicated}, torch.optim.SGD, model=model, **options):
            assert equal(found, right)
            assert torch.allclose(torch.stack(seen), torch.stack(norms), rtol=SAME)


class Large(nn.Module):
    """Gradients of 300 in float16, whose squares are above its largest number."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, dtype=torch.float16))

    def loss_sum(self, x, y):
        return (300 * self.w * x.to(torch.float16)).sum()


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 1}, {"zero": 3}])
def test_the_norm_of_half_numbers_does_not_overflow(how):
    def program(rank):
        dist = emu.DataParallel(Large(), rank, "dp", **how)
        opt = dist.optimizer(torch.optim.SGD, lr=1.0, clip=1.0)
        dist.backward(emu.Batch(torch.ones(2, 4), torch.zeros(2), tokens=2))
        return opt.step().norm, dist.gather_parameters()["w"]

    for norm, w in emu.launch(program, emu.Mesh(dp=2)).results:
        assert float(norm) == 600 and torch.allclose(w, torch.full((4,), -0.5, dtype=torch.float16))


# Loss scales.


@few_ways
def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_grows_after_the_interval(how):
    class Spiked(Plain):
        def loss_sum(self, x, y):
            loss = super().loss_sum(x, y)
            return loss * math.inf if len(x) and float(x.abs().max()) > 50 else loss

    spiked = rows(0)
    spiked.x[0] = 100  # a row of rank 0's alone
    steps = [BATCHES[0], spiked, BATCHES[1], BATCHES[0], BATCHES[1]]

    def program(rank):
        scale = LossScale(2.0**10, interval=2)
        dist = emu.DataParallel(made(Spiked), rank, "dp", find_unused=True, **how)
        opt = dist.optimizer(torch.optim.AdamW, lr=0.05, clip=0.3, scale=scale)
        seen = []
        for data in steps:
            dist.backward(data, SIZES, scale=scale)
            seen.append((opt.step().skipped, scale.value))
            opt.zero_grad()
        return seen, dist.gather_parameters()

    net = made(Plain)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    for data in (steps[0], *steps[2:]):
        opt.zero_grad()
        (net.loss_sum(data.x, data.y) / 7).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        opt.step()
    for seen, found in emu.launch(program, emu.Mesh(dp=RANKS)).results:
        assert seen == [(False, 1024), (True, 512), (False, 512), (False, 1024), (False, 1024)]
        assert equal(found, {n: p.detach() for n, p in net.named_parameters()})


# Precision.


def gradients(rank, how, roles, data):
    dist = emu.DataParallel(made(Plain), rank, "dp", precision=roles, **how)
    dist.backward(data)
    return torch.cat([g.flatten().double() for g in dist.gather_gradients().values()])


def error(ranks, how, data, **roles):
    """The relative error of all gradients against float64 with the same, rounded parameters."""
    net = made(Plain).bfloat16().double()
    x = data.x.bfloat16().double()
    (net.loss_sum(x, data.y) / data.tokens).backward()
    right = torch.cat([p.grad.flatten() for p in net.parameters()])
    roles = emu.Precision(param="bf16", activations="bf16", **roles)
    found = emu.launch(gradients, emu.Mesh(dp=ranks), args=(how, roles, data)).results[0]
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 2}, {"zero": 3}])
def test_bf16_gradients_are_no_less_exact_on_more_ranks(how):
    """Every rank rounds its own gradient once more before the sum, which is in float32, and its errors are independent:
    so the error is at most about twice the single device's in the same precision, and does not grow with ranks.
    """
    data = rows(0, n=64)
    alone = error(1, {"zero": 0}, data, grad="bf16")
    assert 1e-4 < alone < 0.03  # bf16 has 8 bits
    for ranks in (2, 4, 8, 16):
        assert error(ranks, how, data, grad="bf16") <= 2 * alone
        assert error(ranks, how, data, grad="fp32") <= 2 * alone


def test_summing_over_ranks_in_bf16_is_what_loses_digits():
    """Gradients of 1 from 300 ranks: bf16 knows no 257, so a sum in it stops there; a sum in float32 does not."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def loss_sum(self, x, y):
            return (self.w * x).sum()

    def program(rank, reduce):
        roles = emu.Precision(param="bf16", grad="fp32", reduce=reduce, activations="bf16")
        dist = emu.DataParallel(One(), rank, "dp", precision=roles)
        dist.loss_sum(torch.ones(1, 1), torch.ones(1)).backward()
        dist.finish(1)
        return float(dist.gather_gradients()["w"])

    for reduce, low, high in (("fp32", 300, 300), ("bf16", 256, 299)):
        (found,) = set(emu.launch(program, emu.Mesh(dp=300), args=(reduce,), track=False).results)
        assert low <= found <= high


@few_ways
def test_every_role_has_its_dtype_in_memory_and_on_the_wire(how):
    roles = emu.Precision(param="bf16", grad="fp16", reduce="fp32", master="fp64", moments="fp64", activations="bf16")

    def program(rank):
        dist = emu.DataParallel(made(Plain), rank, "dp", precision=roles, **how)
        opt = dist.optimizer(torch.optim.AdamW, lr=0.1)
        rank.mark("begin")
        dist.backward(BATCHES[0])
        own = {g.own().dtype for g in dist.gradients}
        opt.step()
        rank.mark("end")
        states = {piece.tensor.dtype for piece in opt.pieces().get("exp_avg", ())}
        with dist.gathered() as model:
            held = {p.dtype for p in model.parameters()}
        return held, own, {piece.tensor.dtype for piece in dist.pieces()} | states

    run = emu.launch(program, emu.Mesh(dp=4))
    for held, own, kept in run.results:
        assert held == {torch.bfloat16} and own == {torch.float16} and kept <= {torch.float64}
    sent: dict[str, set[str]] = {}
    for _, event in run.window("begin", "end").trace.of(Collective, rank=0):
        if event.name != "loss":
            sent.setdefault(event.kind, set()).add(event.dtype)
    for kind, dtypes in sent.items():
        gathers = kind == "all_gather" or kind == "broadcast"
        assert dtypes == {"bfloat16" if gathers else "float32"}, kind


# What is refused.


def refused(use, says, ranks=2, **how):
    def program(rank):
        use(emu.DataParallel(made(Plain), rank, "dp", **how))

    with pytest.raises(emu.EmuError, match=says) as caught:
        emu.launch(program, emu.Mesh(dp=ranks))
    assert caught.value.hint


def sgd(dist, groups=None, **options):
    return dist.optimizer(torch.optim.SGD, groups, lr=0.1, **options)


def back(dist, **options):
    dist.backward(BATCHES[0], **options)


SCALE = LossScale()
WRONG = {
    "a norm of 1": (lambda d: sgd(d, norm=1.0), r"norm=1.0 cannot be clipped by\n.*2.0 or float\('inf'\)"),
    "clip 0": (lambda d: sgd(d, clip=0), r"clip=0 leaves nothing of the gradients\n.*or None"),
    "clip nan": (lambda d: sgd(d, clip=math.nan), r"clip=nan leaves nothing"),
    "no such name": (
        lambda d: sgd(d, [{"params": "nose.*"}]),
        r"group 0 has 'nose.\*', which is no.*\n.*layers.0.weight",
    ),
    "no such object": (
        lambda d: sgd(d, [{"params": nn.Parameter(torch.ones(1))}]),
        r"group 0 has a Parameter, which is no",
    ),
    "two groups": (
        lambda d: sgd(d, [{"params": "*"}, {"params": "last.bias"}]),
        r"'last.bias' is in groups 0 and 1\n.*one of them",
    ),
    "step first": (lambda d: sgd(d).step(), r"not finished: they are sums over tokens.*\n.*finish\(tokens\)"),
    "step in between": (
        lambda d: [d.loss_sum(BATCHES[0].x, BATCHES[0].y).backward(), sgd(d).step()],
        r"not finished.*\n.*finish\(tokens\)",
    ),
    "finish twice": (lambda d: [back(d), d.finish(7)], r"finished already.*second division.*\n.*zero_grad\(\) first"),
    "finish nothing": (lambda d: d.finish(7), r"gave no gradient to \w+.*\n.*no backward ran"),
    "no tokens": (
        lambda d: [d.loss_sum(BATCHES[0].x, BATCHES[0].y).backward(), d.finish(0)],
        r"no tokens to learn from",
    ),
    "backward after finish": (
        lambda d: [back(d), d.loss_sum(BATCHES[0].x, BATCHES[0].y).backward()],
        r"divided already\n.*zero_grad\(\) after the step",
    ),
    "scale for one only": (
        lambda d: [back(d), sgd(d, scale=LossScale(8.0)).step()],
        r"backward was given no loss scale, and the optimizer was given LossScale\(8, 0 steps.*\n.*scale=scale",
    ),
    "scale for the other only": (
        lambda d: [back(d, scale=LossScale(8.0)), sgd(d).step()],
        r"backward was given LossScale\(8, .*\), and the optimizer was given no loss scale\n",
    ),
    "unscaled twice": (
        lambda d: (lambda s, o: [back(d, scale=s), o.step(), o.step()])(
            *(lambda s: (s, sgd(d, scale=s)))(LossScale(8.0))
        ),
        r"divided the loss scale out of these gradients already\n.*zero_grad\(\)",
    ),
    "one scale for all ranks": (
        lambda d: [sgd(d, scale=SCALE), back(d)],
        r"ranks 0 and 1 share one LossScale.*\n.*within",
    ),
    "a bad scale": (lambda d: LossScale(0.0), r"LossScale\(0.0, .*\n.*value is above 0"),
}


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 1}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_told(name, how):
    refused(*WRONG[name], **how)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_that_look_at_whole_parameters_are_refused_shards(kind):
    says = r"looks at all elements of a parameter at once.*\n.*zero=0 in the model's own precision"
    for how in ({"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 0, "precision": "bf16-mixed"}):
        refused(lambda d: d.optimizer(kind), says, **how)
    right = made(Plain)
    opt = torch.optim.Adafactor(right.parameters())
    (right.loss_sum(BATCHES[0].x, BATCHES[0].y) / 7).backward()
    opt.step()

    def program(rank):
        dist = emu.DataParallel(made(Plain), rank, "dp")
        own = dist.optimizer(torch.optim.Adafactor)
        dist.backward(BATCHES[0])
        own.step()
        return dist.gather_parameters()

    for found in emu.launch(program, emu.Mesh(dp=2)).results:
        assert equal(found, {n: p.detach() for n, p in right.named_parameters()})


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize(("mesh", "model"), [("tp=2", "gpt-tiny"), ("dp=2,ep=2", "moe-tiny")])
def test_optimizers_that_look_at_whole_parameters_are_refused_pieces_of_layers(kind, mesh, model):
    from emu.models import Decoder, config

    plan = emu.Plan(mesh, precision="fp32")

    def program(rank, of):
        emu.parallel.parallelize(Decoder(config(model, layers=1), seed=0), plan, rank).optimizer(of, lr=0.1)

    on = emu.parallel.mesh_of(plan)
    with pytest.raises(
        emu.EmuError, match=rf"{kind.__name__} looks at all elements.*a sharding \(tp, ep, etp\)"
    ) as caught:
        emu.launch(program, on, args=(kind,))
    assert "dp alone" in caught.value.hint
    emu.launch(program, on, args=(torch.optim.SGD,))  # negative control: one that works element by element


def test_moments_in_another_dtype_than_the_master_copy_are_refused():
    roles = emu.Precision(param="bf16", master="fp32", moments="bf16")
    refused(sgd, r"moments in torch.bfloat16 beside a master copy in torch.float32.*\n.*same dtype", precision=roles)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_a_complex_gradients_norm_is_torchs(zero, norm):
    class Phases(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([3 + 4j, 1 - 2j, 2j]))

        def loss_sum(self, x, y):
            return (self.w.real * x[:, :1] + self.w.imag * x[:, 1:]).sum() / 3

    x = torch.tensor([[3.0, 4.0]])

    def program(rank):
        dist = emu.DataParallel(Phases(), rank, "dp", zero=zero)
        optimizer = dist.optimizer(torch.optim.SGD, lr=0.1, clip=1.0, norm=norm)
        dist.backward(emu.Batch(x, torch.zeros(1, 1)))
        return float(optimizer.step().norm)

    expected = float(torch.linalg.vector_norm(torch.full((3,), 1 + 4j / 3), norm))
    assert emu.launch(program, emu.Mesh(dp=2)).results[0] == pytest.approx(expected, rel=1e-5)
