"""Runs, timelines, memory and meshes show themselves in a notebook."""

from types import SimpleNamespace

import pytest

from emu.cost import Timeline
from emu.hardware import cluster
from emu.spmd import Mesh
from emu.trace.memory import Memory
from emu.view import attach
from emu.view.style import new_figure


class Run:
    def __init__(self, trace, mesh, timeline):
        self.trace, self.mesh, self.cluster = trace, mesh, timeline.cluster
        self.memory, self.metrics, self._timeline = Memory(trace), timeline.metrics(), timeline

    def timeline(self):
        return self._timeline


@pytest.fixture
def clean(monkeypatch):
    """The classes without their representations, put back afterwards."""
    for cls, name in ((Timeline, "_repr_png_"), (Memory, "_repr_png_"), (Mesh, "_repr_html_")):
        monkeypatch.setattr(cls, name, None, raising=False)
        monkeypatch.delattr(cls, name)
    monkeypatch.setattr(Run, "_repr_html_", None, raising=False)
    monkeypatch.delattr(Run, "_repr_html_")


def shown(make):
    timeline = make.priced()
    run = Run(timeline.trace, make.Mesh(dp=8), timeline)
    return timeline, run.memory, make.Mesh(dp=8, on=cluster("h100", nodes=1)), run


def test_without_attach_nothing_is_shown(clean, make):
    assert not any(hasattr(it, "_repr_png_") or hasattr(it, "_repr_html_") for it in shown(make))


def test_each_shows_itself_once(clean, make):
    attach(Run)
    timeline, memory, mesh, run = shown(make)
    for it in (timeline, memory):
        assert it._repr_png_().startswith(b"\x89PNG") and not hasattr(it, "_repr_html_")
    assert "dp=8 on h100-8" in mesh._repr_html_() and not hasattr(mesh, "_repr_png_")
    html = run._repr_html_()
    assert "step time" in html and html.count("data:image/png;base64,") == 3


def test_attaching_twice_changes_nothing(clean):
    attach(Run)
    first = [Timeline._repr_png_, Memory._repr_png_, Mesh._repr_html_, Run._repr_html_]
    attach(Run)
    attach()
    assert first == [Timeline._repr_png_, Memory._repr_png_, Mesh._repr_html_, Run._repr_html_]


def test_a_run_with_no_record_says_so(clean, make):
    attach(Run)
    empty = SimpleNamespace(mesh=make.Mesh(), cluster=SimpleNamespace(name="<b>"), trace=make.Trace({}, {}))
    assert "nothing was recorded" in Run._repr_html_(empty) and "<b>&lt;b&gt;" not in Run._repr_html_(empty)
    assert "&lt;b&gt;" in Run._repr_html_(empty)


def test_every_figure_shows_itself():
    assert new_figure(2, 1)._repr_png_().startswith(b"\x89PNG")
