"""The project's own decoder, unchanged, in the exact tier: data parallelism and accumulation have one device's bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.equivalence.exact import ExactMode
from emu.models import GPT, Config

BATCH, SEQ = 5, 6


@pytest.fixture(autouse=True)
def float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


configs = st.builds(
    Config,
    layers=st.just(2),
    width=st.just(16),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    vocab=st.just(29),
    seq=st.just(SEQ),
    positions=st.sampled_from(["learned", "rotary"]),
    norm=st.sampled_from(["layer", "rms"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    bias=st.booleans(),
    tied=st.booleans(),
)


def gradients(config, sizes, order, mode):
    g = torch.Generator().manual_seed(7)
    x, y = (torch.randint(0, config.vocab, (BATCH, SEQ), generator=g) for _ in "xy")
    y[:, ::4] = -100
    parts = []
    with mode:
        for tokens, labels in zip(x.split(sizes), y.split(sizes)):
            model = GPT(config, seed=0)
            loss = model.loss_sum(tokens, labels)
            loss.backward()
            parts.append({n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()})
        total = {n: sum((parts[i][n] for i in order[1:]), parts[order[0]][n]) for n in parts[0]}
        tokens = int((y >= 0).sum())
        return {n: mode.on_grid(t) if n == "loss" else t / tokens for n, t in total.items()}


@settings(deadline=None, max_examples=20)
@given(configs, st.lists(st.integers(0, BATCH), max_size=4), st.randoms(use_true_random=False))
def test_any_split_of_the_batch_in_any_order_has_the_bits_of_one_device(config, cuts, rng):
    cuts = sorted(cuts)
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, BATCH])]
    order = rng.sample(range(len(sizes)), len(sizes))
    certifying = ExactMode(certify=True)
    one, many = gradients(config, [BATCH], [0], certifying), gradients(config, sizes, order, ExactMode())
    assert certifying.certificate().holds
    assert [n for n in one if not torch.equal(one[n], many[n])] == []
    zero = {n for n, t in one.items() if not t.abs().max()}
    assert all(n.endswith("k.bias") for n in zero)  # a key's bias moves all scores of a row alike: no gradient


def test_control_one_sequence_left_out_differs_in_every_gradient():
    config = Config(layers=2, width=16, heads=4, vocab=29, seq=SEQ)
    one, less = gradients(config, [BATCH], [0], ExactMode()), gradients(config, [2, 1, 2], [2, 0], ExactMode())
    equal = [n for n in one if torch.equal(one[n], less[n])]
    assert all(n.endswith("k.bias") for n in equal)
