"""A model on meta tensors must issue the very operators that it issues on a CPU: a shape run stands for a real one."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from emu.models import Config, Decoder

from .strategies import configs


class Recorder(TorchDispatchMode):
    """The name of every operator below autograd, with the shapes it returns; `onto` moves what is made elsewhere."""

    def __init__(self, onto: str | None = None):
        super().__init__()
        self.calls = []
        self.onto = onto

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.onto and "device" in {a.name for a in func._schema.arguments}:
            kwargs["device"] = torch.device(self.onto)
        out = func(*args, **kwargs)
        shapes = [tuple(t.shape) for t in (out if isinstance(out, (tuple, list)) else [out]) if hasattr(t, "shape")]
        self.calls.append((str(func), shapes))
        return out


def step(shape, batch, seq, recorder):
    """Build a model and run forward and backward, all under the recorder."""
    with recorder:
        model = Decoder(shape)
        x = torch.zeros(batch, seq, dtype=torch.int64)
        model.loss_sum(x, torch.zeros_like(x)).backward()
    return recorder.calls, model


@given(configs(dropout=True, unfused=True), st.integers(0, 2), st.data())
@settings(deadline=None, max_examples=60)
def test_meta_and_cpu_issue_the_same_operators(shape, batch, data):
    seq = data.draw(st.integers(1, shape.seq))
    real, _ = step(shape, batch, seq, Recorder())
    meta, model = step(shape, batch, seq, Recorder(onto="meta"))
    assert all(p.is_meta and p.grad is not None and p.grad.is_meta for p in model.parameters())
    assert real == meta


@given(configs(dropout=True, unfused=True, experts=True), st.integers(0, 2), st.data())
@settings(deadline=None, max_examples=60)
def test_with_experts_only_the_numbers_of_their_rows_differ(shape, batch, data):
    seq = data.draw(st.integers(1, shape.seq))
    real, _ = step(shape, batch, seq, Recorder())
    meta, _ = step(shape, batch, seq, Recorder(onto="meta"))
    assert [name for name, _ in real] == [name for name, _ in meta]


def test_without_a_declared_routing_experts_have_no_rows_to_be_taken_for_granted():
    shape = Config(layers=1, width=8, heads=2, experts=4, routing=None)
    with pytest.raises((NotImplementedError, RuntimeError)):  # torch: a meta tensor has no data
        step(shape, 1, 4, Recorder(onto="meta"))
    step(dataclasses.replace(shape, routing="zipf:1"), 1, 4, Recorder(onto="meta"))


def test_the_comparison_sees_attention_that_differs():
    calls = []
    for device in ("cpu", "meta"):
        q = torch.zeros(1, 2, 4, 8, device=device)
        with Recorder() as recorder:
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        calls.append(recorder.calls)
    assert calls[0] != calls[1]


def test_attention_is_one_operator_each_way():
    from emu.models import config

    calls, _ = step(config("llama-tiny"), 1, 8, Recorder())
    names = [name for name, _ in calls]
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert names.count(f"{kernel}.default") == names.count(f"{kernel}_backward.default") == 4
    assert not any("softmax" in name and "log_softmax" not in name for name in names)
    assert not any("clone" in name or "_copy" in name for name in names), "a hidden copy"
