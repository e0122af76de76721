"""Mixtures, spelled-out attention and smoothed labels, unchanged, in the exact tier: any cut has one device's bits."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.equivalence.exact import ExactMode
from emu.models import Config, Decoder

from .strategies import mixtures

ROWS = 5
SHAPE = Config(layers=2, width=16, heads=4, kv_heads=2, ffn=8, vocab=29, seq=6)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(shape, sizes, mode):
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randint(0, shape.vocab, (ROWS, shape.seq), generator=generator) for _ in "xy")
    y[:, ::4] = -100
    y[1] = -100
    total = {}
    with mode:
        for tokens, labels in zip(x.split(sizes), y.split(sizes)):
            model = Decoder(shape)
            loss = model.loss_sum(tokens, labels)
            loss.backward()
            for name, part in [("loss", loss.detach()), *((n, p.grad) for n, p in model.named_parameters())]:
                total[name] = total[name] + part if name in total else part
        return {**total, "loss": mode.on_grid(total["loss"])}


@settings(deadline=None, max_examples=30)
@given(
    mixtures(),
    st.sampled_from(["gelu", "swiglu"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.lists(st.integers(0, ROWS), max_size=4),
)
def test_any_cut_of_the_batch_has_the_bits_of_one_device(mixture, activation, fused, smoothing, cuts):
    shape = dataclasses.replace(SHAPE, activation=activation, fused=fused, label_smoothing=smoothing, **mixture)
    cuts = sorted(cuts)
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, ROWS])]
    certifying = ExactMode(certify=True)
    one, many = gradients(shape, [ROWS], certifying), gradients(shape, sizes, ExactMode())
    assert certifying.certificate().holds
    assert [n for n in one if not torch.equal(one[n], many[n])] == []


def test_control_balance_over_a_batch_has_other_bits_when_the_batch_is_cut():
    shape = dataclasses.replace(SHAPE, experts=4, balance=0.1, balance_over="batch")
    one, many = gradients(shape, [ROWS], ExactMode()), gradients(shape, [2, 3], ExactMode())
    assert not torch.equal(one["blocks.0.moe.router.weight"], many["blocks.0.moe.router.weight"])
