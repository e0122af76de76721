"""The page: one HTML file that shows a record, alone, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "js"
_IMPORT = re.compile(r'^import\s+(\{[^}]*\}|\*\s+as\s+\w+)\s+from\s+"\./(\w+)\.js";?[ \t]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?(?:function\*?|const|let|class)\s+(\w+))", re.MULTILINE)
_LIST = re.compile(r"^export\s+\{([^}]*)\};?[ \t]*$", re.MULTILINE)


class NoModule(ValueError):
    """The JavaScript cannot be joined: a file is missing, imports itself in a circle, or cannot stand in a page."""


@lru_cache
def module(entry: str) -> str:
    """The page's JavaScript as one module that imports nothing.

    Every file that js/<entry>.js imports, and what those import, becomes a closure that returns what it exports, in an order in
    which each stands after what it needs; so names at the top of two files do not meet. The entry itself stands last, open.

    Args:
        entry: "file" (starts from the record in its page) or "widget" (anywidget's).

    Raises:
        NoModule: it cannot be joined.
    """
    closed: dict[str, str] = {}
    last = _joined(entry, (), closed)
    text = "\n".join([*closed.values(), last])
    for wrong in ("</script", "<!--"):
        if wrong in text.lower():
            raise NoModule(f"the JavaScript has {wrong!r} in it, at which a page's script would end")
    if re.search(r"^\s*import\b", text, re.MULTILINE):
        raise NoModule('an import is not of the form: import { a, b as c } from "./x.js";')
    return text


def _joined(name: str, above: tuple[str, ...], closed: dict[str, str]) -> str:
    """The text of one file with its imports replaced; what it imports is closed before."""
    if name in above:
        raise NoModule(f"{name}.js imports itself: {' -> '.join((*above, name))}")
    path = SCRIPTS / f"{name}.js"
    if not path.is_file():
        raise NoModule(f"there is no {path}")
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    for found in _IMPORT.finditer(text):
        of = found[2]
        if of not in closed:
            inner = _joined(of, (*above, name), closed)
            closed[of] = _closed(of, inner)
    return _IMPORT.sub(_taken, text)


def _taken(found: re.Match[str]) -> str:
    names, of = found[1], found[2]
    if names.startswith("*"):
        return f"const {names.split()[-1]} = ${of};"
    pairs = [re.sub(r"\s+as\s+", ": ", part.strip()) for part in names.strip("{}").split(",") if part.strip()]
    return f"const {{ {', '.join(pairs)} }} = ${of};"


def _closed(name: str, text: str) -> str:
    names = [found[2] for found in _EXPORT.finditer(text)]
    for found in _LIST.finditer(text):
        for part in filter(None, map(str.strip, found[1].split(","))):
            inner, _, outer = part.partition(" as ")
            names.append(f"{outer.strip()}: {inner.strip()}" if outer else part)
    text = _LIST.sub("", _EXPORT.sub(r"\1", text))
    return f"const ${name} = (() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();"


def embedded(record: dict[str, Any]) -> str:
    """A record as JSON that can stand in a page: no text in it ends the element that it stands in."""
    text = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{hash}'; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
#emu-canvas {{ margin: 1rem 0; }}
</style>
</head>
<body>
<h1>{title}</h1>
<div id="emu-canvas"></div>
{fallback}
{sections}
<script type="application/json" id="emu-record">{record}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def page_html(title: str, record: dict[str, Any], sections_html: str = "", fallback_html: str = "") -> str:
    """One HTML file with a record and all that shows it. It asks no network for anything, and may run no other script.

    Args:
        title: text, which is escaped.
        record: `Record.whole()`.
        sections_html: markup that stands below, with and without scripts.
        fallback_html: markup for readers whose browser runs no scripts.
    """
    from emu.trace.units import plain_text
    from emu.view.report import STYLE

    script = "\n" + module("file") + "\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    fallback = f"<noscript>{fallback_html}</noscript>" if fallback_html else ""
    return _PAGE.format(
        hash=digest,
        title=escape(plain_text(title.encode(errors="replace").decode())),
        style=STYLE,
        fallback=fallback,
        sections=sections_html,
        record=embedded(record),
        script=script,
    )
