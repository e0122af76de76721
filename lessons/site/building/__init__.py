"""What the site takes from elsewhere, as an extension of sphinx.

A line `% from NAME [ARGUMENT]` of a page is replaced by what the function of that name in `PARTS` writes: Markdown, made
from the code and the data while the site is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from building import api, commands, compared, constants, docstrings, hardware, readme, refusals, sentences, stacks

PARTS: dict[str, Callable[..., str]] = {
    "readme": readme.whole,
    "section": readme.section,
    "api": api.package,
    "more": api.more,
    "modules": api.modules,
    "commands": commands.all_of_them,
    "json": commands.all_keys,
    "refusals": refusals.all_refused,
    "links": hardware.links,
    "chips": hardware.chips,
    "nodes": hardware.nodes,
    "clusters": hardware.clusters,
    "fitted": hardware.fitted_constants,
    "constants": constants.tables,
    "stacks": stacks.tables,
}
_ASKED = re.compile(r"^% from (\w+)(?: (.+))?$", re.M)


def expanded(text: str, docname: str = "") -> str:
    """A page's text with its parts in it.

    Raises:
        KeyError: a part that nobody writes.
    """

    def written(asked: re.Match[str]) -> str:
        name, argument = asked.groups()
        part = PARTS[name](*([argument] if argument else []))
        return readme.linked(part, docname) if name in ("readme", "section") else part

    return _ASKED.sub(written, text)


def _expand(app: Any, docname: str, source: list[str]) -> None:
    source[0] = expanded(source[0], docname)


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", _expand)
    app.connect("autodoc-process-docstring", docstrings.convert)
    app.connect("doctree-read", compared.compare)
    app.connect("doctree-read", sentences.wrap)
    app.connect("env-before-read-docs", _read_all)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _read_all(app: Any, env: Any, docnames: list[str]) -> None:
    """Every page is read again: what it is made of may have changed where sphinx does not look."""
    docnames[:] = sorted(env.found_docs)
