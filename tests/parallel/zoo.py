"""Models of all kinds, ways to shard them, and two steps of training, on one device and on many."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu

SAME = 1e-9  # float64, in another order of sums; Adam divides by the root of what it sums, which loses some digits
RANKS = 4
STAGES = {
    "ddp": {"zero": 0},
    "small buckets": {"zero": 0, "bucket_bytes": 1},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2, "bucket_bytes": 200},
    "zero3": {"zero": 3},
    "zero3 kept": {"zero": 3, "reshard_after_forward": False},
    "zero3 no prefetch": {"zero": 3, "prefetch": 0},
    "zero3 in one": {"zero": 3, "units": ()},
    "hsdp1": {"zero": 1, "replicate": 2},
    "hsdp2": {"zero": 2, "replicate": 2},
    "hsdp3": {"zero": 3, "replicate": 2},
    "owners1": {"zero": 1, "by_owner": True, "bucket_bytes": 200},
    "owners2": {"zero": 2, "by_owner": True, "bucket_bytes": 200},
    "owners3": {"zero": 3, "by_owner": True},
}
ADAMW = {"lr": 0.05, "weight_decay": 0.1}


def rows(seed=0, n=7, width=3):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=g, dtype=torch.float64) for _ in "xy")
    return emu.Batch(x, y, tokens=n)


BATCHES = [rows(0), rows(1)]
SIZES = [3, 0, 2, 2]  # a rank without rows is one that uses nothing


class Base(nn.Module):
    """Squares of what is wrong with the outputs."""

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2).sum()


def linear(*features):
    return nn.Linear(*(features or (3, 3)))


class Plain(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(3, 5), nn.Tanh(), linear(5, 5), nn.Tanh(), linear(5, 3))
        self.last = linear()

    def forward(self, x):
        return self.last(self.layers(x))


class Tied(Base):
    """One weight for two modules of one unit, one for two units, and one for a unit and the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3))
        self.first = linear()
        self.layers[0][2].weight = self.layers[0][0].weight
        self.layers[2][0].weight = self.layers[1][0].weight
        self.first.weight = self.layers[2][2].weight

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.last.bias.requires_grad_(False)


class FrozenFirst(Plain):
    """Trains the last layer only: backward never reaches the others."""

    def __init__(self):
        super().__init__()
        self.layers.requires_grad_(False)


class FrozenLast(Plain):
    """Trains the first layer only: backward goes through frozen ones."""

    def __init__(self):
        super().__init__()
        self.layers[2:].requires_grad_(False)
        self.last.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer and a trainable one of rank 1 beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


class Lora(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


class MixedDtypes(Base):
    """float32 in float64's company, within a unit, across units, and in the model itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear().float(), linear()])
        self.layers[0].bias = nn.Parameter(self.layers[0].bias.data.float())
        self.layers[0].forward = lambda x: F.linear(x, self.layers[0].weight) + self.layers[0].bias
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x):
        return self.layers[2](self.layers[1](self.layers[0](x).float()).double()) * self.scale


class OddLayouts(Base):
    """A transposed parameter, one with holes, one that is a part of another tensor, and a convolution's, channels last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].turned = nn.Parameter(torch.randn(3, 3).t())
        self.layers[0].holes = nn.Parameter(torch.randn(3, 6)[:, ::2])
        self.layers[0].forward = self.inner
        self.part = nn.Parameter(torch.randn(9)[4:7])
        self.conv = nn.Conv2d(3, 3, 1).to(memory_format=torch.channels_last)

    def inner(self, x):
        return x @ self.layers[0].turned + torch.tanh(x @ self.layers[0].holes)

    def forward(self, x):
        return self.conv((self.layers[0](x) * self.part)[:, :, None, None])[:, :, 0, 0]


class OddSizes(Base):
    """Parameters of no dimension, of no elements, and a unit with nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(3))
        self.layers[0].scale, self.layers[0].nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
        self.layers[1].nothing = nn.Parameter(torch.zeros(3, 0))
        self.layers[2].scale = nn.Parameter(torch.tensor([0.5]))
        self.layers[0].forward = lambda x: x * self.layers[0].scale + self.layers[0].nothing.sum()
        self.layers[1].forward = lambda x: x + (x @ self.layers[1].nothing).sum()
        self.layers[2].forward = lambda x: x * self.layers[2].scale
        self.shift, self.nothing = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.zeros(0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + self.shift + self.nothing.sum()


class OneParameter(Base):
    def __init__(self):
        super().__init__()
        self.only = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.only


class Buffers(Base):
    """A buffer in a unit and one in the model, of values that only rank 0 has right."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear()])
        self.layers[0].register_buffer("scale", torch.randn(3))
        self.register_buffer("shift", torch.randn(()), persistent=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count += 1
        return self.layers[0](x) * self.layers[0].scale + self.shift


class CalledTwice(Base):
    """The same modules over and over; the second is also called within the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])

    def forward(self, x):
        a, b = self.layers
        return b(torch.tanh(a(torch.tanh(b(torch.tanh(a(x))))))) + a(x)


class Nested(Base):
    """Lists in dicts in lists, and a unit that is never called, but its parts are."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict(
            {
                "left": nn.ModuleList([nn.Sequential(linear(), nn.Tanh()), linear()]),
                "right": nn.ModuleDict({"only": nn.Sequential(linear(), nn.Sequential(nn.Tanh(), linear()))}),
            }
        )

    def forward(self, x):
        for layer in self.towers["left"]:
            x = x + layer(x)
        return self.towers["right"]["only"](x)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    note: str


class Returns(nn.Module):
    """A layer with a say in how its output is wrapped, and its inputs passed."""

    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = linear(), wrap

    def forward(self, hidden=None, *, extra=None):
        return self.wrap(torch.tanh(self.inner(hidden + extra["shift"])), hidden)


class Containers(Base):
    """Units with tuples, dicts, nested lists and dataclasses as outputs, and inputs by keyword."""

    def __init__(self):
        super().__init__()
        wraps = [
            lambda out, x: (out, x),
            lambda out, x: {"out": [out, None, 3], "x": x},
            lambda out, x: Output(out, "new"),
        ]
        self.layers = nn.ModuleList(Returns(wrap) for wrap in wraps)

    def forward(self, x):
        first, old = self.layers[0](hidden=x, extra={"shift": x})
        second = self.layers[1](first, extra={"shift": old})
        third = self.layers[2](hidden=second["out"][0] + second["x"], extra={"shift": first})
        return third.hidden


class NoGradient(Base):
    """A unit whose output needs no gradient, one that returns nothing, and one that returns its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear(), linear(), linear()])
        self.layers[0].forward = lambda x: (x @ self.layers[0].weight).detach()
        self.layers[0].requires_grad_(False)
        self.layers[1].forward = lambda x: None
        self.layers[1].requires_grad_(False)
        self.layers[2].forward = lambda x: x
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        self.layers[1](x)
        return self.layers[3](self.layers[2](x + self.layers[0](x)))


class NeverForward(nn.Module):
    """loss_sum does everything itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])
        self.shift = nn.Parameter(torch.zeros(3))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = layer(x) + self.shift
        return ((x - y) ** 2).sum()


class Outside(Base):
    """Checkpoints whole units."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3))
        self.first = linear()

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class OutsideReentrant(Outside):
    reentrant = True


class AroundTwo(Outside):
    """One checkpoint around several units, one of them called twice."""

    def forward(self, x):
        a, b, c = self.layers
        x = checkpoint(lambda x: b(a(x)), self.first(x), use_reentrant=self.reentrant)
        return checkpoint(lambda x: torch.tanh(a(torch.tanh(c(x)))), x, use_reentrant=self.reentrant)


class AroundTwoReentrant(Outside):
    """The same, reentrant, without the second call: see below."""

    reentrant = True

    def forward(self, x):
        a, b, c = self.layers
        x = checkpoint(lambda x: b(a(x)), self.first(x), use_reentrant=True)
        return checkpoint(lambda x: torch.tanh(c(torch.tanh(c(x)))), x, use_reentrant=True)


class Inside(Outside):
    """Checkpoints within a unit."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: layer[2](
                checkpoint(layer[1], layer[0](x), use_reentrant=self.reentrant)
            )
        self.layers[1].forward = lambda x: checkpoint(nn.Sequential(*self.layers[1]), x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class InsideReentrant(Inside):
    reentrant = True


class AroundTheLoss(Outside):
    """A checkpoint from the first layer to the loss: what is recomputed ends in a unit."""

    def loss_sum(self, x, y):
        def loss(x):
            for layer in self.layers:
                x = layer(x)
            return ((x - y) ** 2).sum()

        return checkpoint(loss, self.first(x), use_reentrant=self.reentrant)


class AroundTheLossReentrant(AroundTheLoss):
    reentrant = True


class StraightThrough(Base):
    """A parameter whose gradient comes before the last use of its value."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: torch.tanh(x @ layer.weight.detach()) + layer.weight.sum()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class SideOutput(Base):
    """A unit leaves part of its loss behind, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))
        for layer in self.layers:
            layer.forward = lambda x, layer=layer: self.inner(layer, x)

    def inner(self, layer, x):
        out = x + torch.tanh(x @ layer.weight)
        layer.aside = ((x @ layer.weight + layer.bias) ** 2).sum()
        return out

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def loss_sum(self, x, y):
        return super().loss_sum(x, y) + sum(layer.aside for layer in self.layers)


MODELS = [
    Plain,
    Tied,
    Frozen,
    FrozenFirst,
    FrozenLast,
    Lora,
    MixedDtypes,
    OddLayouts,
    OddSizes,
    OneParameter,
    Buffers,
    CalledTwice,
    Nested,
    Containers,
    NoGradient,
    NeverForward,
    Outside,
    OutsideReentrant,
    AroundTwo,
    AroundTwoReentrant,
    Inside,
    InsideReentrant,
    AroundTheLoss,
    AroundTheLossReentrant,
    StraightThrough,
    SideOutput,
]


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


def one_device(kind, batches=None, optimizer=torch.optim.AdamW, **options):
    """Plain torch. Returns losses, gradients of the last step, and parameters."""
    model = made(kind)
    opt = optimizer([p for p in model.parameters() if p.requires_grad], **(options or ADAMW))
    losses = []
    for data in batches or BATCHES:
        opt.zero_grad()
        loss = model.loss_sum(data.x, data.y) / data.tokens
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return losses, grads, {n: p.detach().clone() for n, p in model.named_parameters()}


def many_devices(rank, kind, batches=None, sizes=SIZES, optimizer=torch.optim.AdamW, options=None, **how):
    """The same under DataParallel; every rank starts from other values, of which rank 0's must count."""
    dist = emu.DataParallel(made(kind, seed=int(rank)), rank, "dp", find_unused=True, **how)
    opt = dist.optimizer(optimizer, **(options or ADAMW))
    losses, grads = [], {}
    for data in batches or BATCHES:
        losses.append(dist.backward(data, sizes))
        grads = dist.gather_gradients()
        opt.step()
        opt.zero_grad()
    return losses, grads, dist.gather_parameters()


def same(found, right, tolerance=SAME):
    """Nothing missing, nothing more, and every number the same."""
    (losses, grads, values), (right_losses, right_grads, right_values) = found, right
    if any(value.dtype == torch.float32 for value in right_values.values()):
        tolerance = 1e-5  # float32 has 7 digits
    assert torch.allclose(torch.stack(losses), torch.stack(right_losses), rtol=tolerance)
    for some, others in ((grads, right_grads), (values, right_values)):
        assert set(some) == set(others)
        for name, value in others.items():
            assert some[name].dtype == value.dtype and some[name].shape == value.shape, name
            assert torch.allclose(some[name], value, rtol=tolerance, atol=tolerance), name


def launched(kind, how, ranks=RANKS, sizes=SIZES, **launch):
    return emu.launch(lambda rank: many_devices(rank, kind, sizes=sizes, **how), emu.Mesh(dp=ranks), **launch).results
