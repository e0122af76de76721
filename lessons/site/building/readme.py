"""The README as pages of the site: whole, or a section of it. Its text stays where it is; links are mended."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import relpath

ROOT = Path(__file__).resolve().parents[3]
SITE = "lessons/site"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def whole() -> str:
    """All of README.md."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """What stands below a heading of README.md, up to the next one of its level or above.

    Raises:
        ValueError: no such heading.
    """
    start = re.search(rf"^(#+) {re.escape(heading)}$\n", whole(), re.M)
    if start is None:
        raise ValueError(f"README.md has no heading {heading!r}")
    rest = whole()[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", _without_code(rest), re.M)
    return rest[: end.start()] if end else rest


def linked(text: str, docname: str) -> str:
    """README's text with links that hold in a page of the site.

    A picture is found where it lies; a lesson is its page; any other file of the repository has no page, so its name
    stands there without a link.
    """
    folder = f"{SITE}/{docname}".rpartition("/")[0]

    def mended(link: re.Match[str]) -> str:
        picture, label, target, anchor = link.groups()
        if picture:
            return f"![{label}]({relpath(target, folder)})"
        lesson = re.fullmatch(r"lessons/(\d\d_\w+)(?:\.ipynb|\.py)?", target)
        if lesson:
            return f"[{label}]({relpath(f'{SITE}/lessons/{lesson[1]}.lesson', folder)})"
        page = re.fullmatch(rf"{SITE}/(.+\.md)", target)
        if page:
            return f"[{label}]({relpath(target, folder)}{anchor or ''})"
        return label

    return _LINK.sub(mended, text)


def _without_code(text: str) -> str:
    """The same text, as long, with blocks of code blanked: `# a comment` in them is no heading."""
    return re.sub(r"^```.*?^```$", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.M | re.S)
