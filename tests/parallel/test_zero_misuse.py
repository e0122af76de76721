"""What was silently wrong: evaluations between steps, forgotten or foreign zeroing, other hands on the parameters."""

import copy

import pytest
import torch
from torch import nn

import emu

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = emu.Batch(X, torch.zeros(6, 1))
OTHER = emu.Batch(X.flip(0) * 2, torch.zeros(6, 1))


STAGES = [
    *({"zero": zero} for zero in range(4)),
    {"zero": 3, "reshard_after_forward": False},
    {"zero": 3, "replicate": 2},
    {"zero": 3, "by_owner": True, "prefetch": 2},
]


class Twice(nn.Module):
    """Calls its first layer again after its second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def loss_sum(self, x, y):
        a, b = self.layers
        return a(b(a(x.double()).tanh()).tanh()).square().sum()


def plain(steps):
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model.loss_sum(DATA.x, DATA.y) / DATA.tokens).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def on_two(program):
    return emu.launch(program, emu.Mesh(dp=2)).results


@pytest.mark.parametrize("look", ["with gradients", "without"])
@pytest.mark.parametrize("options", [*STAGES, {"zero": 3, "prefetch": 2, "reshard_after_forward": False}], ids=str)
def test_a_look_at_the_loss_before_a_step_leaves_nothing_stale(options, look):
    def program(rank, looks=True):
        dist = emu.DataParallel(Twice(), rank, "dp", **options)
        optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            dist.backward(DATA)
            if looks:
                with torch.set_grad_enabled(look == "with gradients"):
                    dist.loss_sum(DATA.x, DATA.y)
            optimizer.step()
        return dist.gather_parameters()

    right = plain(3)
    for values in on_two(program):
        assert all(torch.allclose(values[name], right[name], rtol=1e-12, atol=1e-14) for name in right)
    assert not all(torch.allclose(values[name], plain(2)[name], rtol=1e-3) for name in right)  # a stale step would show


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("how", ["model", "torch", "dist"])
def test_gradients_that_were_zeroed_are_not_in_the_sum(how, zero):
    def program(rank):
        dist = emu.DataParallel(Twice(), rank, "dp", zero=zero)
        zeroing = {"model": dist.model, "torch": torch.optim.SGD(dist.model.parameters(), lr=0.1), "dist": dist}[how]
        dist.loss_sum(*OTHER.shard(rank, "dp")).backward()
        zeroing.zero_grad()
        dist.loss_sum(*DATA.shard(rank, "dp")).backward()
        dist.finish(DATA.tokens)
        return dist.gather_gradients()

    model = Twice()
    (model.loss_sum(DATA.x, DATA.y) / DATA.tokens).backward()
    for found in on_two(program):
        assert all(torch.allclose(found[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())


class Either(nn.Module):
    """Uses one of its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.which = 0

    def loss_sum(self, x, y):
        return self.layers[self.which](x).square().sum()


@pytest.mark.parametrize("zero", [0, 1])
def test_a_rank_that_zeroed_a_parameter_and_did_not_use_it_since_adds_nothing_to_it(zero):
    def program(rank):
        dist = emu.DataParallel(Either(), rank, "dp", zero=zero, find_unused=True)
        for which, data in ((0, OTHER), (1, OTHER), (rank.id, DATA)):
            dist.model.which = which
            dist.model.zero_grad() if data is DATA else None
            dist.loss_sum(*data.shard(rank, "dp")).backward()
        dist.finish(DATA.tokens)
        return dist.gather_gradients()

    model = Either()
    for which, x in enumerate(DATA.x.split(3)):  # what each rank has used
        model.which = which
        (model.loss_sum(x, None) / DATA.tokens).backward()
    for found in on_two(program):
        assert all(torch.allclose(found[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())


@pytest.mark.parametrize("zero", [0, 1])
def test_a_parameter_that_was_zeroed_and_not_used_since_has_no_gradient(zero):
    def program(rank):
        dist = emu.DataParallel(Either(), rank, "dp", zero=zero, find_unused=True)
        dist.loss_sum(*OTHER.shard(rank, "dp")).backward()
        dist.model.zero_grad()
        dist.model.which = 1
        dist.loss_sum(*DATA.shard(rank, "dp")).backward()
        dist.finish(DATA.tokens)
        return dist.gather_gradients()

    for found in on_two(program):
        assert set(found) == {"layers.1.weight", "layers.1.bias"} and all(g.any() for g in found.values())


def test_gradients_stand_where_they_always_do_after_a_backward():
    def program(rank):
        dist = emu.DataParallel(Twice(), rank, "dp")
        dist.loss_sum(*DATA.shard(rank, "dp")).backward()
        return {name: p.grad.clone() for name, p in dist.model.named_parameters()}

    model = Twice()
    model.loss_sum(DATA.x, DATA.y).backward()
    for found in on_two(program):
        assert all(torch.allclose(found[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())


def torchs(dist):
    optimizer = torch.optim.SGD(dist.model.parameters(), lr=0.1)
    for _ in range(2):
        dist.backward(DATA)
        optimizer.step()


def unfinished(dist):
    optimizer = torch.optim.SGD(dist.model.parameters(), lr=0.1)
    for _ in range(2):
        dist.loss_sum(DATA.x, DATA.y).backward()
        optimizer.step()


def old_graph(dist):
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    loss = dist.loss_sum(DATA.x, DATA.y)
    dist.backward(DATA)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def written(dist):
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    dist.backward(DATA)
    with torch.no_grad():
        next(dist.model.parameters()).mul_(0.5)
    optimizer.step()


def moved(dist):
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    for p in dist.model.parameters():
        p.data = p.data.clone()
    dist.backward(DATA)
    optimizer.step()


def inside(dist):
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    dist.backward(DATA)
    with dist.gathered():
        optimizer.step()


MIXED = emu.Precision(param="fp64", grad="fp64", reduce="fp64", activations="fp64")


@pytest.mark.parametrize(
    ("wrong", "options", "says"),
    [
        (torchs, {"zero": 1}, r"SGD steps on parameters whose gradients.*\n.*\.optimizer\("),
        (torchs, {"zero": 3}, r"SGD steps on parameters whose gradients.*\n.*\.optimizer\("),
        (torchs, {"precision": MIXED}, r"SGD steps on parameters whose gradients.*\n.*\.optimizer\("),
        (unfinished, {"zero": 0}, r"parameters changed after a backward.*\n.*finish\(tokens\)"),
        (old_graph, {"zero": 1}, r"computed before the last step"),
        (old_graph, {"zero": 3}, r"computed before the last step"),
        (written, {"zero": 0, "precision": MIXED}, r"layers\.0\.weight was written into.*\n.*before it is wrapped"),
        (moved, {"zero": 2}, r"layers\.\d\.\w+ was given other memory"),
        (moved, {"zero": 3}, "in shards"),
        (inside, {"zero": 3}, r"a step within gathered\(\)"),
        (lambda dist: dist.backward(DATA, scale=1024.0), {}, r"scale=1024.0 is a float\n.*LossScale\(1024\)"),
        (lambda dist: copy.deepcopy(dist), {}, r"copy of a DataParallel.*\n.*wrap the copy anew"),
        (lambda dist: dist.loss_sum(X, X).backward(create_graph=True), {}, r"create_graph=True"),
        (lambda dist: dist.optimizer(torch.optim.LBFGS), {}, r"LBFGS is not a kind of optimizer"),
        (lambda dist: dist.optimizer("adamw"), {}, r"'adamw' is not a kind of optimizer.*\n.*lr=1e-3"),
        (lambda dist: dist.optimizer(torch.optim.SGD, lr=1, clip="1"), {}, r"clip='1'"),
    ],
)
def test_what_cannot_be_right_is_told(wrong, options, says):
    with pytest.raises(emu.EmuError, match=says):
        on_two(lambda rank: wrong(emu.DataParallel(Twice(), rank, "dp", **options)))


def test_a_backward_that_failed_leaves_nothing_behind():
    class Fails(Twice):
        broken = False

        def loss_sum(self, x, y):
            loss = super().loss_sum(x, y)
            if self.broken:
                loss.register_hook(lambda grad: None)
                self.layers[0].weight.register_hook(self.fail)
            return loss

        def fail(self, grad):
            if self.broken:
                raise RuntimeError("the test's own")

    def program(rank):
        dist = emu.DataParallel(Fails(), rank, "dp", bucket_bytes=1)
        dist.model.broken = True
        with pytest.raises(RuntimeError, match="the test's own"):
            dist.backward(OTHER)
        dist.model.broken = False
        dist.backward(DATA)
        return dist.gather_gradients()

    model = Twice()
    (model.loss_sum(DATA.x, DATA.y) / DATA.tokens).backward()
    for found in on_two(program):
        assert all(torch.allclose(found[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())


def test_a_forward_that_failed_leaves_nothing_whole_and_says_only_what_failed(recwarn):
    class Fails(Twice):
        broken = False

        def forward(self, x):
            a, b = self.layers
            return b(a(x) if not self.broken else a(x[:, :2]))

    def program(rank):
        dist = emu.DataParallel(Fails(), rank, "dp", zero=3)
        dist.model.broken = True
        with pytest.raises(RuntimeError, match="shapes"):
            dist.model(X)
        dist.model.broken = False
        try:
            raise ValueError("a program may go on within its own except")
        except ValueError:
            dist.model(X)
            here = [shards.here for shards in dist.vectors]
        with torch.no_grad():
            dist.model(X)
        here += [shards.here for shards in dist.vectors]
        dist.backward(DATA)
        return here, dist.gather_gradients()

    model = Twice()
    (model.loss_sum(DATA.x, DATA.y) / DATA.tokens).backward()
    for here, found in on_two(program):
        assert not any(here)
        assert all(torch.allclose(found[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())
    assert not [str(w.message) for w in recwarn if "silenced" in str(w.message)]


def test_every_optimizers_step_stays_as_quick_however_many_models_there_have_been():
    """Models that somebody keeps are looked up, not asked one by one."""
    from torch.optim import optimizer

    def program(rank):
        return [emu.DataParallel(Twice(), rank, zero=3) for _ in range(5)]

    counts, kept = [], []
    for _ in range(3):
        kept.append(emu.launch(program, emu.Mesh(dp=2)).results)
        counts.append(len(optimizer._global_optimizer_pre_hooks))
    assert counts[0] == counts[-1]
