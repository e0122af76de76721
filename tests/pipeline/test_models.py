"""Models that know nothing of pipelines: chains, residual ones with masks, frozen ones, the stock Llama; all gradients."""

import pytest
import torch
from torch import nn

import emu
from emu.equivalence import check
from emu.parallel import Pipeline

from .programs import SCHEDULES

V = ("zb-v", "v-half", "v-min", "dualpipe-v")


def rows(n=7, width=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g, dtype=torch.float64).to(torch.get_default_dtype())
    return emu.Batch(x, torch.randint(0, 3, (n,), generator=g))


def drawn(model, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return model


class Summed(nn.Module):
    def loss_sum(self, x, y):
        return nn.functional.cross_entropy(self(x), y, reduction="sum")


class InSequence(Summed):
    """One nn.Sequential, whose functions have no parameters."""

    def __init__(self):
        super().__init__()
        layers = [m for _ in range(8) for m in (nn.Linear(3, 3), nn.Tanh())]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, x):
        return self.net(x)


class IsSequence(nn.Sequential):
    """A Sequential itself."""

    def __init__(self):
        super().__init__(*[m for _ in range(8) for m in (nn.Linear(3, 3), nn.Tanh())][:-1])

    def loss_sum(self, x, y):
        return nn.functional.cross_entropy(self(x), y, reduction="sum")


class RootParameters(Summed):
    """Parameters of the model itself, used before, between and after its layers."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.between = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))

    def forward(self, x):
        x = x * self.before
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.between
        return x + self.after


class Masked(nn.Module):
    """x + f(x) where a mask says so; mask and scale follow from the batch."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x, mask, *, scale):
        return x + scale * mask[:, None] * self.down(torch.tanh(self.up(self.norm(x))))


class Residual(Summed):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Masked() for _ in range(8))
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        mask = (x[:, 0] > 0).to(x.dtype)
        scale = 1 / (1 + x.detach().square().mean(1, keepdim=True))
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask, scale=scale)
        return self.last(x)


class Outside(Summed):
    """Residuals outside of modules: what a stage received is read twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.5
        return x


class Uneven(Summed):
    """Widths that differ between stages, and layers that reshape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip((3, 5, 2, 7, 4, 4, 6, 2), (5, 2, 7, 4, 4, 6, 2, 3)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(torch.tanh(x).T.contiguous().T)
        return x


class Nested(Summed):
    """Lists below another module, and one weight that two layers on different stages share."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.stem = nn.Linear(3, 3)
        self.body.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
        self.body.layers[7].weight = self.body.layers[0].weight
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = self.body.stem(x)
        for layer in self.body.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class FrozenFirst(InSequence):
    """The first stage has nothing to train, and its output needs no gradient."""

    def __init__(self):
        super().__init__()
        self.net[:6].requires_grad_(False)


class FrozenLast(InSequence):
    """Gradients go through stages that have nothing to train."""

    def __init__(self):
        super().__init__()
        self.net[10:].requires_grad_(False)


class LoRA(nn.Module):
    """A frozen layer, and a product of two small weights beside it (arXiv 2106.09685)."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.ones(3, 1))

    def forward(self, x):
        return self.frozen(x) + x @ (self.b @ self.a).T


class Adapted(Summed):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LoRA() for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Seen(Summed):
    """A buffer, and a running mean that training leaves alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.shift
        return x


MODELS = [
    InSequence,
    IsSequence,
    RootParameters,
    Residual,
    Outside,
    Uneven,
    Nested,
    FrozenFirst,
    FrozenLast,
    Adapted,
    Seen,
]


def trained(rank, model, how, data):
    pipe = Pipeline(model(), rank, *(a for a in rank.mesh.axes if a == "dp"), find_unused=True, **how)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, clip=0.5)
    loss = pipe.backward(data)
    gradients = pipe.gather_gradients()
    norm = optimizer.step().norm
    return {"loss": loss, "norm": norm, "after": pipe.evaluate(data), "parameters": gradients}


def alone(model, how, data):
    made = model()
    loss = made.loss_sum(data.x, data.y)
    loss.backward()
    learning = [p for p in made.parameters() if p.grad is not None]
    for p in learning:
        p.grad.div_(data.tokens)
    norm = sum((p.grad * p.grad).sum() for p in learning).sqrt()
    gradients = emu.grads(made)
    gradients = {name: g.clone() for name, g in gradients.items()}
    with torch.no_grad():
        for p in learning:
            p.sub_(0.1 * p.grad * (0.5 / (norm + 1e-6)).clamp(max=1.0))
        after = made.loss_sum(data.x, data.y) / data.tokens
    return {"loss": loss.detach() / data.tokens, "norm": norm, "after": after, "parameters": gradients}


def is_one_device(make_model, axes, **how):
    how = {"microbatches": 3, **how}
    verdict = check(
        trained,
        emu.Mesh(**axes),
        alone,
        args=(lambda: drawn(make_model()), how, rows()),
        tier="float64",
        mutants="none",
    )
    assert verdict, f"{make_model.__name__} {axes} {how}: {verdict}"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.parametrize("model", MODELS)
def test_any_model_is_one_device(model, schedule):
    is_one_device(model, {"pp": 4 if schedule in ("1f1b", "zb-h1") else 2}, schedule=schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"zero": 3}, {"zero": 1, "recompute": True}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_any_model_under_every_schedule(model, schedule, how):
    is_one_device(model, {"pp": 2, "dp": 2}, schedule=schedule, **how)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("model", [RootParameters, Adapted, FrozenFirst, Nested])
def test_sharded_too(model, zero):
    is_one_device(model, {"dp": 2, "pp": 2}, schedule="zb-h1", zero=zero, recompute=zero == 3)


def test_a_model_that_computes_otherwise_on_a_stage_is_seen():
    """Negative control: a gradient that a stage lacks."""

    class Cuts(Residual):
        def forward(self, x):
            self.blocks[5].register_forward_pre_hook(lambda m, args: (args[0].detach() * 1, *args[1:]))
            return super().forward(x)

    with pytest.raises(AssertionError):
        args = (lambda: drawn(Residual()), {"microbatches": 3}, rows())
        verdict = check(
            lambda rank, make, how, data: trained(rank, lambda: drawn(Cuts()), how, data),
            emu.Mesh(pp=2),
            alone,
            args=args,
            tier="float64",
            mutants="none",
        )
        assert verdict


LLAMA = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 9,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 7,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    ("mesh", "schedule", "more", "tied"),
    [
        ("pp=4", "1f1b", {}, True),
        ("pp=2", "zb-v", {}, False),
        ("pp=2,dp=2", "zb-h1", {"zero": 3}, False),
        ("pp=2,dp=2", "zb-h1", {"zero": 3}, True),
        ("pp=2,tp=2", "interleaved", {"chunks": 2}, True),
        ("pp=2,tp=2", "zb-h2", {"sp": True}, False),
        pytest.param("pp=4", "1f1b", {}, False, marks=pytest.mark.exhaustive),
        pytest.param("pp=2", "zb-v", {}, True, marks=pytest.mark.exhaustive),
        pytest.param("pp=2,tp=2", "interleaved", {"chunks": 2}, False, marks=pytest.mark.exhaustive),
        pytest.param("pp=2,tp=2", "zb-h2", {"sp": True}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_stock_llama(mesh, schedule, more, tied):
    pytest.importorskip("transformers")
    from emu.models.huggingface import llama

    plan = emu.Plan(mesh, schedule=schedule, microbatches=3, seq=5, global_batch=7, **more)
    verdict = emu.verify(lambda: llama(**LLAMA, tie_word_embeddings=tied), plan, mutants="none")
    assert verdict and not verdict.without_gradient, str(verdict)
