"""The software stacks of emu/planner/closed/stacks.toml: what each does, and where that was read."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from building.hardware import HEADERS, source_of
from building.markdown import code, number, plain, table
from emu.hardware.packaged import parse_toml

CHOOSES = ("meaning", "like", "words", "also", "chips", "fsdp", "sources")  # which runs a stack is taken for


def entries() -> dict[str, dict[str, Any]]:
    """The stacks as they stand in the file, by name."""
    return parse_toml((files("emu.planner.closed") / "stacks.toml").read_text(encoding="utf-8"))


def facts(entry: dict[str, Any]) -> list[tuple[str, object, str]]:
    """What a stack says itself about what runs do: (name, value, source)."""
    sources = entry.get("sources", {})
    return [(name, value, source_of(sources, name)) for name, value in entry.items() if name not in CHOOSES]


def tables() -> str:
    """All stacks."""
    parts = []
    for name, entry in entries().items():
        like = f" Otherwise as `{entry['like']}`." if "like" in entry else ""
        rows = [(code(field), _value(value), plain(source)) for field, value, source in facts(entry)]
        parts += [f"## {name}", f"{plain(entry['meaning'])}.{like}", *([table(HEADERS, rows)] if rows else [])]
    return "\n\n".join(parts)


def _value(value: object) -> str:
    return plain(", ".join(map(str, value)) if isinstance(value, list) else number(value))
