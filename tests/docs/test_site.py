"""The site is built as a reader would build it: without a warning, without a network, and with nothing that is not so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "lessons" / "site"
ANYWHERE = re.compile(r"^(?:[a-z]+:)?//", re.I)
LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}
NO_LOADS = (
    "canonical",
    "next",
    "prev",
    "search",
    "index",
    "author",
    "copyright",
)  # relations of pages that fetch nothing
STYLE_LOADS = re.compile(r"""(?:@import\s+|url\(\s*)["']?(?!data:|#)([^"')\s]+)""")


def built(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The documented command, with warnings as errors; a proxy that is nobody stands for a missing network."""
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "HTTP", "HTTPS")}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *options, str(source), str(out)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True, timeout=1800, check=False
    )


class Page(HTMLParser):
    """What a page links to, loads, and may be linked to by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.scripts: list[str] = []
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._within = tag
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given and given.get("rel") not in NO_LOADS:
            self.loads.append(given[LOADS[tag]])
        if "style" in given:
            self.loads += STYLE_LOADS.findall(given["style"])

    def handle_data(self, data: str) -> None:
        if self._within == "style":
            self.loads += STYLE_LOADS.findall(data)
        elif self._within == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


def lost(out: Path) -> list[str]:
    """Links within the site, and files that pages load, that are not there."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in out.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in (*page.links, *page.loads):
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", target, re.I):
                continue
            to = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            if not to.exists() or (anchor and to in pages and unquote(anchor) not in pages[to].anchors):
                found.append(f"{path.relative_to(out)}: {link}")
    return found


def from_elsewhere(out: Path) -> list[str]:
    """What pages and styles would fetch over a network when they are opened: hyperlinks are not fetched."""
    found = []
    for path in out.rglob("*.html"):
        page = Page(path.read_text(encoding="utf-8"))
        found += [f"{path.name}: {load}" for load in page.loads if ANYWHERE.match(load)]
        found += [
            f"{path.name}: a script" for script in page.scripts if re.search(r"(?:import|fetch)\(?\s*['\"]http", script)
        ]
    for path in out.rglob("*.css"):
        found += [
            f"{path.name}: {load}" for load in STYLE_LOADS.findall(path.read_text("utf-8")) if ANYWHERE.match(load)
        ]
    return found


@pytest.mark.lessons
def test_the_site_is_built_whole_and_leads_nowhere_else(tmp_path):
    out = tmp_path / "site"
    done = built(SITE, out)
    assert done.returncode == 0, done.stderr[-4000:]
    assert lost(out) == []
    assert from_elsewhere(out) == []

    sources = {path.relative_to(SITE).with_suffix("") for kind in ("*.md", "*.lesson") for path in SITE.rglob(kind)}
    pages = {path.relative_to(out).with_suffix("") for path in out.rglob("*.html")}
    assert sources <= pages and not [page for page in pages - sources if page.parent.name == "examples"]
    assert {f"lessons/{path.stem}" for path in (ROOT / "lessons").glob("*.ipynb")} == {
        page.as_posix() for page in pages if page.parent.name == "lessons"
    }

    start = (out / "start.html").read_text(encoding="utf-8")
    assert "Two commands" in start and 'src="_images/step.png"' in start
    assert (out / "lessons" / "00_tour.html").read_text(encoding="utf-8").count("<img") >= 5  # stored outputs are shown
    deadlock = (out / "examples" / "deadlock.html").read_text(encoding="utf-8")
    assert "cell_output" in deadlock and "<img" in deadlock  # what a notebook draws is drawn
    ring = (out / "examples" / "ring.html").read_text(encoding="utf-8")
    assert ring.count("come 0, 1, 2, not yet 3") == 1  # what is stated and what came out is shown once
    assert 'src="../_images/stepper.png"' in ring and "output stream sentences" in ring
    assert (out / "examples" / "who_holds_what.html").read_text(encoding="utf-8").count("<img") >= 3
    text = "".join(path.read_text(encoding="utf-8") for path in out.rglob("*.html"))
    assert not re.search(rf"{re.escape(str(ROOT))}|{re.escape(str(Path.home()))}/", text)  # nothing of this machine
    assert (out / "searchindex.js").exists() and not list(SITE.rglob("*.ipynb"))  # nothing is written among the sources


@pytest.mark.lessons
def test_a_page_that_states_what_does_not_come_out_is_not_built(tmp_path):
    """Negative control, and that the right one is."""
    head = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# One\n\n```{code-cell} python\nprint(1 + 1)\n```\n"
    for stated, codes in (("2", {0}), ("3", {1, 2})):
        source = tmp_path / stated
        (source / "examples").mkdir(parents=True)
        (source / "index.md").write_text("# Start\n\n```{toctree}\nexamples/one\n```\n")
        (source / "examples" / "one.md").write_text(f"{head}\n```text\n{stated}\n```\n")
        done = built(source, tmp_path / f"out{stated}", "-c", str(SITE))
        assert done.returncode in codes, done.stderr[-2000:]
        assert ("does not put out what the page states" in done.stderr) == (stated == "3")


def test_lost_links_and_foreign_files_are_found(tmp_path):
    """Negative control."""
    (tmp_path / "a.html").write_text('<a href="b.html#x"></a><a href="#y"></a><a href="https://x.org">no load</a>')
    (tmp_path / "b.html").write_text('<h1 id="z"></h1><img src="no.png"><script src="https://x.org/a.js"></script>')
    (tmp_path / "c.css").write_text(
        "@import 'https://x.org/f.css'; p { background: url(//x.org/p.png) } q { src: url(f) }"
    )
    assert sorted(lost(tmp_path)) == ["a.html: #y", "a.html: b.html#x", "b.html: no.png"]
    assert sorted(from_elsewhere(tmp_path)) == [
        "b.html: https://x.org/a.js",
        "c.css: //x.org/p.png",
        "c.css: https://x.org/f.css",
    ]
    (tmp_path / "a.html").write_text('<a href="b.html#z"></a>')
    (tmp_path / "b.html").write_text('<h1 id="z"></h1>')
    (tmp_path / "c.css").unlink()
    assert not lost(tmp_path) and not from_elsewhere(tmp_path)
