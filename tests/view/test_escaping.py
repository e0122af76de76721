"""Names stay names in every page and every notebook: whatever a program calls a thing, the markup around it is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import emu
from emu.canvas import page_html, run_record
from emu.export import run_page
from emu.spmd import Deadlock, Grads, Layout, Shard
from emu.trace.events import Alloc, Collective, Free, Kernel, Mark
from emu.trace.trace import Trace
from emu.trace.units import plain_text
from emu.view import Code, Heading, Picture, Table, Text, attach, loss_figure, report_html, tables

attach()  # whichever of these tests runs first

NASTY = (
    *(
        "<script>alert(1)</script>",
        "</script>",
        "</td></table>",
        "-->",
        "<!--",
        "]]>",
        "<img src=x onerror=alert(1)>",
        "<?x",
    ),
    *(
        '"',
        "'",
        "`",
        "&",
        "&lt;",
        "&#60;",
        "&amp",
        "<",
        ">",
        "=",
        "{",
        "}",
        "{title}",
        "%s",
        "\\u003c",
        "</pre>",
        "</title>",
    ),
    *("\u2028", "\u202e", "\u2066", "\ufeff", "\0", "\x1b[31m", "\x07", "\r", "\ud800", "\udfff", "☃", "a", " "),
)
NAMES = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=3)), min_size=1, max_size=6).map(
    lambda parts: f"n{''.join(parts)}n".replace("\n", " ")  # an empty line parts paragraphs, and may
)
WORST = "n" + "".join(NASTY) + "n"
PLAIN = "plain"


class Page(HTMLParser):
    """The elements of a page in order, with all that they say but text; and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.structure: list[Any] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.structure.append((tag, [(name, "" if name == "alt" else value) for name, value in attrs]))

    def handle_endtag(self, tag: str) -> None:
        self.structure.append(f"/{tag}")

    def handle_comment(self, data: str) -> None:
        self.structure.append(("comment", data))

    def handle_decl(self, decl: str) -> None:
        self.structure.append(("declaration", decl))

    def handle_pi(self, data: str) -> None:
        self.structure.append(("instruction", data))

    def unknown_decl(self, data: str) -> None:
        self.structure.append(("unknown", data))

    def handle_data(self, data: str) -> None:
        self.text += data


def as_run(name: str) -> emu.Run:
    """A run all of whose names are this one."""
    rest = (8, (), "float32", "sum", "", -1, f"{name} stream", "default", 1, name)
    events = {
        rank: [
            Alloc(1, 8, "parameters", name),
            Mark(name),
            Kernel(name, name, "forward", 8, 8, "float32", (), name),
            Collective("all_reduce", name, (0, 1), 0, *rest),
            Free(1, 8, "parameters"),
        ]
        for rank in (0, 1)
    }
    where = replace(emu.cluster("h100-8"), name=name)
    return emu.Run(None, emu.Mesh(on=where, **{name: 2}), where, [name, name], Trace({name: 2}, events))


def deadlock(name: str) -> str:
    from emu.view.notebook import attach

    attach()
    error = Deadlock(name, name, waiting={0: [1], 1: [0]}, parts={})
    return error._repr_html_() or ""


def report(name: str) -> str:
    sections = [Heading(name), Text(name), Code(name), Picture(loss_figure({"loss": [1.0]}), name)]
    return report_html(name, [*sections, Table((name, name), [(name, name)], name, name)])


# What writes HTML, each from one name. Who adds a writer adds it here.
WRITERS: dict[str, Callable[[str], str]] = {
    "a table": lambda name: Table((name, "n"), [(name, name)], name, name, left=(0, 1)).html(),
    "metrics": lambda name: tables.metrics_table(as_run(name).metrics, name).html(),
    "a report": report,
    "a run": lambda name: as_run(name)._repr_html_(),
    "a trace": lambda name: as_run(name).trace._repr_html_(),
    "a mesh": lambda name: as_run(name).mesh._repr_html_(),
    "a cluster": lambda name: as_run(name).cluster._repr_html_(),
    "a summary": lambda name: as_run(name).cluster.summary()._repr_html_(),
    "a layout": lambda name: Layout({name: Shard(0)})._repr_html_(),
    "gradients": lambda name: Grads({name: torch.ones(2)}, {name: Layout({name: Shard(0)})})._repr_html_(),
    "a deadlock": deadlock,
    "a run's page": lambda name: run_page(as_run(name)),
    "the stepper's page": lambda name: page_html(name, run_record(as_run(name)).whole()),
}
_plain: dict[str, Page] = {}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """What pictures show is pixels: they are left out, with the time that they take."""
    for where in ("emu.view.style", "emu.view.report"):
        monkeypatch.setattr(f"{where}.png_data_uri", lambda *args, **kwargs: "data:image/png;base64,AA==")


@pytest.mark.parametrize("writer", WRITERS)
@given(name=NAMES)
@example(name=WORST)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_name_changes_no_markup_and_stays_as_it_is(writer, name):
    if writer not in _plain:
        _plain[writer] = Page(WRITERS[writer](PLAIN))
    html = WRITERS[writer](name)
    page, plain = Page(html), _plain[writer]
    assert page.structure == plain.structure
    shown = name.encode(errors="replace").decode()  # half a surrogate pair is no text
    told = plain_text(shown)  # what would turn text around is told instead
    assert name in page.text or shown in page.text or told in page.text


def test_every_writer_shows_the_name():
    """The negative control of the text: a writer that leaves names out would pass above."""
    assert [writer for writer, write in WRITERS.items() if PLAIN not in Page(write(PLAIN)).text] == []


@pytest.mark.parametrize("name", ["<b>", "</td>", "<!-- -->"])
def test_a_writer_that_does_not_escape_is_noticed(name):
    """The negative control of the markup."""
    assert Page(f"<p>{name}</p>").structure != Page(f"<p>{PLAIN}</p>").structure
