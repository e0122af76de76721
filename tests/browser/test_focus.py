"""Keys go on working whatever was pressed before, fields say where the program stands, and headings what is so now."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from browser.opened import Opened
from canvas.reader import Reader, carried
from step.stepped import MESH, ring, training

import emu
from emu.stepping.keeping import recorded

pytestmark = pytest.mark.browser


@pytest.fixture
def page(watched, tmp_path):
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        s.save_html(tmp_path / "ring.html")
    return Opened(watched.page(), tmp_path / "ring.html")


def typed(page, *keys):
    """Presses keys where the focus is, which is not moved; where the stepper then stands."""
    for key in keys:
        page.page.keyboard.press(key)
    page.page.evaluate("emuStepper.idle()")
    return page.index


def field(page):
    return page.page.get_by_label("go to step", exact=True).input_value()


def test_keys_work_at_once_and_after_a_button_has_nothing_left_to_do(page):
    last = page.page.evaluate("emuStepper.known")
    assert typed(page, "ArrowRight") == 1  # nothing was clicked before
    for label, end, key, then in [
        ("to the end", last, "ArrowLeft", last - 1),
        ("to the beginning", 0, "ArrowRight", 1),
    ]:
        page.page.get_by_label(label, exact=True).click()
        assert page.index == end
        assert page.page.get_by_label(label, exact=True).get_attribute("aria-disabled") == "true"
        assert typed(page, "Enter") == end and typed(page, key) == then
    page.page.get_by_label("one step on", exact=True).focus()
    assert typed(page, *["Enter"] * (last + 2)) == last and typed(page, "b") == last - 1
    assert page.page.locator(".row.controls [aria-disabled]").count() == 0


def test_the_field_says_where_the_program_stands(page):
    last = page.page.evaluate("emuStepper.known")
    for written, index in [("99999", last), ("-1", 0), ("5", 5), ("1e2", last), ("", last), ("2", 2)]:
        typed(page, "g", "Control+A", *(written or ["Delete"]), "Enter")
        assert (page.index, field(page)) == (index, str(index)), written
        typed(page, "Escape")
    assert typed(page, "g", "Control+A", "7", "Escape") == 2 and field(page) == "2"
    assert typed(page, "n") == 3 and field(page) == "3"


def test_a_shut_part_says_nothing_of_another_step(page):
    page.do("end()")
    heads = page.page.locator(".walk .head .note, .tensors .head .note")
    page.press("c", "t")
    page.page.wait_for_function(
        "document.querySelector('#emu-canvas').firstElementChild.shadowRoot"
        ".querySelector('.tensors .head .note').textContent !== ''"
    )
    assert all(heads.all_inner_texts())
    page.press("c", "t", "Home", "ArrowDown")
    assert heads.all_inner_texts() == ["", ""]


def turns(rank):
    torch.ones(2) + 1
    raise ValueError("third \u202elun [der m13] \x1b[31m")


def test_a_name_cannot_turn_the_page_around(watched, tmp_path):
    with emu.step(turns, emu.Mesh(dp=2)) as s:
        s.save_html(tmp_path / "turns.html")
    page = Opened(watched.page(), tmp_path / "turns.html")
    page.do("end()")
    assert "third \\u202elun [der m13] \\x1b[31m" in page.status
    assert "\u202e" not in page.page.locator(".emu").inner_text()


def test_a_program_of_no_steps_has_an_axis(watched, tmp_path):
    with emu.step(lambda rank: None, emu.Mesh(dp=2)) as s:
        s.save_html(tmp_path / "nothing.html")
    pages = watched.page()
    pages.add_init_script(
        "window.written = []; const write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest)"
        " { window.written.push(text); return write.call(this, text, ...rest); };"
    )
    page = Opened(pages, tmp_path / "nothing.html")
    written = page.page.evaluate("window.written")
    assert "1.0" in written and not any("0.000" in text or "e-" in text for text in written)


TRIANGLE = """
window.lines = [];
const context = CanvasRenderingContext2D.prototype;
for (const name of ["lineTo", "fill"]) {
  const does = context[name];
  context[name] = function (...all) { window.lines.push([name, ...all]); return does.apply(this, all); };
}
"""


def test_the_cursor_stands_where_the_host_of_the_next_rank_does(watched, tmp_path):
    with emu.step(training, MESH) as s:
        reader = Reader(carried(recorded(s, tensors=False).whole()))
        s.save_html(tmp_path / "training.html")
    pages = watched.page()
    pages.add_init_script(TRIANGLE)
    page = Opened(pages, tmp_path / "training.html")
    places, times = [], []
    for index in range(0, page.page.evaluate("emuStepper.known"), 9):
        move = f"(async () => {{ window.lines = []; await emuStepper.goto({index}); return window.lines; }})()"
        found = page.page.evaluate(move)  # in one go: a page whose height has changed is drawn again later
        first = next(i for i, line in enumerate(found) if line[0] == "fill")  # the timeline is drawn first
        places.append(found[first - 1][1])
        host = reader.last("hosts", index, rank=page.shown([index])[0]["op"]["rank"])
        times.append(host["at_s"] if host else 0.0)
    slope, left = np.polyfit(times, places, 1)
    assert slope > 0 and len(set(times)) > 5
    assert np.allclose(slope * np.asarray(times) + left, places, atol=0.6)
