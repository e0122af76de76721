"""What a model must be like for its sequences to be cut: nothing in it may take a rank's tokens for the whole sequence."""

from __future__ import annotations

from inspect import signature
from typing import Any

from emu.parallel.context.cut import KINDS
from emu.spmd import PlanError

BY_LENGTH = (
    "dynamic",
    "longrope",
)  # rotary embeddings of transformers whose angles depend on the longest position seen


def check_kind(kind: object) -> None:
    """Raises a PlanError for what is no kind of context parallelism."""
    if kind not in KINDS:
        raise PlanError(
            f"there is no context={kind!r}", f"use one of {', '.join(KINDS)}", field="context", nearest="zigzag"
        )


def check_model(model: Any, ranks: int) -> None:
    """Raises a PlanError for a model that would compute something else of a part of a sequence.

    Args:
        ranks: over which sequences are cut.
    """
    what, config = type(model).__name__, getattr(model, "config", None)
    takes = signature(model.loss_sum).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if lacking := [name for name in ("positions", "mask") if name not in takes and not anything]:
        raise PlanError(
            f"{what}.loss_sum takes no {lacking[0]!r}: it would count positions from 0 on every rank, and attend to this rank's "
            "tokens alone",
            "let loss_sum(x, y, positions=None, mask=None) hand both to its layers, which call mask.attend(q, k, v, scale) where "
            "they attend",
            field="context",
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in BY_LENGTH:
        raise PlanError(
            f"{what}'s rotary angles ({rope.get('rope_type') or rope.get('type')}) depend on the length of a sequence, of which "
            "a rank has a part",
            "use another rope_type (default, linear, yarn, llama3), or leave cp out of the mesh",
            field="context",
        )
    how = getattr(config, "_attn_implementation", "sdpa")
    if how not in ("sdpa", None) and not str(how).startswith("sdpa"):
        raise PlanError(
            f"{what}'s attention is {how!r}, which attends to this rank's tokens alone",
            'make it with attn_implementation="sdpa"',
            field="context",
        )
    if ranks > 1:
        for name, module in model.named_modules():
            check_module(name or what, module)


def check_module(name: str, module: Any) -> None:
    """Raises a PlanError for a module that would compute something else of this rank's tokens."""
    rate = getattr(getattr(module, "dropout", None), "p", 0.0) if name.endswith(".core") else 0.0
    rate = rate or getattr(getattr(module, "config", None), "attention_dropout", 0.0)
    if rate:
        raise PlanError(
            f"{name} drops attention weights, which attention across ranks never writes",
            "make the model with attention_dropout=0.0, or leave cp out of the mesh",
            field="context",
        )
    if hasattr(module, "limit") and getattr(module, "factor", None) is not None:
        raise PlanError(
            f"{name} drops tokens that an expert has no room for in the order of their sequence, of which ranks along cp have "
            "parts out of order",
            "make the model without a capacity, or leave cp out of the mesh",
            field="capacity",
            nearest=None,
        )
    if hasattr(module, "over") and getattr(module, "coefficient", 1.0) and not hasattr(module, "others"):
        raise PlanError(
            f"{name} balances experts over this rank's tokens, and not over whole sequences",
            "share it out first: sharding = shard_model(model, rank); DataParallel(model, rank, ..., sharding=sharding)",
            field="context",
        )
