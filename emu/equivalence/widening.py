"""The float64 tier's arithmetic: whatever real numbers a program asks for, they are float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emu.equivalence.exact import WIDER
from emu.equivalence.exact_rules import rule_of
from emu.spmd import EmuError


class Float64Mode(TorchDispatchMode):
    """While it is active in a thread, torch computes in float64, also on float32 data that was made outside.

    Raises:
        EmuError: a narrower tensor from outside is written to or trained.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_of(func)
        if rule.kind == "view":  # a copy would lose later writes
            return func(*args, **kwargs)
        if kwargs.get("dtype") in WIDER:
            kwargs = {**kwargs, "dtype": WIDER[kwargs["dtype"]]}
        args = [a if i in rule.writes and not _narrow(a) else _wide(a, i in rule.writes) for i, a in enumerate(args)]
        kwargs = {name: value if name in rule.writes else _wide(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        return out if rule.writes else _results(out)


def _narrow(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in WIDER and x.dtype != WIDER[x.dtype]


def _wide(x: Any, written: bool = False) -> Any:
    if isinstance(x, (list, tuple)):
        return [_wide(y, written) for y in x]
    if not _narrow(x):
        return x
    if written or (x.requires_grad and torch.is_grad_enabled()):
        raise EmuError(
            f"a {x.dtype} tensor of shape {tuple(x.shape)} was made outside of the program and is "
            f"{'written to' if written else 'trained'} in it: in tier float64 it would lose digits",
            "make it inside the program and without a dtype; the tier chooses it",
        )
    return x.to(WIDER[x.dtype])


def _results(out: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return type(out)(map(_results, out)) if not hasattr(out, "_fields") else out
    return out.to(WIDER[out.dtype]) if _narrow(out) else out
