"""The stock Llama of transformers, from a config: a model that nobody wrote for this library.

Needs the extra `hf`. Nothing is downloaded: weights are drawn.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emu.models.layers import draw_
from emu.models.loss import CrossEntropy

if TYPE_CHECKING:
    from transformers import LlamaConfig

ALSO = ("rope_theta", "rope_scaling", "attn_implementation")  # words that LlamaConfig takes besides its fields
UNMASKED = "sdpa_unmasked"


class TransformersMissing(ImportError):
    """transformers cannot be imported. Fields: hint (str, what to do)."""

    def __init__(self, why: str):
        self.hint = 'pip install "transformers>=5.8", or in a checkout of emu: pip install ".[hf]"'
        super().__init__(f"the stock Llama is that of transformers, which cannot be imported ({why}). {self.hint}")


def llama(config: LlamaConfig | None = None, *, seed: int = 0, **fields: Any) -> Any:
    """A transformers.LlamaForCausalLM with `loss_sum(x, y)`; every module in it is the stock one.

    Args:
        config: a transformers.LlamaConfig, which is copied; or None and its fields, e.g. hidden_size=64, vocab_size=256
            (its own defaults make 7 billion parameters).
        seed: of the weights, which come from a generator of their own, on the CPU and in float32, so they are the same on
            every rank, device and dtype up to rounding. Normal with standard deviation config.initializer_range; norms 1,
            biases 0.
        fields: of LlamaConfig; its names and defaults.

    Returns:
        An instance of a subclass of LlamaForCausalLM, in torch's default dtype, in training mode. It adds the submodule
        `loss`, the method `loss_sum`, and `config.vocab` and `config.seq`, the sizes by this library's names. It keeps no
        cache of keys and values unless asked.

    Raises:
        TransformersMissing: there is no transformers.
        TypeError: a field that LlamaConfig does not have, a config of something else, or both a config and fields.
        And what LlamaConfig itself says of fields that make no model.
    """
    stock = _stock()
    if config is None:
        config = _config(stock.LlamaConfig, fields)
    elif fields:
        raise TypeError(f"llama: give a config or its fields, not both; change the config's own {', '.join(fields)}")
    elif not isinstance(config, stock.LlamaConfig):
        raise TypeError(
            f"llama: expected a transformers.LlamaConfig, got a {type(config).__name__}; or give its fields"
        )
    config = copy.deepcopy(config)
    config.use_cache = False
    config.vocab, config.seq = config.vocab_size, config.max_position_embeddings
    drawing_nothing = import_module("transformers.initialization").no_init_weights
    with drawing_nothing():  # stock modules would draw from the global generator when they are made
        model = _with_loss_sum()(config)
    model.tie_weights()
    _draw(model, config.initializer_range, seed)
    return model


def _stock() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise TransformersMissing(str(error)) from None
    return transformers


def _config(kind: Any, fields: dict[str, Any]) -> LlamaConfig:
    """A config, of fields that it knows: LlamaConfig takes any word, and would build its 7 billion parameters for a slip."""
    known = [*inspect.signature(kind).parameters, *ALSO]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}?" if near else "its fields are those of transformers.LlamaConfig"
            raise TypeError(f"llama: LlamaConfig has no field {name!r}; {meant}")
    return kind(**fields)


@cache
def _with_loss_sum() -> Any:
    stock = _stock()
    attention = stock.AttentionInterface()["sdpa"]

    def unmasked(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
        """The stock attention, under a name that no mask is made for."""
        mask: Any = options.get("who_sees_whom")
        if hasattr(mask, "attend"):
            return mask.attend(q, k, v, options.get("scaling")).transpose(1, 2).contiguous(), None
        if q.is_meta and rest[0] is None:  # torch would spell the softmax out, for want of a kernel on no device
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            mixed = kernel(q, k, v, options.get("dropout", 0.0), True, scale=options.get("scaling"))[0]
            return mixed.transpose(1, 2).contiguous(), None
        return attention(module, q, k, v, *rest, **options)

    stock.AttentionInterface.register(UNMASKED, unmasked)

    class LlamaForCausalLM(stock.LlamaForCausalLM):
        """The stock class with a loss that is a sum."""

        def __init__(self, config: LlamaConfig):
            super().__init__(config)
            self.loss = CrossEntropy()
            if config._attn_implementation == "sdpa":
                own = copy.copy(config)  # of attention alone: it is the same in whatever computes a layer again
                own._attn_implementation = UNMASKED
                for layer in self.model.layers:
                    layer.self_attn.config = own

        def loss_sum(self, x: Tensor, y: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
            """The sum of the cross-entropies of all labels that are not -100, in nats.

            Args:
                x: tokens, [batch, seq] int64; batch may be 0.
                y: labels, [batch, seq] int64: the token that follows each one (the stock class shifts labels; this does not).
                positions: where the tokens stand, [seq] or [batch, seq] (None: 0, 1, ...).
                mask: an object whose attend(q, k, v, scale) is every layer's attention (None: the stock one, causal).

            Returns:
                A scalar, in float32 at least.
            """
            if not x.shape[1]:
                raise ValueError(
                    "llama: a sequence without tokens: stock attention cannot tell its heads. Give every rank some."
                )
            if len(x) == 0:  # stock attention cannot see the number of heads in a batch without rows
                x, y = x.new_zeros(1, x.shape[1]), y.new_full((1, y.shape[1]), self.loss.ignore_index)
            with _all_tokens_count(self.config):
                at = positions[None] if positions is not None and positions.dim() == 1 else positions
                return self.loss(self(input_ids=x, position_ids=at, who_sees_whom=mask).logits, y)

    return LlamaForCausalLM


@contextmanager
def _all_tokens_count(config: LlamaConfig) -> Iterator[None]:
    """Within it the stock model takes for granted that nothing is padded or packed, and causal attention needs no mask.

    It would look at positions to find that out, in every forward, and tensors without values could not tell.
    """
    stock: Any = config
    if stock._attn_implementation != "sdpa":
        yield  # attention that is spelled out needs its mask
        return
    stock._attn_implementation = UNMASKED
    try:
        yield
    finally:
        stock._attn_implementation = "sdpa"


@torch.no_grad()
def _draw(model: Any, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():  # a tied matrix comes once
        if p.dim() == 2:
            draw_(p, std, generator)
        elif name.endswith("bias"):
            p.zero_()
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        embedding.weight[embedding.padding_idx].zero_()
