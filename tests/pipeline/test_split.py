"""A backward in two parts gives the gradients of one, to the last bit."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from emu.models import GPT, Config
from emu.parallel import deferred
from emu.parallel.deferred import Deferred, deferring
from emu.parallel.pipeline.running.split import PRODUCTS, Split
from emu.spmd import EmuError

H, VOCAB = 6, 7

# Pieces of a model, on x [batch, seq, H] and weights that they share: m (a Model) has w [3, H, H], b, wide, norms, ...
PIECES = {
    "linear": lambda m, x, i: F.linear(x, m.w[i], m.b[i]),
    "linear by name": lambda m, x, i: F.linear(bias=None, weight=m.w[i], input=x),
    "x @ w.T": lambda m, x, i: x @ m.w[i].T,
    "matmul": lambda m, x, i: torch.matmul(x, m.w[i]) / 2,
    "mm": lambda m, x, i: x.flatten(0, 1).mm(m.w[i]).view_as(x),
    "addmm": lambda m, x, i: torch.addmm(m.b[i], x.flatten(0, 1), m.w[i], alpha=0.5).view_as(x),
    "bmm": lambda m, x, i: torch.bmm(x, m.w[i].expand(len(x), -1, -1)),
    "baddbmm": lambda m, x, i: torch.baddbmm(x, x * 2, m.w[i].expand(len(x), -1, -1), beta=0.5),
    "einsum": lambda m, x, i: torch.einsum("bsh,hk->bsk", x, m.w[i]),
    "einsum of a list": lambda m, x, i: torch.einsum("bsh,kh,k->bsk", [x, m.w[i], m.b[i]]),
    "conv1d": lambda m, x, i: F.conv1d(x.mT, m.kernel, m.b[i], padding=1).mT,
    "conv2d": lambda m, x, i: F.conv2d(x[:, None], m.patch, padding=1)[:, 0],
    "bilinear": lambda m, x, i: F.bilinear(x, x.roll(1, 1), m.cube, m.b[i]),
    "bilinear of one": lambda m, x, i: F.bilinear(x, x, m.cube, m.b[i]).to(x.dtype),
    "twice": lambda m, x, i: F.linear(F.linear(x, m.w[i]), m.w[i]),
    "three times": lambda m, x, i: sum(F.linear(x * k, m.w[i], m.b[i]) for k in (1, 2, 3)) / 4,
    "weights in between": lambda m, x, i: F.linear(F.linear(x, m.w[0]) * m.w[0][0], m.w[0]),
    "chunks": lambda m, x, i: sum(F.linear(x, m.wide).chunk(3, -1)) / 2,
    "parts of a weight": lambda m, x, i: F.linear(x, m.wide[:H]) + F.linear(x, m.wide.view(3, H, H)[i]),
    "unbound": lambda m, x, i: sum(F.linear(x, w) for w in m.wide.view(3, H, H).unbind()) / 3,
    "weights together": lambda m, x, i: sum(F.linear(x, torch.cat([m.w[0], m.w[i]])).chunk(2, -1)),
    "low rank": lambda m, x, i: F.linear(x, m.frozen + m.w[i][:, :2] @ m.w[0][:2]),
    "scaled weight": lambda m, x, i: F.linear(x, m.w[i] / m.w[i].norm()),
    "masked weight": lambda m, x, i: F.linear(x, m.w[i] * torch.eye(H).roll(1)),
    "weight made of data": lambda m, x, i: x @ (m.w[i] * x.mean((0, 1)) if x.numel() else m.w[i]),
    "frozen": lambda m, x, i: F.linear(x, m.frozen, m.b[i]),
    "element by element": lambda m, x, i: x * m.w[i][0] + m.b[i],
    "norm": lambda m, x, i: F.layer_norm(x, (H,), m.scale, m.b[i]),
    "rms norm": lambda m, x, i: F.rms_norm(x, (H,), m.scale),
    "module": lambda m, x, i: m.layer(x),
    "attention": lambda m, x, i: m.attention(x, x, x, need_weights=False)[0] if len(x) else x,
    "gelu": lambda m, x, i: F.gelu(x),
    "in place": lambda m, x, i: F.linear(x, m.w[i]).mul_(0.5).add_(1),
    "in place, in part": lambda m, x, i: _first_zero(F.linear(x, m.w[i]).clone()) + _first_zero(F.linear(x, m.w[i])),
    "in place on a view": lambda m, x, i: _view_zero(F.linear(x, m.w[i], m.b[i])),
    "dropout": lambda m, x, i: F.dropout(F.linear(x, m.w[i]), 0.3),
    "residual": lambda m, x, i: x + F.linear(x, m.w[i]),
    "turned": lambda m, x, i: F.linear(x.transpose(0, 1), m.w[i]).transpose(0, 1),
    "without gradients": lambda m, x, i: x + F.linear(x, m.w[i]).detach() + _without(m, x, i),
    "sums over seq": lambda m, x, i: x + F.linear(x.mean(1, keepdim=True), m.w[i], m.b[i]),
    "no data": lambda m, x, i: x + F.linear(torch.ones(1, H), m.w[i]),
    "gradient in forward": lambda m, x, i: x + _slope(m, i),
    "expert": lambda m, x, i: F.linear(x.flatten(0, 1)[:0], m.w[i]).sum() + x,
    "a function of one's own": lambda m, x, i: _Twice.apply(F.linear(x, m.w[i])),
    "head": lambda m, x, i: F.linear(F.linear(x, m.table).softmax(-1), m.table.T),
}


def _first_zero(y):
    y[:, :1] = 0
    return y


def _view_zero(y):
    y.view(-1, H)[::2].mul_(0.5)
    return y


def _without(m, x, i):
    with torch.no_grad():
        return F.linear(x, m.w[i]).tanh()


def _slope(m, i):
    """A gradient that a forward takes for itself gives parameters none."""
    x = torch.ones(1, H, dtype=m.w[i].dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(F.linear(x, m.w[i]).pow(2).sum(), x)[0].detach()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Model(nn.Module):
    """A stage: an embedding (its inputs are tokens, then) or none, pieces in groups that may be checkpointed."""

    def __init__(self, groups, first, amp=False, seed=0, trained=lambda name: True, extra=False):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return nn.Parameter(torch.randn(shape, generator=draw) / math.sqrt(H))

        self.w = nn.ParameterList(weight(H, H) for _ in range(3))
        self.b = nn.ParameterList(weight(H) for _ in range(3))
        self.wide, self.frozen, self.scale = weight(3 * H, H), weight(H, H), weight(H)
        self.kernel, self.patch, self.cube, self.table = (
            weight(H, H, 3),
            weight(1, 1, 3, 3),
            weight(H, H, H),
            weight(VOCAB, H),
        )
        self.layer, self.attention = nn.Linear(H, H), nn.MultiheadAttention(H, 2, batch_first=True)
        self.groups, self.first, self.amp, self.extra = groups, first, amp, extra
        for name, p in self.named_parameters():
            p.requires_grad_(trained(name) and name != "frozen")

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if self.amp else nullcontext():
            x = x.view_as(x)  # else autocast would narrow it once for all its uses, as it does with leaves
            if self.first:
                x = F.embedding(x, self.table, padding_idx=1)
            for kind, pieces in self.groups:
                x = self.group(pieces, x) if not kind else checkpoint(self.group, pieces, x, use_reentrant=kind == 2)
        return (x, self.b[0] * 2, self.w[1]) if self.extra else (x,)

    def group(self, pieces, x):
        x = x.view_as(x)
        for name, i in pieces:
            x = PIECES[name](self, x.to(self.w[0].dtype), i)
        return x


# Read a parameter by something else than a product whose work for weights is put off.
NOT_FOR_W = (
    "frozen",
    "bilinear of one",
    "norm",
    "rms norm",
    "element by element",
    "masked weight",
    "weight made of data",
)
pieces = st.tuples(st.sampled_from(sorted(PIECES)), st.integers(0, 2))


@st.composite
def stages(draw):
    """What a Model takes, its batches [(batch, seq)], and whether its input has a gradient."""
    amp = draw(st.sampled_from([False, False, True]))
    some = st.lists(pieces, min_size=1, max_size=4)
    groups = draw(st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 2]), some), max_size=4))
    frozen = draw(st.sets(st.sampled_from(["w.0", "w.1", "b.0", "wide", "table", "layer.weight"])))
    if amp:
        # Autocast narrows a parameter once for all that read it, and adds their gradients up in 16 bits. Where some of these
        # come in I, and others in W, or of another checkpoint, they are added up in 32.
        groups = [(kind, [piece for piece in some if piece[0] not in NOT_FOR_W]) for kind, some in groups]
        groups = groups[:1] if any(kind for kind, _ in groups) else groups
        frozen = set()
    options = {
        "groups": groups,
        "first": draw(st.booleans()),
        "amp": amp,
        "seed": draw(st.integers(0, 9)),
        "trained": lambda name: name not in frozen,
        "extra": draw(st.booleans()),
    }
    shapes = st.tuples(st.sampled_from([0, 1, 2, 3]), st.integers(1, 4))
    return options, draw(st.lists(shapes, min_size=1, max_size=3)), draw(st.booleans())


def stage(*groups, shapes=((2, 3), (1, 2)), **more):
    return {"groups": list(groups), "first": False, "seed": 0, **more}, shapes, True


def trained(options, shapes, needs, dtype, split):
    """(gradients, inputs' gradients, how often hooks were called, a random number drawn afterwards)."""
    torch.manual_seed(options["seed"])
    model = Model(**options)
    model.to(dtype)
    calls = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda g, name=name: calls.update({name + " before": calls.get(name + " before", 0) + 1}))
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: calls.update({name: calls.get(name, 0) + (p.grad is not None)})
            )
    model.layer.register_full_backward_hook(lambda *_: calls.update(layer=calls.get("layer", 0) + 1))
    dxs = []
    for b, s in shapes:
        x = torch.randint(0, VOCAB, (b, s)) if options["first"] else torch.randn(b, s, H, dtype=dtype)
        x.requires_grad_(needs and not options["first"])
        with torch.random.fork_rng():
            draw = torch.Generator().manual_seed(b)
            if split:
                parts = Split()
                with parts:
                    outs = model(x)
                grads = [torch.randn(o.shape, dtype=o.dtype, generator=draw) for o in outs]
                dxs += parts.input_gradients(outs, grads, [x])
                del outs
                parts.weights()
            else:
                outs = model(x)
                grads = [torch.randn(o.shape, dtype=o.dtype, generator=draw) for o in outs]
                learning = [(o, g) for o, g in zip(outs, grads) if o.requires_grad]
                if learning:
                    torch.autograd.backward(*zip(*learning))
                dxs.append(x.grad)
            after = torch.rand(3)
    return {n: p.grad for n, p in model.named_parameters()}, dxs, calls, after


def same(a, b):
    return a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def check(options, shapes, needs, dtype):
    grads, dxs, calls, after = trained(options, shapes, needs, dtype, split=False)
    grads2, dxs2, calls2, after2 = trained(options, shapes, needs, dtype, split=True)
    assert [n for n in grads if not same(grads[n], grads2[n])] == []
    assert all(map(same, dxs, dxs2))
    assert calls == calls2
    assert torch.equal(after, after2)


THRICE = [("linear", 0)] * 2 + [("gelu", 0), ("linear", 0)]
AGAIN = [(1, [("norm", 1), ("linear", 0), ("gelu", 0)])] * 3  # one weight in three checkpoints
EXAMPLES = {
    "three uses": stage((0, THRICE)),
    "tied": stage((0, [("residual", 0), ("head", 0)]), first=True),
    "three checkpoints": stage(*AGAIN),
    "three reentrant checkpoints": stage(*[(2, some) for _, some in AGAIN]),
    "both kinds": stage((2, THRICE), (0, THRICE), (1, THRICE), extra=True),
    "a checkpoint's own gradients": stage((1, [("gradient in forward", 0), ("linear", 0)])),
    "a view's hooks": stage((0, [("in place on a view", 0)]), (2, [("gelu", 0), ("linear", 0)])),
    "16 bits": stage((0, [("residual", 0), *THRICE, ("chunks", 0), ("unbound", 0)]), amp=True),
    "no rows": stage((0, THRICE), shapes=((0, 2),)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXAMPLES)
def test_two_parts_give_the_gradients_of_one_backward(name, dtype):
    check(*EXAMPLES[name], dtype)


@settings(max_examples=50)
@given(stages(), st.sampled_from([torch.float32, torch.float64]))
def test_two_parts_give_the_gradients_of_one_backward_to_the_last_bit(stage, dtype):
    _check_if_valid(stage, dtype)


@pytest.mark.exhaustive
@settings(max_examples=3000)
@given(stages(), st.sampled_from([torch.float32, torch.float64]))
def test_two_parts_give_the_gradients_of_one_backward_to_the_last_bit_for_many_models(stage, dtype):
    _check_if_valid(stage, dtype)


def _check_if_valid(stage, dtype):
    try:
        trained(*stage, dtype, split=False)
    except RuntimeError:  # of dtypes that do not go together under autocast
        assume(False)
    check(*stage, dtype)


@pytest.mark.parametrize(
    ("broken", "example"),
    [
        ("one is forgotten", "three uses"),
        ("the first comes first", "three uses"),
        ("checkpoints come in the order in which they ran again", "three checkpoints"),
        ("all backwards are one", "three reentrant checkpoints"),
    ],
)
def test_the_comparison_sees_what_is_lost_and_what_is_added_up_in_another_order(monkeypatch, broken, example):
    def turned(self):
        for i, one in enumerate(self._late):
            deferred._renumber(one.edge.node, -1, 10**6 * (i + 1))

    def one_task(self):
        self._late = [one._replace(task=0) for one in self._late]

    change = {
        "one is forgotten": lambda self: self._late.pop(),
        "the first comes first": turned,
        "all backwards are one": one_task,
    }
    if broken in change:
        run = Deferred.run
        monkeypatch.setattr(Deferred, "run", lambda self: (change[broken](self), run(self)))
    else:
        monkeypatch.setattr(deferred, "_renumber", lambda *_: None)
    options, shapes, needs = EXAMPLES[example]
    with pytest.raises(AssertionError):
        for seed in range(5):  # sums of three numbers are often the same in any order, those of many matrices are not
            check({**options, "seed": seed}, shapes, needs, torch.float32)


def decoder(**more):
    return GPT(Config(**{"layers": 2, "width": 8, "heads": 2, "vocab": 10, "seq": 6, "fused": False, **more}))


@pytest.mark.parametrize("more", [{"tied": True}, {"experts": 3, "top_k": 2, "activation": "swiglu"}, {"norm": "rms"}])
def test_all_weights_of_a_transformer_wait_for_w_and_norms_do_not(more):
    model, plain = decoder(**more), decoder(**more)
    tokens = torch.randint(0, 10, (2, 6))
    parts = Split()
    with parts:
        loss = model.loss_sum(tokens, tokens)
    parts.input_gradients([loss], None, [])
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, _ in model.named_parameters() if "norm" in n
    }
    assert parts.held()
    parts.weights()
    assert not parts.held()
    plain.loss_sum(tokens, tokens).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


# What goes wrong.


def test_parts_out_of_order_or_twice_are_errors():
    x = torch.ones(1, H, requires_grad=True)
    parts, layer = Split(), nn.Linear(H, H)
    with parts:
        y = layer(x)
    with pytest.raises(EmuError, match="W was asked for before I"):
        parts.weights()
    parts.input_gradients([y], [torch.ones_like(y)], [x])
    with pytest.raises(EmuError, match="I has run already"):
        parts.input_gradients([y], [torch.ones_like(y)], [x])
    with pytest.raises(EmuError, match="a forward within a Split whose I has run"), parts:
        pass
    parts.weights()
    with pytest.raises(EmuError, match="W has run already"):
        parts.weights()


def test_an_input_that_is_no_leaf_and_a_gradient_of_a_gradient_are_errors():
    x, layer = torch.ones(1, H, requires_grad=True), nn.Linear(H, H)
    parts = Split()
    with parts:
        y = layer(x * 2)
        with pytest.raises(EmuError, match="gradients of gradients"):
            torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(EmuError, match="no leaf"):
        parts.input_gradients([y], [torch.ones_like(y)], [x * 2])


def test_what_a_forward_changes_after_a_product_read_it_is_an_error_as_in_torch():
    x, layer = torch.ones(1, H, requires_grad=True), nn.Linear(H, H)
    parts = Split()
    with parts:
        read = x * 2
        y = layer(read)
        read.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        parts.input_gradients([y], [torch.ones_like(y)], [x])


def test_an_input_keeps_the_gradient_it_had_and_gives_none_where_it_counts_for_nothing():
    x, other = torch.ones(2, H, requires_grad=True), torch.ones(1, requires_grad=True)
    x.grad = had = torch.ones_like(x)
    parts, layer = Split(), nn.Linear(H, H)
    with parts:
        y = layer(x)
    dx, nothing, tokens = parts.input_gradients([y], [torch.ones_like(y)], [x, other, torch.zeros(1)])
    assert x.grad is had and torch.equal(dx, torch.ones_like(y) @ layer.weight) and nothing is None and tokens is None


def test_nothing_is_put_off_outside_of_a_split():
    assert deferring() is None
    with Split():
        assert isinstance(deferring(), Deferred)
        assert all(map(callable, PRODUCTS))
    assert deferring() is None
