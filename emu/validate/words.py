"""What the words of published rows mean, and what rows leave out: the patterns of data/words.toml and data/assumed.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from emu.hardware.packaged import parse_toml


class Unclear(Exception):
    """Words that mean nothing here; the message says which and what could be meant."""


class Assumed(NamedTuple):
    """What is taken for a field that a row leaves out, and why; usual: because most runs have it, and no source says so."""

    value: Any
    why: str
    usual: bool = False


def meaning(table: str, text: str | None) -> str | None:
    """What a text means by a table of words.toml, e.g. meaning("recompute", "selective (op)") == "per-op".

    Returns None for a text that is not there, or that no pattern fits.
    """
    if text is None:
        return None
    return next((said for pattern, said in _words()[table].items() if re.search(pattern, text, re.IGNORECASE)), None)


def required(table: str, text: str) -> str:
    """As `meaning`, of a text that must mean something. Raises Unclear."""
    found = meaning(table, text)
    if found:
        return found
    known = sorted({said for said in _words()[table].values() if said})
    raise Unclear(f'{table} "{text:.60}" is none that emu prices; it can be {", ".join(known)}')


def assumed(field: str, source: str, model: str | None) -> Assumed | None:
    """What is taken where a row does not state a field: by its source, or a model of it, else by its model, else for all."""
    said = {"source": source, "model": model or ""}
    for table in ("sources", "models"):
        for rule in _assumptions()[table]:
            patterns = {key: rule[key] for key in said if key in rule}
            if field in rule and all(re.search(p, said[key], re.IGNORECASE) for key, p in patterns.items()):
                return Assumed(rule[field], rule["why"])
    every = _assumptions()["all"]
    return Assumed(every[field], every["why"][field], usual=True) if field in every else None


@cache
def _words() -> Mapping[str, Mapping[str, str]]:
    return parse_toml((files("emu.validate") / "data" / "words.toml").read_text(encoding="utf-8"))


@cache
def _assumptions() -> Mapping[str, Any]:
    return parse_toml((files("emu.validate") / "data" / "assumed.toml").read_text(encoding="utf-8"))
