"""Precision by role: in which dtype parameters, gradients, reductions and optimizer states are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import cast

import torch

from emu.spmd.errors import EmuError

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def as_dtype(value: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or its name, e.g. "bf16".

    Raises:
        EmuError: not a floating dtype that emu knows; lists those it does.
    """
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in DTYPES:
        return DTYPES[value.removeprefix("torch.")]
    raise EmuError(f"{value!r} is not a floating point dtype", f"use one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Precision:
    """The dtype of every role; each a torch dtype or its name."""

    param: torch.dtype | str = torch.float32
    grad: torch.dtype | str = torch.float32
    reduce: torch.dtype | str = torch.float32
    master: torch.dtype | str = torch.float32
    moments: torch.dtype | str = torch.float32
    activations: torch.dtype | str = torch.float32

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, as_dtype(getattr(self, f.name)))

    @staticmethod
    def preset(name: str | Precision) -> Precision:
        """A preset by name: "bf16-mixed", "fp32" or "fp16-scaled"; a Precision passes through.

        Raises:
            EmuError: no such preset.
        """
        if isinstance(name, Precision):
            return name
        if name not in PRESETS:
            raise EmuError(f"there is no precision {name!r}", f"use one of {', '.join(PRESETS)}, or emu.Precision(...)")
        return PRESETS[name]


PRESETS = {
    "fp32": Precision(),
    "bf16-mixed": Precision(param="bf16", grad="bf16", activations="bf16"),
    "fp16-scaled": Precision(param="fp16", grad="fp16", activations="fp16"),
}


@contextmanager
def as_default_dtype(roles: Precision | None) -> Iterator[None]:
    """While it lasts, tensors made without a dtype take that of parameters; None leaves torch's default."""
    before = torch.get_default_dtype()
    if roles is not None:
        torch.set_default_dtype(cast(torch.dtype, roles.param))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
