"""The stock Llama of transformers: it stays stock, and is the decoder of the same shape."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emu.equivalence.widening import Float64Mode
from emu.models import Config, Decoder
from emu.models.huggingface import TransformersMissing, llama

transformers: Any = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 9,
}
ROUNDING = 1e-12  # float64, and some hundred terms in another order


@st.composite
def fields(draw: Any, biases: bool = True) -> dict[str, Any]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "vocab_size": draw(st.integers(2, 30)),
        "hidden_size": kv_heads * group * draw(st.integers(1, 3)),
        "intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 3)),
        "max_position_embeddings": 9,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": biases and draw(st.booleans()),
        "mlp_bias": biases and draw(st.booleans()),
        "initializer_range": 0.5,  # large enough that attention, activations and norms matter
    }


def pair(vocab: int, batch: int = 2, seq: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(vocab, (batch, seq), generator=g) for _ in "xy")
    return x, y.masked_fill(torch.rand(y.shape, generator=g) < 0.25, -100)


def losses_and_gradients(model: Any, loss: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@given(fields(), st.sampled_from([torch.float32, torch.float64]))
def test_logits_and_every_gradient_are_the_stock_class_s(shape: dict[str, Any], dtype: torch.dtype) -> None:
    ours = llama(**shape).to(dtype)
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(dtype)
    stock.load_state_dict(ours.state_dict())
    x, y = pair(shape["vocab_size"])
    logits = stock(x).logits
    assert torch.equal(ours(x).logits, logits)
    got = losses_and_gradients(ours, ours.loss_sum(x, y))
    wanted = losses_and_gradients(stock, F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_every_module_is_the_stock_one() -> None:
    model = llama(**TINY)
    (root, *rest) = model.named_modules()
    assert {type(m).__module__.partition(".")[0] for name, m in rest if name != "loss"} == {"transformers", "torch"}
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert type(model).forward is transformers.LlamaForCausalLM.forward
    assert root == ("", model)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).named_parameters()
    ]


def test_labels_are_not_shifted_and_the_loss_is_a_sum() -> None:
    """Given tokens as labels, the stock class shifts them by one and takes the mean."""
    model, (x, _) = llama(**TINY), pair(23)
    following = F.pad(x[:, 1:], (0, 1), value=-100)
    assert model.loss_sum(x, following).item() / 16 == pytest.approx(model(x, labels=x).loss.item(), rel=1e-6)
    assert model.loss_sum(x, torch.full_like(x, -100)).item() == 0


@pytest.mark.parametrize("rows", [0, 1])
def test_a_rank_may_have_no_rows(rows: int) -> None:
    model, (x, y) = llama(**TINY), pair(23)
    model.loss_sum(x[:rows], y[:rows]).backward()
    assert all(bool(p.grad.any()) == bool(rows) for p in model.parameters())


def test_only_the_loss_takes_for_granted_that_every_token_counts() -> None:
    model, (x, y) = llama(**TINY), pair(23)
    model.loss_sum(x, y)
    assert model.config._attn_implementation == "sdpa"
    kept = torch.ones_like(x)
    kept[:, :3] = 0
    assert not torch.equal(model(x, attention_mask=kept).logits[:, -1], model(x).logits[:, -1])
    with pytest.raises(RuntimeError):
        model.loss_sum(x.float(), y)
    assert model.config._attn_implementation == "sdpa"


def test_the_loss_needs_no_values() -> None:
    """Shapes are enough: nothing asks what a token or a position is. The stock forward does."""
    model, (x, y) = llama(**TINY).to("meta"), pair(23)
    loss = model.loss_sum(x.to("meta"), y.to("meta"))
    loss.backward()
    assert loss.is_meta
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        model(x.to("meta"))


# The decoder of the same shape.

NAMES = {
    "embed_tokens": "embedding",
    "layers": "blocks",
    "self_attn": "attention",
    **{f"{p}_proj": p for p in ("q", "k", "v", "o", "gate", "up", "down")},
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "lm_head": "head",
}


def as_decoder(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.removeprefix("model.").split("."))


def decoder_of(model: Any) -> Decoder:
    c = model.config
    shape = Config(
        layers=c.num_hidden_layers,
        width=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        ffn=c.intermediate_size,
        vocab=c.vocab_size,
        seq=c.max_position_embeddings,
        positions="rotary",
        norm="rms",
        activation="swiglu",
        bias=False,
        tied=c.tie_word_embeddings,
        norm_eps=c.rms_norm_eps,
    )
    made = Decoder(shape)
    made.load_state_dict({as_decoder(name): value for name, value in model.state_dict().items()})
    return made


def difference(shape: dict[str, Any], spoil: Any = lambda model: None) -> float:
    """Between losses, logits and gradients of the stock model and of the decoder, relative to each one's largest value."""
    model = llama(**shape)
    decoder = decoder_of(model)
    spoil(model)
    x, y = pair(shape["vocab_size"])
    stock = losses_and_gradients(model, model.loss_sum(x, y)) | {"logits": model(x).logits.detach()}
    ours = losses_and_gradients(decoder, decoder.loss_sum(x, y)) | {"logits": decoder(x).detach()}
    assert {as_decoder(name) for name in stock} == set(ours)
    return max(float((v - ours[as_decoder(k)]).abs().max() / v.abs().max().clamp(min=1)) for k, v in stock.items())


@given(fields(biases=False))
@pytest.mark.usefixtures("float64")
def test_it_is_the_decoder_of_the_same_shape(shape: dict[str, Any]) -> None:
    """Rotary convention included: number i is paired with number i + head_dim / 2. Mode: see the next test."""
    with Float64Mode():
        assert difference(shape) <= ROUNDING


@pytest.mark.usefixtures("float64")
def test_stock_norms_and_angles_are_float32_whatever_the_model_is() -> None:
    """Why the test above widens all that asks for float32: it is all the difference there is."""
    shape = {**TINY, "initializer_range": 0.5}
    with Float64Mode():
        widened = difference(shape)
    assert widened <= ROUNDING < 1e-9 < difference(shape) < 1e-5


@pytest.mark.usefixtures("float64")
def test_another_pairing_of_rotary_numbers_would_be_noticed() -> None:
    """Negative control: heads whose numbers lie in pairs, side by side, as in Llama's own checkpoints."""

    def side_by_side(model: Any) -> None:
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.data.copy_(p.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2).clone())

    with Float64Mode():
        assert difference({**TINY, "initializer_range": 0.5}, side_by_side) > 1e-3


# What it draws, and what it refuses.


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = llama(**TINY), llama(**TINY), llama(seed=1, **TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.set_default_dtype(torch.float64)
    try:
        wide = llama(**TINY)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, p in one.named_parameters():
        assert torch.equal(p, same.get_parameter(name))
        assert torch.equal(p.double(), wide.get_parameter(name))
        assert torch.equal(p, other.get_parameter(name)) == (p.dim() == 1), name
        assert p.dim() == 2 or bool((p == 1).all())
    assert one.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.3)  # 120 numbers


def test_padding_has_no_embedding() -> None:
    model = llama(**TINY, pad_token_id=3)
    assert not model.model.embed_tokens.weight[3].any()
    assert model.model.embed_tokens.weight[2].any()


def test_a_config_is_copied_and_caches_nothing() -> None:
    config = transformers.LlamaConfig(**TINY, attn_implementation="eager")
    model = llama(config)
    assert config.use_cache
    assert not model.config.use_cache
    assert not hasattr(config, "vocab")
    assert (model.config.vocab, model.config.seq) == (23, 9)
    assert set(model(pair(23)[0])) == {"logits"}
    assert model.config._attn_implementation == "eager"


@settings(max_examples=5)
@given(st.sampled_from(["hidden_sise", "n_layers", "width"]))
def test_a_field_that_does_not_exist_builds_no_model_of_seven_billion(name: str) -> None:
    with pytest.raises(TypeError, match=name) as caught:
        llama(**{name: 16})
    assert "\n" not in str(caught.value)


def test_a_config_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="got a Config; or give its fields"):
        llama(Config(layers=1, width=4, heads=1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both; change the config's own vocab_size"):
        llama(transformers.LlamaConfig(**TINY), vocab_size=5)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TransformersMissing) as caught:
        llama(**TINY)
    assert 'pip install "transformers>=5.8"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_imports_transformers_before_a_llama_is_made() -> None:
    code = "import sys, emu, emu.models.huggingface; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
