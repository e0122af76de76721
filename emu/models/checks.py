"""What makes a decoder impossible to build: each check names the field, the numbers and what to do."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, get_args

from emu.models.choices import Activation, BalanceOver, Norm, Positions, RouterOrder
from emu.models.routing import UnknownRouting, shares

if TYPE_CHECKING:
    from emu.models.config import Config


class ConfigError(ValueError):
    """A decoder that cannot be built.

    Args:
        field: the field of Config that is wrong.
        problem: what is wrong, with the numbers.
        hint: what to do about it.
    """

    def __init__(self, field: str, problem: str, hint: str):
        super().__init__(f"Config.{field}: {problem}. {hint}")
        self.field = field
        self.problem = problem
        self.hint = hint


def check_count(config: Config, field: str, least: int = 1) -> None:
    """Raises ConfigError unless the field is a whole number of at least `least`."""
    value = getattr(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            field, f"expected a whole number of at least {least}, got {value!r}", f"Write e.g. {field}=4."
        )


def check_width_divides(config: Config) -> None:
    """Raises ConfigError unless the width can be cut into heads."""
    if config.width % config.heads:
        near = max(1, round(config.width / config.heads)) * config.heads
        raise ConfigError(
            "heads",
            f"width {config.width} cannot be cut into {config.heads} heads of equal size",
            f"Use width={near}, or say how large a head is with head_dim=.",
        )


def check(config: Config) -> None:
    """Raises ConfigError for the first field that is wrong; the fields that follow from others are filled in."""
    for field in ("kv_heads", "head_dim", "ffn", "vocab", "seq"):
        check_count(config, field)
    _check_heads(config)
    _check_choice(config, "positions", get_args(Positions))
    _check_choice(config, "norm", get_args(Norm))
    _check_choice(config, "activation", get_args(Activation))
    _check_numbers(config)
    if config.positions == "rotary" and config.head_dim % 2:
        raise ConfigError(
            "head_dim",
            f"rotary positions turn pairs of numbers, but head_dim is {config.head_dim}, which is odd",
            f'Use head_dim={config.head_dim + 1}, or positions="learned".',
        )
    if config.fused and config.attention_dropout:
        raise ConfigError(
            "attention_dropout",
            f"is {config.attention_dropout!r}, but fused attention never writes its weights to memory, so none can be dropped",
            "Use fused=False to have attention spelled out, or attention_dropout=0.0.",
        )
    end = config.document_end
    if end is not None and (isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < config.vocab):
        raise ConfigError(
            "document_end",
            f"is {end!r}, which is no token of a vocabulary of {config.vocab}",
            f"Use a number from 0 to {config.vocab - 1}, or None where sequences are not packed.",
        )
    _check_experts(config)


def _check_heads(config: Config) -> None:
    if config.heads % config.kv_heads:
        fitting = [n for n in range(1, config.heads + 1) if config.heads % n == 0]
        raise ConfigError(
            "kv_heads",
            f"every key and value head serves the same number of query heads, but {config.heads} heads cannot be "
            f"shared out evenly over {config.kv_heads}",
            f"Use a divisor of heads: one of {fitting}.",
        )


def _check_choice(config: Config, field: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, field)
    if value not in choices:
        near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.3)
        meant = f' Did you mean "{near[0]}"?' if near else ""
        listed = " or ".join(f'"{choice}"' for choice in choices)
        raise ConfigError(field, f"there is no {value!r}", f"Use {listed}.{meant}")


def _check_number(config: Config, field: str) -> None:
    value = getattr(config, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(field, f"expected a number, got {value!r}", f"Write e.g. {field}=0.1.")


def _check_numbers(config: Config) -> None:
    for field in ("bias", "tied", "fused", "renormalize"):
        if not isinstance(getattr(config, field), bool):
            raise ConfigError(field, f"expected True or False, got {getattr(config, field)!r}", f"Write {field}=True.")
    for field in ("dropout", "attention_dropout", "label_smoothing", "rope_base", "norm_eps", "balance"):
        _check_number(config, field)
    for field in ("dropout", "attention_dropout"):
        if not 0 <= getattr(config, field) < 1:
            raise ConfigError(
                field,
                f"a probability of at least 0 and below 1 is needed, got {getattr(config, field)!r}",
                f"Write {field}=0.1 to drop a tenth; at 1 nothing would be left.",
            )
    if not 0 <= config.label_smoothing <= 1:
        raise ConfigError(
            "label_smoothing",
            f"needs a number from 0 to 1, got {config.label_smoothing!r}",
            "Write label_smoothing=0.1 to spread a tenth of each label over the whole vocabulary.",
        )
    if not 1 < config.rope_base < float("inf"):
        raise ConfigError("rope_base", f"needs a finite number above 1, got {config.rope_base!r}", "10000.0 is usual.")
    if not 0 < config.norm_eps < float("inf"):
        raise ConfigError("norm_eps", f"needs a finite number above 0, got {config.norm_eps!r}", "1e-5 is usual.")


def _check_experts(config: Config) -> None:
    check_count(config, "experts", least=0)
    check_count(config, "top_k")
    check_count(config, "shared_ffn", least=0)
    _check_choice(config, "router", get_args(RouterOrder))
    _check_choice(config, "balance_over", get_args(BalanceOver))
    if not 0 <= config.balance < float("inf"):
        raise ConfigError(
            "balance", f"needs a finite number of at least 0, got {config.balance!r}", "0.01 is usual; 0.0 is none."
        )
    if config.capacity is not None:
        _check_number(config, "capacity")
        if not 0 < config.capacity < float("inf"):
            raise ConfigError(
                "capacity",
                f"needs a finite factor above 0, got {config.capacity!r}",
                "1.25 leaves each expert a quarter more room than an even share; None drops nothing.",
            )
    if config.routing is not None:
        try:
            shares(config.routing, max(config.experts, 1))
        except UnknownRouting as wrong:
            raise ConfigError("routing", wrong.problem, wrong.hint) from None
    if not config.experts:
        for field, none in (("shared_ffn", 0), ("balance", 0.0), ("capacity", None)):
            if getattr(config, field) != none:
                raise ConfigError(
                    field,
                    f"is {getattr(config, field)!r}, but experts is 0: this model is dense and has no router",
                    f"Say how many experts each block has, e.g. experts=8, or leave {field} out.",
                )
        return
    if config.top_k > config.experts:
        raise ConfigError(
            "top_k",
            f"each token goes to {config.top_k} different experts, but there are only {config.experts}",
            f"Use at most top_k={config.experts}.",
        )
    if config.top_k == 1 < config.experts and (config.router == "topk-softmax" or config.renormalize):
        raise ConfigError(
            "top_k",
            "the weights of one chosen expert, divided by their own sum, are always 1, so the router would get no "
            "gradient from the loss",
            'With top_k=1 use router="softmax-topk" and renormalize=False, as the Switch Transformer does.',
        )
