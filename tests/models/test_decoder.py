"""The decoder as a whole: what it computes, what it draws, and which gradients it gives."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.models import GPT, Config, Decoder, batches, config

from .strategies import configs

TINY = Config(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocab=32, seq=12)
LLAMA = dataclasses.replace(TINY, positions="rotary", norm="rms", activation="swiglu", bias=False)
SPELLED_OUT = dataclasses.replace(LLAMA, fused=False, label_smoothing=0.1)
# So few places that about half of all choices are dropped.
MOE = dataclasses.replace(LLAMA, ffn=8, experts=5, shared_ffn=4, renormalize=True, balance=0.3, capacity=0.6)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pair(shape: Config, batch: int, seq: int | None = None, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    size = (2, batch, seq or shape.seq)
    return torch.randint(shape.vocab, size, generator=generator).unbind()


def gradients(model: Decoder, x, y) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.loss_sum(x, y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@given(configs(dropout=True, unfused=True, experts=True), st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_every_parameter_gets_a_gradient_even_from_an_empty_batch(shape, batch):
    model = Decoder(shape)
    grads = gradients(model, *pair(shape, batch))
    assert set(grads) == {name for name, _ in model.named_parameters()}
    assert all(g.isfinite().all() for g in grads.values())
    if batch == 0:
        assert all(not g.any() for g in grads.values())


def test_a_batch_without_labels_costs_nothing_and_teaches_nothing():
    x, y = pair(TINY, 2)
    model = Decoder(TINY)
    assert model.loss_sum(x, torch.full_like(y, -100)).item() == 0
    assert all(not g.any() for g in gradients(model, x, torch.full_like(y, -100)).values())
    assert any(g.any() for g in gradients(model, x, y).values())


@pytest.mark.parametrize("shape", [TINY, LLAMA, SPELLED_OUT, MOE])
def test_losses_and_gradients_of_parts_add_up(shape, float64):
    model = Decoder(shape)
    x, y = pair(shape, 5)
    y = y.where(y % 3 != 0, -100)
    whole = gradients(model, x, y)
    parts = [gradients(model, x[rows], y[rows]) for rows in (slice(0, 3), slice(3, 3), slice(3, 5))]
    for name, grad in whole.items():
        # Float64 and some hundred terms, summed in another order.
        assert (sum(p[name] for p in parts) - grad).abs().max() <= 1e-12, name


def test_the_loss_is_a_sum_over_the_labels_that_count():
    model = Decoder(TINY)
    x, y = pair(TINY, 2)
    y[0, :5] = -100
    logs = model(x).log_softmax(-1)
    counted = [logs[b, t, y[b, t]] for b in range(2) for t in range(TINY.seq) if y[b, t] != -100]
    by_hand = -torch.stack(counted).sum()
    assert model.loss_sum(x, y).item() == pytest.approx(by_hand.item(), rel=1e-5)  # float32, 19 terms


@pytest.mark.parametrize("shape", [TINY, LLAMA, SPELLED_OUT, MOE])
def test_no_token_sees_a_later_one(shape, float64):
    model = Decoder(shape)
    x, _ = pair(shape, 2)
    later = x.clone()
    later[:, 7] = (later[:, 7] + 1) % shape.vocab
    same = (model(x) - model(later)).abs().amax((0, 2)) < 1e-12  # shapes are equal, so rounding is too
    assert same.tolist() == [True] * 7 + [False] * 5


@pytest.mark.parametrize("shape", [TINY, LLAMA])
def test_positions_may_be_given(shape, float64):
    model = Decoder(shape)
    x, _ = pair(shape, 2, seq=6)
    assert torch.equal(model(x), model(x, torch.arange(6)))
    assert torch.equal(model(x), model(x, torch.arange(6).expand(2, 6)))
    spread = model(x, torch.arange(0, 12, 2))
    assert (model(x) - spread).abs().max() > 1e-6
    if shape.positions == "rotary":  # only distances count, however far the first token stands
        assert torch.allclose(model(x), model(x, torch.arange(6) + 5), rtol=0, atol=1e-12)


def test_the_same_seed_is_the_same_model_whatever_the_global_generator():
    torch.manual_seed(1)
    first = Decoder(TINY, seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = Decoder(TINY, seed=3).state_dict()
    assert torch.equal(state, torch.get_rng_state()), "building a model moved the global generator"
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = Decoder(TINY, seed=4).state_dict()
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_the_same_seed_is_the_same_model_in_every_dtype(float64):
    double = Decoder(LLAMA).state_dict()
    assert all(t.dtype == torch.float64 for t in double.values())
    torch.set_default_dtype(torch.bfloat16)
    half = Decoder(LLAMA).state_dict()
    torch.set_default_dtype(torch.float32)
    single = Decoder(LLAMA).state_dict()
    for name in single:
        assert torch.equal(single[name].double(), double[name])
        assert torch.equal(single[name].bfloat16(), half[name])


def test_branches_start_small_and_all_weights_differ():
    model = Decoder(Config(layers=8, width=64, heads=4))
    assert float(model.blocks[3].attention.q.weight.detach().std()) == pytest.approx(0.02, rel=0.1)  # 4,096 draws
    assert float(model.blocks[3].mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)
    experts = Decoder(Config(layers=8, width=64, heads=4, experts=2)).blocks[3].moe.experts
    assert float(experts.up.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(experts.down.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)
    weights = [p for name, p in model.named_parameters() if p.dim() == 2]
    assert len({w[0, 0].item() for w in weights}) == len(weights)


def test_a_tied_head_is_the_embedding():
    tied = Decoder(dataclasses.replace(TINY, tied=True))
    assert tied.head.weight is tied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    free = Decoder(TINY)
    assert not torch.equal(free.head.weight, free.embedding.weight)
    x, y = pair(TINY, 1)
    unused = sorted(set(range(TINY.vocab)) - set(x.flatten().tolist()))
    assert gradients(tied, x, y)["embedding.weight"][unused].any(), "the head's share is missing"
    assert not gradients(free, x, y)["embedding.weight"][unused].any()


def test_dropout_follows_the_global_seed_and_stops_in_evaluation():
    model = Decoder(dataclasses.replace(TINY, dropout=0.3))
    x, _ = pair(TINY, 2)

    def run(seed):
        torch.manual_seed(seed)
        return model(x)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    model.eval()
    assert torch.equal(run(0), run(1))


def test_modules_have_the_names_that_strategies_look_for():
    names = {name for name, module in Decoder(LLAMA).named_modules() if isinstance(module, torch.nn.Linear)}
    block = ["attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down"]
    assert names == {f"blocks.{i}.{part}" for i in range(2) for part in block} | {"head"}
    names = {name for name, _ in Decoder(MOE).named_modules()}
    parts = ["router", "experts", "shared.up", "balance", "capacity"]
    assert {f"blocks.1.moe.{part}" for part in parts} | {"loss", "blocks.0.attention.core"} <= names
    assert "blocks.0.mlp" not in names
    assert not any("shared" in n for n, _ in Decoder(dataclasses.replace(MOE, shared_ffn=0)).named_modules())
    assert "positions.weight" in Decoder(TINY).state_dict() and "positions.weight" not in Decoder(LLAMA).state_dict()


def test_in_bfloat16_losses_are_summed_in_float32():
    model = Decoder(TINY).bfloat16()
    loss = model.loss_sum(*pair(TINY, 2))
    assert loss.dtype == torch.float32
    loss.backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "x, y, says",
    [
        (torch.zeros(4, dtype=torch.int64), None, r"\[batch, seq\]"),
        (torch.zeros(1, 4), None, r"tokens\.long\(\)"),
        (torch.zeros(1, 13, dtype=torch.int64), None, "13 tokens is longer than this model's 12"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64), "one int64 label per token"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.uint8), "torch.uint8"),
    ],
)
def test_a_wrong_batch_says_what_to_do(x, y, says):
    model = Decoder(TINY)
    with pytest.raises(ValueError, match=says):
        model(x) if y is None else model.loss_sum(x, y)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_a_tiny_model_learns_from_the_text(name):
    model = GPT(config(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for x, y in batches(seed=0, steps=20, batch=8, seq=64):
        loss = model.loss_sum(x, y) / y.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # From guessing among 256 bytes (5.5 nats) to knowing which are frequent in English (some 3.4).
    assert losses[0] > 5 and losses[-1] < 4
