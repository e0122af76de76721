"""A report is one file that needs nothing else, obeys no name, and is written whole or not at all."""

import re
from html.parser import HTMLParser

import pytest

from emu.view import Code, Heading, Picture, Table, Text, loss_figure, report_html, write_report

HOSTILE = "</code></p><script>alert('x')</script><img src=x onerror=alert(1)> & \"'"


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.text, self.handlers = [], [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.text += data


def sections(word="fine"):
    return [
        Heading(word),
        Text(f"{word}\n\n{word}"),
        Code(word),
        Picture(loss_figure({word: [2.0, 1.0]}), word),
        Table((word, "n"), [(word, "1")], word, word),
    ]


def reaches_out(html):
    page = Page(html)
    inside = [address for address in page.addresses if not address.startswith("data:image/png;base64,")]
    return inside + re.findall(r"url\(|@import|https?://", html)


def test_every_section_is_in_the_page():
    page = Page(report_html("title", sections("needle")))
    assert page.tags.count("p") >= 2 and page.tags.count("img") == 1 and page.tags.count("table") == 1
    assert page.text.count("needle") >= 8


def test_it_needs_no_other_file_and_no_network():
    assert reaches_out(report_html("title", sections())) == []
    assert "script" not in Page(report_html("title", sections())).tags


def test_a_reference_to_the_network_would_be_noticed():
    assert reaches_out('<img src="https://example.org/x.png">')
    assert reaches_out('<style>body { background: url(x.png) }</style><a href="other.html">')


def test_hostile_names_stay_text():
    page = Page(report_html(HOSTILE, sections(HOSTILE)))
    assert "script" not in page.tags and page.tags.count("img") == 1 and not page.handlers
    assert HOSTILE in page.text


def test_it_is_readable_on_light_and_dark_screens():
    html = report_html("title", [])
    assert "prefers-color-scheme: dark" in html and 'content="light dark"' in html


def test_the_file_is_what_the_page_is(tmp_path):
    path = write_report(tmp_path / "report.html", "title µ", sections())
    assert path.read_text(encoding="utf-8") == report_html("title µ", sections())
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]


class Breaks:
    def savefig(self, *args, **kwargs):
        raise RuntimeError("cannot be drawn")


@pytest.mark.parametrize("bad", [Picture(Breaks()), "no section at all"])
def test_a_section_that_fails_leaves_the_old_file(tmp_path, bad):
    path = write_report(tmp_path / "report.html", "old", sections())
    old = path.read_bytes()
    with pytest.raises((RuntimeError, TypeError)):
        write_report(path, "new", [*sections(), bad])
    assert path.read_bytes() == old
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]


def test_a_write_that_fails_leaves_the_old_file_and_no_scraps(tmp_path, monkeypatch):
    path = write_report(tmp_path / "report.html", "old", [])
    old = path.read_bytes()

    def fails(*args):
        raise OSError("disk full")

    monkeypatch.setattr("emu.view.report.os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_report(path, "new", [])
    assert path.read_bytes() == old
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]


def test_a_section_that_works_replaces_the_old_file(tmp_path):
    path = write_report(tmp_path / "report.html", "old", [])
    write_report(path, "new", [])
    assert "<h1>new</h1>" in path.read_text()


def test_an_unknown_section_is_refused_by_name():
    with pytest.raises(TypeError, match="no place for a int; use Heading"):
        report_html("title", [3])
