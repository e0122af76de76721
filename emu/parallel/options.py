"""Options of an optimizer's parameter groups as plain data, which comes back from JSON, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emu.spmd import EmuError

PLAIN = (int, float, str, bool, type(None))


def plain_option(value: Any, where: str) -> Any:
    """An option as plain data: a tuple and a tensor of one number are told from lists and numbers.

    Args:
        value: a number, a text, None, a tensor without dimensions, or lists and tuples of these.
        where: what to call it in messages.

    Raises:
        EmuError: anything else, which would be lost.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor) and not value.dim():
        number = None if value.is_meta else value.item()
        if not isinstance(number, complex):
            return {"tensor": number, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        items = [plain_option(item, where) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise EmuError(
        f"{where} is {what}, which cannot be saved",
        "give groups only numbers, texts, None, tensors of one number without dimensions, and lists and tuples of these; "
        "keep the rest outside of the optimizer",
    )


def option_of(saved: Any, now: Any = None) -> Any:
    """What `plain_option` made plain. Where there is a tensor now, that gets the number: others may hold on to it."""
    kind = saved.keys() if isinstance(saved, dict) else ()
    if "tuple" in kind or isinstance(saved, list):
        items = saved["tuple"] if isinstance(saved, dict) else saved
        old = now if isinstance(now, (list, tuple)) and len(now) == len(items) else [None] * len(items)
        made = [option_of(*pair) for pair in zip(items, old)]
        return tuple(made) if isinstance(saved, dict) else made
    number = saved["tensor"] if "tensor" in kind else saved
    if isinstance(now, Tensor) and not now.dim() and isinstance(number, (int, float)):
        with torch.no_grad():
            return now.fill_(number)
    return torch.tensor(number, dtype=getattr(torch, saved["dtype"])) if "tensor" in kind else number
