"""The data files that come with emu, as plain tables."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """TOML to plain tables, with the parser that this Python has."""
    try:
        import tomllib  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    return tomllib.loads(text)


def packaged(file: str) -> dict[str, Any]:
    """data/FILE.toml as it stands there."""
    return parse_toml((files("emu.hardware") / "data" / f"{file}.toml").read_text(encoding="utf-8"))
