"""Writes emu/hardware/data/fitted.toml whole: every constant with its value, prior, width, and whether it was fitted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from emu.hardware import Constant

HEAD = """\
# Numbers that no data sheet gives: fitted to the layouts with sha256 mod 5 = 0 of the published runs, each held near its
# prior by its width (one standard deviation of its logarithm). Written by `python -m emu.validate.fit --write`.
# Those layouts do not tell a constant that is "not fitted": it stays at its prior.
"""
FAMILIES = {
    "gpu": "what all NVIDIA chips share",
    "a100": "A100, 40 and 80 GB",
    "h100": "H100, H200",
    "tpu": "TPUs",
    "omni-path": "Omni-Path of Jean Zay",
    "software": "what programs cost, whatever the chip",
}
STATES = {True: "; fitted; prior: ", False: "; not fitted; prior: "}
UNVERIFIED = "unverified: "


def text(constants: Mapping[str, tuple[Constant, bool]]) -> str:
    """The file's text.

    Args:
        constants: by name, each with whether it was fitted.
    """
    written, family = [HEAD], ""
    for name, (constant, fit) in constants.items():
        if name.split(".")[0] != family:
            family = name.split(".")[0]
            written.append(f"# {FAMILIES.get(family, family)}\n")
        written.append(
            f"[{name}]\nvalue = {constant.value!r}\nprior = {constant.prior!r}\nwidth = {constant.width!r}\n"
            f"source = {json.dumps(source(constant.source, fit), ensure_ascii=False)}\n"
        )
    return "\n".join(written)


def source(told: str, fit: bool) -> str:
    """A constant's source, saying whether it was fitted; what is neither fitted nor read anywhere is unverified."""
    told = told.removeprefix(UNVERIFIED)
    for state in STATES.values():
        told = told.replace(state, "; prior: ")
    meaning, _, prior = told.partition("; prior: ")
    told = f"{meaning}{STATES[fit]}{prior}"
    return told if fit or not prior.startswith("assumed") else UNVERIFIED + told


def write(constants: Mapping[str, tuple[Constant, bool]]) -> Path:
    """Writes the file where it is installed; returns its path."""
    path = Path(str(files("emu.hardware") / "data" / "fitted.toml"))
    path.write_text(text(constants), encoding="utf-8")
    return path
