"""One HTML file that needs nothing else: pictures inside it, no network, readable on light and dark screens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from emu.view.style import png_data_uri
from emu.view.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 is a chapter, 3 a section."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """Paragraphs, parted by empty lines; plain text, never markup."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines shown as they are, e.g. the user's program or its message."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure with a caption, which also is its text for those who cannot see it."""

    figure: Figure
    caption: str = ""


Section = Heading | Text | Code | Picture | Table

STYLE = """:root { --ink: #222; --paper: #fff; --faint: #666; --line: #ddd; --shade: #f5f5f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181c; --faint: #a0a0a0; --line: #3a3d44; --shade: #22252b; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
       margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 1.6em 0 0.5em; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; padding: 8px; box-sizing: border-box; }
figcaption, small, caption { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
pre { background: var(--shade); padding: 0.8rem; border-radius: 6px; overflow-x: auto; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def _html(section: Section) -> str:
    if isinstance(section, Heading):
        level = min(max(section.level, 2), 6)
        return f"<h{level}>{escape(section.text)}</h{level}>"
    if isinstance(section, Text):
        paragraphs = [part for part in section.text.split("\n\n") if part.strip()]
        return "\n".join(f"<p>{escape(part.strip())}</p>" for part in paragraphs)
    if isinstance(section, Code):
        return f"<pre><code>{escape(section.text)}</code></pre>"
    if isinstance(section, Picture):
        caption = escape(section.caption)
        shown = f"<figcaption>{caption}</figcaption>" if caption else ""
        return f'<figure><img alt="{caption}" src="{png_data_uri(section.figure)}">{shown}</figure>'
    if isinstance(section, Table):
        return f'<div class="wide">{section.html()}</div>'
    raise TypeError(f"a report has no place for a {type(section).__name__}; use Heading, Text, Code, Picture or Table")


def report_html(title: str, sections: Iterable[Section]) -> str:
    """The report as one HTML page. Everything in it is escaped: names from a program cannot become markup.

    Raises:
        TypeError: a section that is none of Heading, Text, Code, Picture, Table.
    """
    return _PAGE.format(title=escape(title), style=STYLE, body=sections_html(sections))


def sections_html(sections: Iterable[Section]) -> str:
    """Sections as they stand in the page, for another page that has the same STYLE.

    Raises:
        TypeError: a section that is none of Heading, Text, Code, Picture, Table.
    """
    return "\n".join(map(_html, sections))


def write_report(path: str | os.PathLike[str], title: str, sections: Iterable[Section]) -> Path:
    """Writes a report, whole or not at all: what was at `path` stays if anything fails.

    Args:
        path: of the HTML file; its folder must exist.
        title: of the page.
        sections: Heading, Text, Code, Picture and Table, in order.

    Returns:
        The path written.

    Raises:
        TypeError: a section of another kind.
        OSError: the folder is missing, full or read-only.
    """
    target = Path(path)
    page = report_html(title, sections)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", suffix=".part", delete=False
    ) as file:
        try:
            file.write(page)
            file.close()
            # A temporary file is private; a report has the rights of any file the user makes.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(file.name, 0o666 & ~mask)
            os.replace(file.name, target)
        except BaseException:
            file.close()
            os.unlink(file.name)
            raise
    return target
