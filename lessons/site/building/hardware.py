"""The numbers of hardware, each with its source: what emu/hardware/data holds, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from building.markdown import code, number, plain, table
from emu.hardware import fitted
from emu.hardware.constants import Constant
from emu.hardware.presets import preset_tables

NO_NUMBERS = ("name", "fitted", "link", "like", "chip", "topology", "kind", "sources")  # words: they need no source
HEADERS = ("number", "value", "where it is from")


def source_of(sources: Mapping[str, str], name: str) -> str:
    """The source of a number: its own, its table's, or that of all; "" if there is none.

    Args:
        sources: a table `sources`; name: of the number, "peak_flops.bfloat16".
    """
    return next((sources[key] for key in (name, name.partition(".")[0], "default") if key in sources), "")


def numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Every number of an entry: (dotted name, value, source)."""
    sources = entry.get("sources", {})
    for name, value in entry.items():
        if name in NO_NUMBERS:
            continue
        if isinstance(value, Mapping) and "sources" in value:
            yield from ((f"{name}.{inner}", v, source) for inner, v, source in numbers(value))
        elif isinstance(value, Mapping) and "kind" not in value:
            for key, each in value.items():
                yield f"{name}.{key}", each, source_of(sources, f"{name}.{key}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for each in value:
                for key, inner in each.items():
                    if key != "name":
                        yield f"{name}.{each['name']}.{key}", inner, source_of(sources, name)
        else:
            yield name, value, source_of(sources, name)


def entries(file: str) -> dict[str, dict[str, Any]]:
    """Tables of a data file, with what the constants of their families give them, and their rules."""
    return dict(preset_tables(file))


def links() -> str:
    """Kinds of links."""
    return _sections("links")


def chips() -> str:
    """All chips."""
    return _sections("chips")


def nodes() -> str:
    """A node of each chip, and the host."""
    return _sections("nodes")


def clusters() -> str:
    """Clusters that are described as a whole."""
    return _sections("clusters")


def fitted_constants() -> str:
    """Constants that were fitted, with what they were taken to be before."""
    families: dict[str, list[tuple[str, Constant]]] = {}
    for name, constant in fitted().items():
        families.setdefault(name.partition(".")[0], []).append((name, constant))
    parts = []
    for family, constants in families.items():
        rows = [
            (code(name), number(c.value), number(c.prior), f"{c.width:.0%}", plain(c.source)) for name, c in constants
        ]
        parts += [
            f"## {family}",
            table(("constant", "value", "prior", "width", "meaning, and where the prior is from"), rows),
        ]
    return "\n\n".join(parts)


def _sections(file: str) -> str:
    parts = []
    for key, entry in entries(file).items():
        said = ", ".join(str(entry[word]) for word in ("name", "chip", "topology") if word in entry)
        rows = [(code(name), _value(value), plain(source)) for name, value, source in numbers(entry)]
        parts += [f"## {key}", *([plain(said)] if said else []), table(HEADERS, rows)]
    return "\n\n".join(parts)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return plain(", ".join(f"{key} {number(each)}" for key, each in value.items()))
    return plain(number(value))
