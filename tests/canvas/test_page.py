"""The page: one file, no network, and whatever a program calls its things is text in it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from canvas.reader import Reader
from canvas.test_recorded_runs import as_run
from export.exported import HOSTILE, traces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from step.stepped import ring

import emu
from emu import EmuError
from emu.canvas import module, page, page_html, run_record
from emu.canvas.page import NoModule, embedded
from emu.cli import main
from emu.trace.events import Kernel, Mark
from emu.trace.trace import Trace

NAMES = (
    *(*HOSTILE, "<img src=x onerror=alert(1)>", "<!--", "]]>", "\u2028\u2029", "'\"&amp;"),
    *("\x00\x1b", "</SCRIPT >", "__proto__"),
)


class Elements(HTMLParser):
    """What a browser makes of a page: its elements with what stands in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("", {}, []))  # what follows is of nobody

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1][2].append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, "".join(data)) for name, attrs, data in self.found if name == tag]


def record_in(text: str) -> dict[str, Any]:
    scripts = Elements(text).of("script")
    assert [(attrs.get("type"), attrs.get("id")) for attrs, _ in scripts] == [
        ("application/json", "emu-record"),
        ("module", None),
    ]
    return json.loads(scripts[0][1])


def check_alone(text: str) -> None:
    """No script but its own may run, and nothing is asked of a network."""
    elements = Elements(text)
    policy = next(a["content"] for a, _ in elements.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    script = elements.of("script")[1][1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy and f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    for _, attrs, _ in elements.found:
        for name, value in attrs.items():
            assert not name.startswith("on")
            assert name not in ("src", "href", "srcset", "action") or (value or "").startswith("data:")


def named(name: str) -> Trace:
    events = [Mark(name), Kernel(name, name, "forward", 1, 8, name, (), name), Mark("end")]
    return Trace({"dp": 2}, {0: events, 1: list(events)})


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_kind_are_text(name):
    record = run_record(as_run(named(name))).whole()
    text = page_html(name, {**record, "title": name})
    found = record_in(text)
    assert found == record | {"title": name}
    assert name in found["strings"]
    check_alone(text.encode(errors="replace").decode())


@settings(max_examples=20)
@given(traces())
def test_a_page_of_any_trace_stands_alone(trace):
    record = run_record(as_run(trace)).whole()
    text = page_html("a page", record)
    assert record_in(text) == record
    check_alone(text)


@given(
    st.recursive(st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False), st.lists, max_leaves=20)
)
@example("</script><!--&")
def test_nothing_in_a_record_ends_the_element_that_it_stands_in(value):
    text = embedded({"value": value})
    assert json.loads(text) == {"value": value} and text.isascii()
    assert not any(sign in text for sign in "<>&")


def test_what_json_has_not_is_refused():
    with pytest.raises(ValueError):
        embedded({"value": float("nan")})


def written(folder: Any, monkeypatch: Any, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.js").write_text(text)
    monkeypatch.setattr(page, "SCRIPTS", folder)
    module.cache_clear()
    monkeypatch.setattr(page, "module", module)


@pytest.fixture
def fresh():
    yield
    module.cache_clear()


def test_modules_are_joined_each_after_what_it_needs(tmp_path, monkeypatch, fresh):
    entry = (
        'import { double, half as halved } from "./b.js";\nimport * as a from "./a.js";\nshow(double(a.one), halved);\n'
    )
    b = 'import {\n  one,\n} from "./a.js";\nconst inner = one;\nexport function double(x) { return x * 2 * inner; }\n'
    b += "const h = 0.5;\nexport { h as half };\n"
    written(tmp_path, monkeypatch, file=entry, b=b, a="const inner = 1;\nexport const one = inner;\n")
    text = module("file")
    assert "import" not in text and "export" not in text
    assert text.index("const $a = ") < text.index("const $b = ") < text.index("show(")
    assert text.count("const $a = ") == 1 and "return { double, half: h };" in text and "return { one };" in text
    assert "const { double, half: halved } = $b;" in text and "const a = $a;" in text


def test_a_widgets_default_export_stays(tmp_path, monkeypatch, fresh):
    written(
        tmp_path,
        monkeypatch,
        widget='import { f } from "./f.js";\nexport default { render: f };\n',
        f="export let f = 1;",
    )
    assert module("widget").rstrip().endswith("export default { render: f };")


@pytest.mark.parametrize(
    "files",
    [
        {"file": 'import { a } from "./gone.js";\n'},
        {
            "file": 'import { a } from "./a.js";\n',
            "a": 'import { b } from "./b.js";\n',
            "b": 'import { a } from "./a.js";\n',
        },
        {"file": "const x = '</script>';\n"},
        {"file": "import x from './other.js';\n"},
    ],
    ids=["missing", "circle", "ends the element", "imports in another way"],
)
def test_modules_that_cannot_be_joined_are_told(tmp_path, monkeypatch, fresh, files):
    written(tmp_path, monkeypatch, **files)
    with pytest.raises(NoModule):
        module("file")


def test_the_modules_that_emu_has_can_be_joined():
    for entry in ("file", "widget"):
        text = module(entry)
        assert not re.search(r"^\s*import\b", text, re.MULTILINE)
        assert len(re.findall(r"^export\b", text, re.MULTILINE)) == (entry == "widget")


def hostile(rank):
    names = {name: torch.ones(2) for name in NAMES}
    rank.mark("</script><script>alert(1)</script>")
    rank.group("dp").all_reduce(names["<!--"], name="<img src=x onerror=alert(1)>")
    raise ValueError("</pre><script>alert(2)</script>")


def test_a_steppers_file_steps_through_the_whole_program(tmp_path):
    path = tmp_path / "page.html"
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        s.next(3)
        looked_at: list[int] = []
        s.save_html(path, progress=looked_at.append)
        assert s.index == 3 and [p.name for p in tmp_path.iterdir()] == ["page.html"]
        text = path.read_text()
        check_alone(text)
        record = record_in(text)
        s.next(10**6)
        assert record["at"] == 3 and record["ended"] and record["known"] == len(s.history)
        assert looked_at == list(range(len(s.history) + 1))
        assert Reader(record).state(5) == s.at(5).state(times=False)
        assert record["title"] == "ring on dp=2, h100-8"
        shown = text[text.index("<noscript>") : text.index("</noscript>")]
        assert "<img alt=" in shown and "step 3 of" in shown


def test_a_steppers_file_has_hostile_names_as_text(tmp_path):
    path = tmp_path / "page.html"
    with emu.step(hostile, emu.Mesh(dp=2)) as s:
        with pytest.raises(ValueError):
            s.next(10**6)
        s.save_html(path)
        text = path.read_text()
        check_alone(text)
        record = record_in(text)
        assert record["error"]["message"] == str(s.error) and record["error"]["kind"] == "ValueError"
        assert any("<!--" in name for name in record["strings"])


def test_a_file_that_cannot_be_written_is_told_and_nothing_is_left(tmp_path):
    with (
        emu.step(ring, emu.Mesh(dp=2)) as s,
        pytest.raises(EmuError, match=r"cannot be written: No such file or directory\n"),
    ):
        s.save_html(tmp_path / "no" / "page.html")
    assert not list(tmp_path.iterdir())


def code_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


def test_emu_step_writes_the_page(tmp_path, capsys, monkeypatch):
    (tmp_path / "program.py").write_text(
        "import torch\n\ndef f(rank):\n    return rank.group('dp').all_reduce(torch.ones(3))\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("n 2\n"))
    page_file = tmp_path / "page.html"
    assert code_of("step", f"{tmp_path}/program.py:f", "--html", str(page_file)) == 0
    assert record_in(page_file.read_text())["at"] == 2
    same = ("step", f"{tmp_path}/program.py:f", "--html", str(page_file), "--picture", str(page_file))
    assert code_of(*same) == 2 and "named twice" in capsys.readouterr().err


def test_an_exported_run_has_the_page_above_its_pictures(tmp_path):
    from emu.export import run_page

    run = emu.launch(ring, emu.Mesh(dp=2))
    text = run_page(run)
    check_alone(text)
    assert record_in(text)["kind"] == "run"
    assert text.index('id="emu-canvas"') < text.index("<h2>Timeline</h2>") < text.index('id="emu-record"')


def test_a_run_of_very_many_events_has_its_pictures_alone(monkeypatch):
    from emu.export import html

    monkeypatch.setattr(html, "MOST_EVENTS", 3)
    text = html.run_page(emu.launch(ring, emu.Mesh(dp=2)))
    assert "emu-record" not in text and "more than a page can step through" in text and "<h2>Timeline</h2>" in text
