"""Mixtures of experts against one loop over tokens, and what makes them independent of how a batch is cut."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.models import Config, Decoder, MoE
from emu.models.rows import put, take

from .strategies import mixtures


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(fields, activation="swiglu", seed=0, **more) -> MoE:
    """A mixture with weights of order one."""
    moe = MoE(Config(1, 4, 1, ffn=3, activation=activation, **{**fields, **more}))
    generator = torch.Generator().manual_seed(seed)
    for p in moe.parameters():
        torch.nn.init.normal_(p, generator=generator)
    return moe


def numbers(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The same, one token and one choice at a time."""
    weights, experts, _ = moe.router(x)
    kept = moe.capacity(experts)
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            out = torch.zeros(x.shape[2]) if moe.shared is None else moe.shared(x[b, t])
            for j, e in enumerate(experts[b, t].tolist()):
                if kept is not None and not kept[b, t, j]:
                    continue
                hidden = moe.experts.up[e] @ x[b, t]
                gate = moe.experts.gate
                hidden = F.gelu(hidden) if gate is None else F.silu(gate[e] @ x[b, t]) * hidden
                out = out + weights[b, t, j] * (moe.experts.down[e] @ hidden)
            rows.append(out)
    return torch.stack(rows).view(x.shape) if rows else x.clone()


def gradients(out, moe, x, cotangent):
    wanted = [x, *moe.parameters()]
    grads = torch.autograd.grad(out, wanted, cotangent, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads)]


@given(mixtures(), st.sampled_from(["gelu", "swiglu"]), st.integers(0, 3), st.integers(0, 5), st.integers(0, 1000))
@settings(deadline=None, max_examples=100)
def test_it_is_a_loop_over_tokens_and_their_choices(fields, activation, batch, seq, seed):
    moe = made(fields, activation, seed)
    x, cotangent = numbers(batch, seq, 4, seed=seed + 1).requires_grad_(), numbers(batch, seq, 4, seed=seed + 2)
    out, right = moe(x), one_by_one(moe, x)
    assert out.shape == x.shape
    # Float64, some fifty terms of order up to a hundred, summed in another order.
    assert (out - right).abs().max() <= 1e-12 * (1 + right.abs().max()) if x.numel() else True
    if x.numel():
        for a, b in zip(gradients(out, moe, x, cotangent), gradients(right, moe, x, cotangent)):
            assert (a - b).abs().max() <= 1e-12 * (1 + b.abs().max())


def test_the_loop_sees_weights_on_inputs_and_a_choice_that_was_not_dropped():
    moe = made({"experts": 4, "top_k": 2, "capacity": 0.5})
    x = numbers(2, 6, 4)
    right = one_by_one(moe, x)
    assert (moe(x) - right).abs().max() <= 1e-12
    moe.capacity.factor = None
    assert (moe(x) - right).abs().max() > 1e-3


def test_experts_without_tokens_have_zero_gradients_not_none():
    moe = made({"experts": 6, "top_k": 1})
    x = numbers(1, 2, 4)
    moe(x).sum().backward()
    used = set(moe.router(x).experts.flatten().tolist())
    for p in moe.experts.parameters():
        assert p.grad is not None
        assert {e for e, g in enumerate(p.grad) if g.any()} == used and len(used) < 6


@given(st.integers(0, 12), st.integers(1, 5), st.booleans(), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_rows_come_back_in_the_order_in_which_they_went(n, experts, told, seed):
    moe = made({"experts": experts, "top_k": 1}, seed=seed)
    x, expert = numbers(n, 4), torch.randint(experts, (n,), generator=torch.Generator().manual_seed(seed))
    counts = [int((expert == e).sum()) for e in range(experts)]
    out = moe.experts(x, expert, counts if told else None)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert moe.experts.count(expert) == counts
    if n:  # activations of a row that stands elsewhere in a vector register may round otherwise
        assert (moe.experts(x[order], expert[order]) - out[order]).abs().max() <= 1e-13 * (1 + out.abs().max())
        right = torch.stack([moe.experts(row[None], e[None])[0] for row, e in zip(x, expert)])
        assert (out - right).abs().max() <= 1e-13 * (1 + right.abs().max())


@given(st.integers(0, 3), st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.sampled_from([None, 0.3, 1.0]))
@settings(deadline=None, max_examples=60)
def test_where_there_are_no_values_rows_are_counted_as_declared_within_every_limit(batch, seq, experts, k, capacity):
    k = min(k, experts)
    moe = made({"experts": experts, "top_k": k, "capacity": capacity, "routing": "zipf:3"}).to("meta")
    chosen = torch.zeros(batch, seq, k, dtype=torch.int64, device="meta")
    counts = moe.experts.count(chosen.flatten())
    assert sum(counts) == batch * seq * k and max(counts) <= batch * seq  # no expert has a token twice
    room = seq if capacity is None else moe.capacity.limit(seq, k)
    counts = moe.count(chosen, torch.ones_like(chosen, dtype=torch.bool))
    assert all(n <= batch * min(seq, room) for n in counts)
    assert counts[0] == max(counts)
    assert moe(torch.zeros(batch, seq, 4, device="meta")).shape == (batch, seq, 4)


@given(st.integers(0, 9), st.data())
@settings(deadline=None, max_examples=60)
def test_taking_and_putting_rows_undo_each_other_forward_and_backward(n, data):
    m = data.draw(st.integers(0, n))
    index = torch.randperm(n, generator=torch.Generator().manual_seed(n))[:m]
    x, y = numbers(n, 3).requires_grad_(), numbers(m, 3, seed=2).requires_grad_()
    some = m < n or data.draw(st.booleans())
    assert torch.equal(take(x, index, some), x[index])
    into = put(y, index, n if some else None)
    assert torch.equal(into, torch.zeros(n, 3).index_add(0, index, y))
    (back,) = torch.autograd.grad(take(x, index, some), x, y.detach())
    assert torch.equal(back, into)
    (back,) = torch.autograd.grad(into, y, x.detach())
    assert torch.equal(back, x[index])


SHAPE = Config(
    layers=2, width=8, heads=2, ffn=5, vocab=11, seq=6, experts=5, top_k=2, shared_ffn=3, balance=0.7, capacity=0.6,
)  # fmt: skip


def batch_of(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(SHAPE.vocab, (2, rows, SHAPE.seq), generator=generator)
    y[torch.rand(rows, SHAPE.seq, generator=generator) < 0.4] = -100
    return x, y


def drawn(shape: Config) -> Decoder:
    model = Decoder(shape)
    for block in model.blocks:  # routers that prefer some experts strongly
        torch.nn.init.normal_(block.moe.router.weight, generator=torch.Generator().manual_seed(3))
    return model


def loss_and_gradients(model, x, y):
    model.zero_grad()
    loss = model.loss_sum(x, y)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_parts_of_a_batch_add_up_to_the_whole_with_drops_and_balance(sizes, seed):
    model = drawn(SHAPE)
    x, y = batch_of(sum(sizes), seed)
    whole = loss_and_gradients(model, x, y)
    parts = [loss_and_gradients(model, a, b) for a, b in zip(x.split(sizes), y.split(sizes))]
    for name, right in whole.items():
        assert (sum(p[name] for p in parts) - right).abs().max() <= 1e-12 * (1 + right.abs().max()), name


def test_control_balance_over_a_batch_depends_on_how_it_is_cut():
    model = drawn(dataclasses.replace(SHAPE, balance_over="batch"))
    x, y = batch_of(4)
    whole = loss_and_gradients(model, x, y)
    parts = [loss_and_gradients(model, x[rows], y[rows]) for rows in (slice(0, 1), slice(1, 4))]
    assert abs(parts[0]["loss"] + parts[1]["loss"] - whole["loss"]) > 1e-3


@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(["sequence", "batch"]), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_per_label_the_balance_has_the_coefficient_of_the_config(rows, seq, over, seed):
    """Whatever the numbers of rows, tokens and labels: loss / labels = cross-entropy / labels + 0.7 * balance."""
    x, y = (t[:, :seq] for t in batch_of(rows, seed))
    labels = (y != -100).sum(1)
    with_it, without = (drawn(dataclasses.replace(SHAPE, balance=c, balance_over=over)) for c in (0.7, 0.0))
    kept = []
    for block in with_it.blocks:
        block.moe.balance.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    difference = with_it.loss_sum(x, y) - without.loss_sum(x, y)
    mean = sum((each * labels).sum() for each in kept) / labels.sum().clamp_min(1)
    assert len(kept) == SHAPE.layers
    assert difference.item() == pytest.approx((0.7 * mean * labels.sum()).item(), abs=1e-11)  # of losses around 100
    if over == "batch" and labels.any():
        assert all(each.eq(each[0]).all() for each in kept)
        assert (difference / labels.sum()).item() == pytest.approx(
            0.7 * sum(float(each[0]) for each in kept), abs=1e-12
        )


def test_nothing_is_balanced_at_coefficient_zero_and_nothing_is_kept_after_the_loss():
    x, y = batch_of(2)
    model = drawn(SHAPE)
    model(x)
    assert [block.moe.balance_loss.shape for block in model.blocks] == [(2,), (2,)]
    model.loss_sum(x, y)
    assert all(block.moe.balance_loss is None for block in model.blocks) and model.balance_sum(y) is None
    called = []
    model = drawn(dataclasses.replace(SHAPE, balance=0.0))
    for block in model.blocks:
        block.moe.balance.register_forward_hook(lambda *_: called.append(1))
    model.loss_sum(x, y)
    assert not called


def test_the_balance_loss_evens_out_a_router():
    shape = dataclasses.replace(SHAPE, layers=1, balance=1.0, capacity=None)
    model = drawn(shape)
    x, y = batch_of(16)
    moe = model.blocks[0].moe

    def unevenness():
        model(x)
        return float(moe.balance_loss.detach().mean())

    before = unevenness()
    optimizer = torch.optim.Adam([moe.router.weight], lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss_sum(x, y).div((y != -100).sum()).backward()
        optimizer.step()
    assert unevenness() - 1 < 0.5 * (before - 1)
