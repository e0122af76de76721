"""Complaints about a cluster file, written for who wrote the file: where, which field, which value, what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .errors import HardwareError
from .places import File, in_words
from .schema import ClusterTable

# What a field of a given ending holds, most telling ending first.
_KINDS = (
    ("_bytes_per_s", "bytes per second, e.g. 450e9"),
    ("_bytes", 'bytes, e.g. 80e9 or "80GiB"'),
    ("_fraction", "a fraction, e.g. 0.8"),
    ("fraction", "a fraction, e.g. 0.8"),
    ("_s", "seconds, e.g. 3.4e-6"),
    ("_w", "watts"),
    ("year", "a year, e.g. 2022"),
    ("ports", "a whole number from 1"),
    ("racks", "a number of racks, e.g. 0.5"),
    ("kind", "text in quotes"),
    ("nodes", "a whole number from 1"),
    ("devices", "a whole number from 1"),
    ("_count", "a whole number from 1"),
    ("per_node", "a whole number from 1"),
    ("oversubscription", "a number from 1 (1 is none)"),
    ("name", "text in quotes"),
    ("protocols", "a [[table]] for each"),
    ("sources", "a table of texts"),
    ("fitted", 'texts, e.g. ["gpu", "h100"]'),
    ("tiled", "true or false"),
    ("overlap_loss", "a fraction, e.g. 0.2"),
    ("matmul_ends", "a number from 0"),
    ("attention_seq", "a number of keys"),
    ("power_exponent", "a number from 0"),
)


# What pydantic asks of a value, where its own words are for programmers.
_TYPES = {
    "model_type": "a table with its fields, [name] on a line of its own",
    "dict_type": 'a table of texts, e.g. { default = "my data sheet" }',
    "list_type": "a list in brackets",
    "int_type": "a whole number",
    "float_type": "a number without quotes",
    "string_type": "text in quotes",
    "finite_number": "a finite number",
}


def explain(e: ValidationError, file: File) -> HardwareError:
    """The first of pydantic's complaints, in our words; says how many more there are."""
    errors = e.errors()
    # An unknown name often explains a missing one (a slip of the pen), so it comes first.
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    more = f" ({len(errors) - 1} more to follow.)" if len(errors) > 1 else ""
    value = first["input"]
    if first["type"] == "missing":
        return file.error(field, f"{field} is missing.", _missing_hint(field) + more)
    if first["type"] == "extra_forbidden":
        said = "" if isinstance(value, Mapping) else f" = {in_words(value)}"
        return file.error(field, f"{field}{said} is not a field.", _unknown_hint(first["loc"]) + more, value)
    what = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    what = _TYPES.get(first["type"], what)
    what = what.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if isinstance(value, float) and not math.isfinite(value):
        what = "a finite number"
    elif isinstance(value, int) and first["type"] == "float_type":
        what = "a number below 1e308"
    what = what if first["type"] == "value_error" else f"it should be {what}"
    # 2.0 is no whole number, so it is shown as it is written.
    said = "a table" if isinstance(value, Mapping) else repr(value) if first["type"] == "int_type" else in_words(value)
    return file.error(field, f"{field} = {said} cannot be: {what}.", f"Give {_kind(field)}.{more}", value)


def check_sources(given: Mapping[str, Any], file: File, prefix: tuple[str, ...] = ()) -> None:
    """Raises HardwareError for a source of a field that its table does not have: its own would be missing."""
    for key, value in given.items():
        if key == "sources" and isinstance(value, Mapping):
            known = [name for name in _fields_at(prefix) if name != "sources"]
            for name in value:
                if name != "default" and name.split(".")[0] not in known:
                    field = ".".join((*prefix, key, name))
                    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
                    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known here: default, {', '.join(known)}."
                    raise file.error(field, f"{field} is the source of no field of its table.", hint, name)
        elif isinstance(value, Mapping):
            check_sources(value, file, (*prefix, key))


def _missing_hint(field: str) -> str:
    given = f"Give {field.rsplit('.', 1)[-1]} ({_kind(field)})"
    if field.count(".") == 0:
        return f'Describe it in a table [{field}], or start from a preset: chip = "h100".'
    return f'{given}, or start from a preset: chip = "h100", or like = "h100" in [chip].'


def _unknown_hint(loc: tuple[Any, ...]) -> str:
    known, name = _fields_at(loc[:-1]), str(loc[-1])
    elsewhere = sorted(f"[{path}]" if path else "the top" for path, fields in _tables(ClusterTable) if name in fields)
    if elsewhere and name not in ("name", "sources"):
        return f"A field of this name belongs into {' or '.join(elsewhere)}."
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known here: {', '.join(known)}."


def _tables(model: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every table that a file may have, by dotted path, with the names of its fields."""
    yield path, list(model.model_fields)
    for name, info in model.model_fields.items():
        for inner in (info.annotation, *get_args(info.annotation)):
            if _is_model(inner):
                yield from _tables(inner, f"{path}.{name}" if path else name)


def _kind(field: str) -> str:
    name = field.rsplit(".", 1)[-1]
    if "sources." in field:
        return "text in quotes"
    if any(part in ("sizes", "lanes") for part in field.split(".")):
        return "whole numbers from 1, e.g. [4, 4]"
    if field.startswith(("chip.sustained.", "chip.attention.")):
        return "a share of the peak, e.g. 0.7"
    if "_flops." in field:
        return "dense FLOP/s, e.g. 989e12"
    return next((kind for ending, kind in _KINDS if name.endswith(ending)), "a table with its fields")


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the table at a path."""
    model: Any = ClusterTable
    for part in loc:
        if part not in model.model_fields:  # the number of an item of a list, or no field at all
            continue
        annotation = model.model_fields[part].annotation
        model = next((a for a in (annotation, *get_args(annotation)) if _is_model(a)), model)
    return list(model.model_fields)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
