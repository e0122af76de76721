"""The exact tier: however a program is cut, and in whatever order its pieces are added, the bits are the same."""

import contextlib
import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.equivalence.exact import ExactMode

VOCAB, WIDTH, HEADS, HIDDEN, SEQ, BATCH = 23, 24, 4, 32, 7, 6


@pytest.fixture(autouse=True)
def float64_by_default():
    """What a launcher does around an exact run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@dataclass(frozen=True)
class Config:
    norm: str = "layer"  # or rms
    act: str = "gelu"  # or swiglu
    attention: str = "written"  # or fused
    kv_heads: int = 4
    tied: bool = True
    smoothing: float = 0.0
    layers: int = 2


configs = st.builds(
    Config,
    norm=st.sampled_from(["layer", "rms"]),
    act=st.sampled_from(["gelu", "swiglu"]),
    attention=st.sampled_from(["written", "fused"]),
    kv_heads=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
)


class Block(torch.nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        head = WIDTH // HEADS
        make = torch.nn.LayerNorm if c.norm == "layer" else torch.nn.RMSNorm
        self.norm1, self.norm2 = make(WIDTH), make(WIDTH)
        self.q, self.o = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (torch.nn.Linear(WIDTH, c.kv_heads * head, bias=c.norm == "layer") for _ in "kv")
        self.up, self.down = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)
        self.gate = torch.nn.Linear(WIDTH, HIDDEN, bias=False) if c.act == "swiglu" else None

    def attend(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(HEADS // self.c.kv_heads, 1) for t in (k, v))  # [batch, heads, seq, head]
        if self.c.attention == "fused":
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out = attend(q, k, v, 0.0, True)[0]
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
            out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))

    def forward(self, x, mask):
        x = x + self.attend(self.norm1(x)) * mask
        return x + self.mlp(self.norm2(x)) * mask


class Model(torch.nn.Module):
    def __init__(self, c: Config, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.c = c
            self.tokens, self.positions = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Embedding(SEQ, WIDTH)
            self.blocks = torch.nn.ModuleList(Block(c) for _ in range(c.layers))
            self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCAB, bias=False)
            if c.tied:
                self.head.weight = self.tokens.weight

    def loss_sum(self, x, y, masks):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block, mask in zip(self.blocks, masks):
            h = block(h, mask)
        logits = self.head(self.norm(h)).flatten(0, 1)
        return F.cross_entropy(logits, y.flatten(), reduction="sum", label_smoothing=self.c.smoothing)


def batch(c: Config, seed: int = 1):
    """Tokens, labels (some ignored), and one fixed dropout mask a block."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=g) for _ in "xy")
    y[torch.rand(BATCH, SEQ, generator=g) < 0.2] = -100
    masks = [(torch.rand(BATCH, SEQ, WIDTH, generator=g) > 0.1).double() / 0.9 for _ in range(c.layers)]
    return x, y, masks


def gradients(model, x, y, masks, scale=1.0):
    """Loss and the gradient of every parameter, by name."""
    model.zero_grad()
    loss = model.loss_sum(x, y, masks)
    (loss * scale if scale != 1 else loss).backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def added(parts, order):
    total = {n: t.clone() for n, t in parts[order[0]].items()}
    for i in order[1:]:
        for n, t in parts[i].items():
            total[n] += t
    return total


def shards(c, sizes, seed=1):
    x, y, masks = batch(c, seed)
    return list(zip(x.split(sizes), y.split(sizes), zip(*(m.split(sizes) for m in masks))))


def run(c, sizes, order, mode, accumulate=False, scales=None):
    """Data parallelism by hand: every shard its own model, gradients added in the given order; loss on the grid."""
    with mode or contextlib.nullcontext():
        scales = scales or [1.0] * len(sizes)
        model = Model(c)
        parts = []
        for piece, s in zip(shards(c, sizes), scales):
            parts.append({n: t.clone() for n, t in gradients(model, *piece, scale=s).items()})
        total = added(parts, order)
        for n in total:
            if n != "loss":
                total[n].div_(97)  # one late division by a global number of tokens
    if mode:
        total["loss"] = mode.on_grid(total["loss"])
    return total


def whole(c, mode):
    return run(c, [BATCH], [0], mode)


def unequal(a, b):
    assert a.keys() == b.keys()
    return [n for n in b if not torch.equal(a[n], b[n])]


@st.composite
def splits(draw):
    """Sizes that add up to the batch, empty ones included, and an order to add them in."""
    cuts = sorted(draw(st.lists(st.integers(0, BATCH), max_size=5)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, BATCH])]
    return sizes, draw(st.permutations(range(len(sizes))))


@settings(deadline=None, max_examples=30)
@given(configs, splits())
def test_data_parallel_over_any_split_in_any_order_has_the_bits_of_the_whole_batch(c, split):
    reference = whole(c, ExactMode())
    assert unequal(run(c, *split, ExactMode()), reference) == []
    # a key's bias moves all scores of a row alike: its gradient is truly zero
    assert all(t.abs().max() > 0 for n, t in reference.items() if not n.endswith("k.bias"))


@pytest.mark.parametrize(
    "c", [Config(), Config(norm="rms", act="swiglu", attention="fused", kv_heads=2, smoothing=0.1)]
)
def test_control_without_the_mode_float64_alone_differs_in_most_tensors(c):
    different = unequal(run(c, [1, 2, 3], [2, 0, 1], None), whole(c, None))
    assert len(different) > 0.8 * len(whole(c, None))


@pytest.mark.parametrize(
    "c", [Config(), Config(norm="rms", act="swiglu", attention="fused", kv_heads=2, smoothing=0.1)]
)
def test_the_exact_result_is_the_ordinary_result_up_to_the_grid(c):
    exact, plain = whole(c, ExactMode()), whole(c, None)
    for n in plain:
        # rounding operands to 2^-16 moves results by about 2^-16 of the largest; 1e-3 leaves room for sums
        assert (exact[n] - plain[n]).abs().max() <= 1e-3 * plain[n].abs().max().clamp(min=1e-6), n


@pytest.mark.parametrize("scale", [1 + 2**-10, 1 + 2**-20, 0.0])
def test_a_scaled_or_dropped_shard_is_not_equal(scale):
    c = Config()
    wrong = run(c, [2, 3, 1], [0, 1, 2], ExactMode(), scales=[1.0, scale, 1.0])
    different = unequal(wrong, whole(c, ExactMode()))
    assert (
        len(different) >= len(wrong) - 3
    )  # the loss is reported unscaled; key biases have gradients that are truly zero


@settings(deadline=None, max_examples=10)
@given(configs, splits())
def test_gradient_accumulation_in_one_model_has_the_bits_of_the_whole_batch(c, split):
    sizes, order = split
    with (mode := ExactMode()):
        model = Model(c)
        pieces = shards(c, sizes)
        for i in order:
            model.loss_sum(*pieces[i]).backward()
        grads = {n: p.grad / 97 for n, p in model.named_parameters()}
    reference = whole(c, ExactMode())
    assert mode.inside == 0
    assert unequal(grads, {n: t for n, t in reference.items() if n != "loss"}) == []


def mlp(mode, tp, seed=0, order=None):
    """Column-cut then row-cut layers by hand: partial products are added, then the bias; gradients of all, and of x."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, generator=g).requires_grad_()  # noqa: E731
    x, w1, b1, w2, b2 = draw(5, 12), draw(18, 12), draw(18), draw(12, 18), draw(12)
    with mode or contextlib.nullcontext():
        parts = [
            F.linear(F.gelu(F.linear(x, a, b)), w)
            for a, b, w in zip(w1.tensor_split(tp), b1.tensor_split(tp), w2.tensor_split(tp, 1))
        ]
        y = sum((parts[i] for i in (order or range(tp))[1:]), parts[(order or [0])[0]]) + b2
        y = F.layer_norm(y, (12,))
        (y * torch.linspace(-1, 1, 12)).square().sum().backward()
    out = {n: t.grad for n, t in {"w1": w1, "b1": b1, "w2": w2, "b2": b2}.items()} | {"y": y.detach()}
    return out | {"x": mode.on_grid(x.grad) if mode else x.grad}


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 10), st.randoms(use_true_random=False))
def test_a_tensor_parallel_mlp_has_the_bits_of_the_uncut_one(tp, seed, rng: random.Random):
    order = rng.sample(range(tp), tp)
    assert unequal(mlp(ExactMode(), tp, seed, order), mlp(ExactMode(), 1, seed)) == []


def test_control_a_tensor_parallel_mlp_in_float64_alone_differs():
    assert len(unequal(mlp(None, 3), mlp(None, 1))) >= 4


def late_or_early(sizes, late, tokens):
    """The two manners of dividing: gradients after the sum, or the loss before backward (globally, both)."""
    c = Config(layers=1)
    with ExactMode() as mode:
        parts = []
        for piece in shards(c, sizes):
            model = Model(c)
            loss = model.loss_sum(*piece)
            (loss if late else loss / tokens).backward()
            parts.append({n: p.grad for n, p in model.named_parameters()})
        total = added(parts, range(len(parts)))
        return {n: t.div_(tokens) if late else t for n, t in total.items()}, mode


def test_either_manner_of_dividing_is_exact_if_both_sides_use_it():
    for late in (True, False):
        assert unequal(late_or_early([1, 5], late, 34)[0], late_or_early([BATCH], late, 34)[0]) == []


def test_the_two_manners_of_dividing_are_not_equal_not_even_on_the_gradient_grid():
    """So a reference must divide where the strategy does: gradients round at absolute steps, and 34 times smaller
    gradients keep 5 bits fewer. By a power of two too: the grid is absolute."""
    for tokens in (34, 32):
        (late, mode), (early, _) = late_or_early([BATCH], True, tokens), late_or_early([BATCH], False, tokens)
        assert len(unequal(late, early)) > 0.9 * len(late)
        on_grid = [{n: mode.on_grid(t) for n, t in side.items()} for side in (late, early)]
        assert len(unequal(*on_grid)) > 0.5 * len(late)


def test_means_of_local_means_are_not_equal():
    c = Config(layers=1)

    def mean_gradients(sizes):
        with ExactMode():
            parts = []
            for piece in shards(c, sizes):
                model = Model(c)
                (model.loss_sum(*piece) / max(1, int((piece[1] >= 0).sum()))).backward()
                parts.append({n: p.grad / len(sizes) for n, p in model.named_parameters()})
            return added(parts, range(len(parts)))

    reference = mean_gradients([BATCH])
    assert len(unequal(mean_gradients([2, 4]), reference)) > 0.9 * len(reference)


@pytest.mark.parametrize("c", [Config(), Config(attention="fused", norm="rms", act="swiglu")])
def test_the_certificate_of_the_whole_batch_holds_and_changes_nothing(c):
    mode = ExactMode(certify=True)
    certified = whole(c, mode)
    certificate = mode.certificate()
    assert unequal(certified, whole(c, ExactMode())) == []
    assert certificate.holds and certificate.limit == 53 and 0 < certificate.margin < 53
    assert set(certificate.bits) == {"value", "gradient", "value*value", "value*gradient"}
    part = ExactMode(certify=True)
    run(c, [1, 5], [0, 1], part)
    assert all(part.certificate().bits[k] <= v for k, v in certificate.bits.items())  # the whole bounds every cut


def test_the_certificate_fails_where_sums_are_too_large_and_then_order_does_matter():
    def total(mode, parts):
        with mode:
            return sum(a @ b for a, b in zip(x.tensor_split(parts, 1), y.tensor_split(parts, 0)))

    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 64, generator=g) * 4096, torch.randn(64, 8, generator=g) * 4096
    mode = ExactMode(certify=True)
    reference = total(mode, 1)
    assert not mode.certificate().holds and mode.certificate().margin < 0
    assert not torch.equal(total(ExactMode(), 5), reference)
    coarse = ExactMode(values=8, certify=True)
    assert torch.equal(total(ExactMode(values=8), 5), total(coarse, 1)) and coarse.certificate().holds


def ring(q, k, v, pieces, kernel):
    """Blockwise attention with a running maximum: keys come in pieces, and what one kernel made the next one reads."""
    out, total, top = torch.zeros_like(q), torch.zeros(*q.shape[:-1], 1), torch.full((*q.shape[:-1], 1), -1e30)
    for kj, vj in zip(k.tensor_split(pieces, 2), v.tensor_split(pieces, 2)):
        with kernel():
            scores = q @ kj.transpose(-1, -2) / 2
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            e, w = (scores - new).exp(), (top - new).exp()
            out, total, top = out * w + e @ vj, total * w + e.sum(-1, keepdim=True), new
    with kernel():
        return out / total


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_attention_in_blocks_inside_kernels_has_the_bits_of_plain_attention_after_the_next_product(pieces):
    g = torch.Generator().manual_seed(pieces)
    q, k, v, w = (torch.randn(2, 3, 7, 4, generator=g) for _ in range(4))
    with ExactMode() as mode:
        ringed = ring(q, k, v, pieces, mode.kernel) @ w.transpose(-1, -2)
        plain = ((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).clone() @ w.transpose(-1, -2)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0] @ w.transpose(-1, -2)
    assert torch.equal(ringed, plain) and torch.equal(fused, plain)


def test_operands_given_to_a_kernel_are_rounded_once_and_gradients_pass():
    x = torch.randn(3, 4, requires_grad=True)
    with ExactMode(values=8) as mode:
        with mode.kernel(x) as (y,):
            inner = y * 0.3
            assert not torch.equal(mode.on_grid(inner, "value"), inner)  # nothing rounds inside
        assert torch.equal(y.detach(), mode.on_grid(x, "value")) and mode.inside == 0
        inner.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.3))


@pytest.mark.parametrize("leading", [(), (1,)])
def test_a_parameter_broadcast_over_tokens_must_not_have_a_leading_dim_of_one(leading):
    """A limit, stated in the module: torch sums nothing for a single token there, so nothing is rounded."""
    g = torch.Generator().manual_seed(0)
    x, m = (torch.randn(4, 3, 5, generator=g) for _ in "xm")
    position = torch.randn(*leading, 3, 5, generator=g).requires_grad_()

    def gradient(rows):
        with ExactMode():
            return sum(
                torch.autograd.grad(((a + position) * b).sin().sum(), position)[0]
                for a, b in zip(x.split(rows), m.split(rows))
            )

    assert torch.equal(gradient(2), gradient(4))
    assert torch.equal(gradient(1), gradient(4)) == (not leading)


@pytest.mark.parametrize("reduce, exact", [(sum, True), (lambda parts: torch.stack(list(parts)).sum(0), False)])
def test_partial_products_are_added_not_stacked_and_summed(reduce, exact):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 12, generator=g), torch.randn(12, 5, generator=g)
    with ExactMode():
        cut = reduce(a @ b for a, b in zip(x.tensor_split(3, 1), w.tensor_split(3)))
        assert torch.equal(cut, x @ w) == exact
