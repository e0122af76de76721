"""The stepper's widget, from Python's side: one index on both sides, and nothing is left when it is gone."""

from __future__ import annotations

import base64
import gc
import struct
import subprocess
import sys
import weakref
import zlib

import IPython.display
import nbformat
import pytest
from canvas.reader import Reader, carried
from ipywidgets import Widget
from nbconvert import HTMLExporter
from step.stepped import MESH, ring, steppers_threads, training

import emu
from emu.stepping import shown

VIEW = "application/vnd.jupyter.widget-view+json"


class Tab:
    """A view of a widget: what its JavaScript sends and hears."""

    def __init__(self, widget, monkeypatch, name="view"):
        self.widget, self.name, self.heard, self.asked = widget, name, [], 0
        send = widget.send

        def heard(content, buffers=None):
            self.heard.append(carried(content))
            send(content, buffers)

        monkeypatch.setattr(widget, "send", heard)

    def says(self, content):
        self.widget._handle_custom_msg(content, [])

    def ask(self, question):
        self.asked += 1
        self.says({"view": self.name, "id": f"{self.name}.{self.asked}", "ask": question})
        return next(m["answer"] for m in reversed(self.heard) if m.get("id") == f"{self.name}.{self.asked}")

    def sets(self, **state):
        """Traits that the page sets, as they come over the wire."""
        self.widget.set_state(state)


def widget_of(s):
    from emu.stepping.widget import widget_of

    return widget_of(s)


@pytest.fixture
def s():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        yield s


def test_what_a_cell_does_moves_the_widget_and_what_the_page_does_moves_the_stepper(s, monkeypatch):
    widget = widget_of(s)
    tab = Tab(widget, monkeypatch)
    tab.ask({"do": "record"})
    s.next(4)
    assert widget.index == 4
    tab.sets(index=2)
    assert s.index == widget.index == 2
    assert tab.ask({"do": "next", "n": 5})["index"] == s.index == widget.index == 7
    s.back(6)
    assert widget.index == 1


def test_the_page_hears_what_is_new_before_it_is_told_to_go_there(s, monkeypatch):
    widget = widget_of(s)
    tab = Tab(widget, monkeypatch)
    tab.ask({"do": "record"})
    known = []
    widget.observe(lambda change: known.append((change["new"], tab.heard[-1]["news"]["part"]["known"])), "index")
    s.next(3)
    s.next(2)
    assert known == [(3, 4), (5, 6)]


@pytest.mark.parametrize("index", [-1, 9, 10**6])
def test_a_page_cannot_set_the_index_to_what_is_not_known(s, index):
    widget = widget_of(s)
    s.next(3)
    widget.set_state({"index": index})
    assert s.index == widget.index == 3 and len(s.history) == 4


def test_two_views_agree(s, monkeypatch):
    widget = widget_of(s)
    assert widget_of(s) is widget
    first, second = Tab(widget, monkeypatch, "a"), Tab(widget, monkeypatch, "b")
    readers = [Reader(tab.ask({"do": "record"})["record"]) for tab in (first, second)]
    first.heard.clear()
    second.heard.clear()
    first.ask({"do": "next", "n": 4})
    second.ask({"do": "next", "n": 2})
    for tab, reader in zip((first, second), readers):
        for message in tab.heard:
            if "part" in message.get("news", ()):
                reader.join(message["news"]["part"])
        assert reader.state(s.index) == s.state(times=False)
    assert widget.index == 6


@pytest.mark.parametrize(
    "content", [None, 3, "next", [], {}, {"view": 1}, {"view": "a"}, {"view": "a", "id": 5}, {"id": "a"}]
)
def test_messages_that_are_none_are_let_be(s, monkeypatch, content):
    tab = Tab(widget_of(s), monkeypatch)
    tab.says(content)
    assert not tab.heard and s.index == 0
    tab.says({"view": "a", "id": "x", "ask": content})
    assert tab.heard[-1]["answer"]["error"]


def test_a_stepper_that_is_closed_says_so_and_leaves_no_thread(monkeypatch):
    s = emu.step(training, MESH)
    widget = widget_of(s)
    tab = Tab(widget, monkeypatch)
    tab.ask({"do": "record"})
    tab.ask({"do": "next", "n": 20})
    s.close()
    assert widget.closed and not steppers_threads()
    assert "closed" in tab.ask({"do": "next"})["error"]["message"]
    tab.sets(index=7)
    assert s.index == 7


@pytest.mark.parametrize("how", ["its own", "all"])
def test_a_widget_that_is_closed_closes_the_stepper_and_leaves_no_thread(how):
    s = emu.step(training, MESH).next(20)
    widget = widget_of(s)
    assert steppers_threads()
    widget.close() if how == "its own" else Widget.close_all()
    assert s.closed and not steppers_threads() and s.state()["index"] == 20
    assert widget_of(s) is not widget and widget_of(s).closed


def test_a_stepper_that_is_shown_and_then_looked_at_no_more_ends_with_its_name(monkeypatch):
    s = emu.step(ring, emu.Mesh(dp=3)).next(2)
    widget, gone = widget_of(s), weakref.ref(s)
    tab = Tab(widget, monkeypatch)
    tab.ask({"do": "record"})
    del s
    gc.collect()
    assert gone() is not None and tab.ask({"do": "next"})["index"] == 3  # somebody looks at it
    tab.says({"view": "view", "gone": True})
    monkeypatch.undo()
    gc.collect()
    assert gone() is None and not steppers_threads()
    assert widget.comm is None


def parts(png):
    """The chunks of a PNG file: (name, body); checks their sums."""
    at, found = 8, []
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        name, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", png, at + 8 + size)[0] == zlib.crc32(name + body)
        found.append((name, body))
        at += 12 + size
    return found


def test_it_is_a_widget_a_picture_and_text(s):
    bundle = s._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] == widget_of(s).model_id
    assert bundle["text/plain"] == repr(s)
    assert parts(base64.b64decode(bundle["image/png"]))[0][0] == b"IHDR"


def test_without_anywidget_it_is_a_picture_and_text(s, monkeypatch):
    monkeypatch.setattr(shown, "find_spec", lambda name: None)
    assert s._repr_mimebundle_().keys() == {"image/png", "text/plain"}
    with pytest.raises(NotImplementedError):  # so IPython shows the bundle
        s._ipython_display_()


def test_a_notebook_is_given_the_picture_by_itself_and_the_widget_that_knows_it(s, monkeypatch):
    outputs = []
    monkeypatch.setattr(IPython.display, "publish_display_data", outputs.append)
    s._ipython_display_()
    assert [sorted(each) for each in outputs] == [["image/png", "text/plain"], [VIEW, "text/plain"]]
    name, body = parts(base64.b64decode(outputs[0]["image/png"]))[1]
    assert (name, body) == (b"tEXt", b"Comment\0" + widget_of(s).mark.encode())
    assert outputs[1][VIEW]["model_id"] == widget_of(s).model_id
    assert outputs[0]["text/plain"] == repr(s)


def test_stepping_alone_imports_nothing_of_widgets():
    code = (
        "import sys, emu\n"
        "s = emu.step(lambda rank: None, emu.Mesh(dp=2)); repr(s); s.close()\n"
        "print([m for m in ('anywidget', 'ipywidgets', 'IPython', 'matplotlib') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[]"


@pytest.mark.parametrize("executed", [False, True])
def test_exported_to_html_it_is_its_picture(s, monkeypatch, executed):
    outputs = []
    monkeypatch.setattr(IPython.display, "publish_display_data", outputs.append)
    s._ipython_display_()
    shown = [nbformat.v4.new_output("display_data", data) for data in outputs]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("s", outputs=shown)])
    if executed:  # nbconvert --execute keeps what widgets know, though there is no kernel that they could ask
        state = {widget_of(s).model_id: {"model_name": "AnyModel", "model_module": "anywidget", "state": {}}}
        notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state}}
    html, _ = HTMLExporter().from_notebook_node(notebook)
    assert html.count(f"data:image/png;base64,{outputs[0]['image/png']}") == 1
    assert ("while its kernel runs" in html) != executed
