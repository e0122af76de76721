"""A config checks itself and counts its parameters and FLOPs; both counts are compared with the real module."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from emu.models import PRESETS, Config, ConfigError, Decoder, UnknownModelError, config

from .strategies import configs


def on_meta(shape: Config) -> Decoder:
    with torch.device("meta"):
        return Decoder(shape)


@given(configs(unfused=True, experts=True))
@settings(deadline=None, max_examples=100)
def test_the_closed_form_counts_every_parameter(shape):
    assert shape.n_params() == sum(p.numel() for p in on_meta(shape).parameters())


def test_the_parameter_count_notices_one_bias():
    shape = Config(layers=2, width=8, heads=2)
    model = on_meta(shape)
    model.blocks[1].mlp.up.bias = None
    assert shape.n_params() != sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "name, n_params",
    [
        # Sizes of the published checkpoints, huggingface.co: openai-community/gpt2 and meta-llama/Llama-3.1-*.
        ("gpt-small", 124_439_808),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),  # mistralai/Mixtral-8x7B-v0.1
        ("dbrx", 131_596_523_520),  # databricks/dbrx-base
    ],
)
def test_published_models_have_their_published_number_of_parameters(name, n_params):
    assert config(name).n_params() == n_params


def test_gpt3_has_175_billion_parameters():
    assert config("gpt3-175b").n_params() == pytest.approx(175e9, rel=0.005)  # the paper rounds to three digits


@pytest.mark.parametrize(
    "name, total, active",
    [
        ("mixtral-8x7b", 46.7e9, 12.9e9),  # https://mistral.ai/news/mixtral-of-experts
        ("dbrx", 132e9, 36e9),  # https://huggingface.co/docs/transformers/model_doc/dbrx
    ],
)
def test_a_token_meets_as_many_parameters_as_was_published(name, total, active):
    shape = config(name)
    assert shape.n_params() == pytest.approx(total, rel=0.005)
    assert shape.active_params() == pytest.approx(active, rel=0.02)  # published with two or three digits


@given(configs(experts=True), st.data())
@settings(deadline=None, max_examples=30)
def test_one_token_moves_the_parameters_it_meets_and_no_others(shape, data):
    shape = dataclasses.replace(shape, capacity=None, balance=0.0)
    model = Decoder(shape)
    for p in model.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    model.loss_sum(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)).backward()
    idle = 0
    for name, p in model.named_parameters():
        if ".experts." in name:
            idle += sum(e.numel() for e, g in zip(p, p.grad) if not g.any())
    assert shape.n_params() - shape.active_params() == idle
    assert bool(idle) == (shape.top_k < shape.experts)


@given(configs(experts=True), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=60)
def test_flops_equal_what_torch_counts_plus_the_attended_pairs(shape, batch, data):
    seq = data.draw(st.integers(1, shape.seq))
    shape = dataclasses.replace(shape, capacity=None)  # dropped choices still count
    model = Decoder(shape)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, seq, dtype=torch.int64))
    linear = counter.get_total_flops()  # torch counts no FLOPs for the CPU's fused attention
    causal = full = 0
    for _ in range(shape.layers * batch * shape.heads):
        for query in range(seq):
            causal += 4 * shape.head_dim * (query + 1)
            full += 4 * shape.head_dim * seq
    assert shape.flops(batch, seq) == linear + causal
    assert shape.flops(batch, seq, attention="full") == linear + full


def test_flops_of_the_worked_example():
    """S=6, d=8, 4 heads, 2 KV heads, head dim 2, ffn 16; https://github.com/NVIDIA/Megatron-LM/issues/831."""
    block = Config(layers=1, width=8, heads=4, kv_heads=2, head_dim=2, ffn=16)
    assert block.block_flops(1, 6) == 6048
    assert block.block_flops(1, 6, attention="full") == 6528
    assert 3 * block.block_flops(1, 6) == 18144
    wrong_scores = 6048 - 8 * 2 * 21  # KV heads in the scores
    multi_head = dataclasses.replace(block, kv_heads=4).block_flops(1, 6)
    assert block.block_flops(1, 6) not in (wrong_scores, multi_head)


def test_an_unknown_attention_convention_is_refused():
    with pytest.raises(ValueError, match='count "causal" or "full"'):
        config("gpt-tiny").flops(1, attention="half")  # type: ignore[arg-type]


GOOD = {"layers": 2, "width": 8, "heads": 4}


@pytest.mark.parametrize(
    "wrong, field, says",
    [
        ({"layers": 0}, "layers", ["at least 1", "got 0"]),
        ({"width": 8.0}, "width", ["whole number", "8.0"]),
        ({"heads": True}, "heads", ["whole number", "True"]),
        ({"width": 10}, "heads", ["width 10", "4 heads", "width=8", "head_dim="]),
        ({"kv_heads": 3}, "kv_heads", ["4 heads", "over 3", "[1, 2, 4]"]),
        ({"positions": "rope"}, "positions", ["'rope'", '"learned" or "rotary"', 'Did you mean "rotary"?']),
        ({"norm": "LayerNorm"}, "norm", ["'LayerNorm'", 'Did you mean "layer"?']),
        ({"activation": "swish"}, "activation", ["'swish'", 'Did you mean "swiglu"?']),
        ({"head_dim": 3, "positions": "rotary"}, "head_dim", ["odd", "head_dim=4"]),
        ({"dropout": 1.0}, "dropout", ["below 1", "dropout=0.1"]),
        ({"dropout": "a tenth"}, "dropout", ["a number", "'a tenth'"]),
        ({"bias": 1}, "bias", ["True or False"]),
        ({"rope_base": float("nan")}, "rope_base", ["finite", "10000.0"]),
        ({"norm_eps": 0.0}, "norm_eps", ["above 0", "1e-5"]),
        ({"label_smoothing": 1.5}, "label_smoothing", ["from 0 to 1", "1.5"]),
        ({"attention_dropout": 0.1}, "attention_dropout", ["never writes its weights to memory", "fused=False"]),
        ({"fused": False, "attention_dropout": -0.1}, "attention_dropout", ["at least 0", "attention_dropout=0.1"]),
        ({"fused": 0}, "fused", ["True or False"]),
        ({"experts": -1}, "experts", ["at least 0", "got -1"]),
        ({"experts": 4, "top_k": 5}, "top_k", ["5 different experts", "only 4", "top_k=4"]),
        ({"experts": 4, "top_k": 0}, "top_k", ["at least 1", "got 0"]),
        ({"experts": 4, "top_k": 1, "router": "topk-softmax"}, "top_k", ["always 1", 'router="softmax-topk"']),
        ({"experts": 4, "top_k": 1, "renormalize": True}, "top_k", ["always 1", "renormalize=False"]),
        ({"experts": 4, "router": "topk"}, "router", ["'topk'", '"softmax-topk" or "topk-softmax"']),
        ({"experts": 4, "balance": -1.0}, "balance", ["at least 0", "0.01 is usual"]),
        ({"experts": 4, "balance_over": "rank"}, "balance_over", ['"sequence" or "batch"']),
        ({"experts": 4, "capacity": 0}, "capacity", ["above 0", "None drops nothing"]),
        ({"experts": 4, "capacity": "all"}, "capacity", ["a number", "'all'"]),
        ({"experts": 4, "routing": "unifrom"}, "routing", ["'unifrom'", 'did you mean "uniform"', "zipf:1.2"]),
        ({"experts": 4, "routing": "zipf:x"}, "routing", ["'zipf:x'", "after the colon"]),
        ({"balance": 0.01}, "balance", ["this model is dense", "experts=8"]),
        ({"shared_ffn": 8}, "shared_ffn", ["this model is dense"]),
        ({"capacity": 1.0}, "capacity", ["this model is dense"]),
    ],
)
def test_an_impossible_config_says_what_is_wrong_and_what_to_do(wrong, field, says):
    Config(**GOOD)
    with pytest.raises(ConfigError) as caught:
        Config(**{**GOOD, **wrong})
    error = caught.value
    assert error.field == field and str(error).startswith(f"Config.{field}: ") and error.hint in str(error)
    for part in says:
        assert part in str(error)


def test_what_is_not_said_is_derived():
    shape = Config(**GOOD)
    assert (shape.kv_heads, shape.head_dim, shape.ffn) == (4, 2, 32)


def test_an_unknown_model_is_answered_with_the_nearest_name():
    with pytest.raises(UnknownModelError) as caught:
        config("llama-3-8b")
    assert 'Did you mean "llama3-8b"?' in caught.value.hint
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(UnknownModelError) as caught:
        config("zzzz")
    assert "Did you mean" not in str(caught.value)


def test_a_named_model_can_be_changed():
    assert config("llama3-8b", layers=2) == dataclasses.replace(config("llama3-8b"), layers=2)
