"""The pages that the commands write: `emu step --html` and `emu export --html`; what they show equals the trace."""

from __future__ import annotations

import io

import pytest
from browser.opened import Opened
from canvas.test_recorded_runs import order_of, replayed
from step.stepped import MESH, training

import emu
from emu.cli import main
from emu.trace.events import Kernel, Mark

pytestmark = pytest.mark.browser

PROGRAM = """
import torch

def step(rank):
    x = torch.full((3,), float(rank + 1))
    rank.mark("filled")
    return rank.group("dp").all_reduce(x, algorithm="ring") * 2
"""


def emu_(*argv):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, argv)])
    assert not ended.value.code


def test_emu_step_html(watched, tmp_path, monkeypatch):
    (tmp_path / "of_a_student.py").write_text(PROGRAM)
    monkeypatch.setattr("sys.stdin", io.StringIO("next 3\n"))
    emu_("step", f"{tmp_path}/of_a_student.py:step", "--mesh", "dp=2", "--html", tmp_path / "page.html")
    page = Opened(watched.page(), tmp_path / "page.html")
    assert page.press("Home") == 0
    page.press("u")
    page.page.keyboard.type("all_reduce")
    page.page.keyboard.press("Enter")
    page.do("idle()")
    assert "all_reduce" in page.status and "of_a_student.py:7" in page.status
    assert page.shown([page.index])[0]["ranks"][0]["mark"] == "filled"
    last = page.press("End")
    assert page.press("b", "b", "n", "n") == last and "The program has ended." in page.status


def test_emu_export_html(watched, tmp_path):
    run = emu.launch(training, MESH)
    run.save(tmp_path / "run.zip")
    emu_("export", tmp_path / "run.zip", "--html", tmp_path / "page.html")
    page, order = Opened(watched.page(), tmp_path / "page.html"), order_of(run)
    steps = sorted({*range(0, len(order), 29), len(order)})
    for index, state in zip(steps, page.shown(steps), strict=True):
        expected = replayed(run, order, index)
        assert state["known"] == len(order) and state["ended"] == (index == len(order))
        if not state["ended"]:
            rank, i = order[index]
            event, op = run.trace[rank][i], state["op"]
            assert op["rank"] == rank
            assert not isinstance(event, (Kernel, Mark)) or op["name"] == event.name
        for each in state["ranks"]:
            own = expected[each["rank"]]
            assert [each[key] for key in ("hbm", "peak_bytes", "mark")] == [
                own[key] for key in ("hbm", "peak_bytes", "mark")
            ]
            assert {stream["name"]: stream["given"] for stream in each["streams"]} == own["streams"]
            assert {work["work"]: work["waits_for"] for work in each["works"]} == own["works"]
    assert page.press("Home", "ArrowRight", "n") == 2
    assert page.press("End") == len(order)
    assert page.page.get_by_role("heading", name="Memory", exact=True).count()
