"""One HTML file in a real browser, without a network: what is shown equals the trace; keys and buttons go forth and back."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import torch
from browser.opened import Opened, said, steps_of
from step.stepped import MESH, full, passes_on, ring, stuck, to_end, training, waits_in_a_circle, wrong
from torch import nn

import emu
from emu.canvas import page_html
from emu.stepping.keeping import recorded

pytestmark = pytest.mark.browser

PROGRAMS = {
    "a bit of everything": (training, MESH),
    "a ring": (ring, emu.Mesh(dp=3)),
    "messages down a line": (passes_on, emu.Mesh(pp=4)),
    "a rank that is stuck": (stuck, emu.Mesh(dp=2)),
    "a circle": (waits_in_a_circle, emu.Mesh(dp=2)),
    "out of memory": (full, emu.Mesh(dp=2)),
    "its own mistake": (wrong, emu.Mesh(dp=2)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of steppers that stand at their beginning, each written once."""
    files = {}

    def save(program, mesh):
        if program not in files:
            files[program] = tmp_path_factory.mktemp("saved") / f"{program.__name__}.html"
            with emu.step(program, mesh) as s:
                s.save_html(files[program])
        return files[program]

    return save


@pytest.fixture
def opened(watched, saved):
    """Opens the file of a program, and gives its page, and a stepper that has gone to the end."""
    with ExitStack() as stack:

        def open_file(program, mesh):
            page = Opened(watched.page(), saved(program, mesh))
            s = stack.enter_context(emu.step(program, mesh))
            try:
                to_end(s)
            except Exception as error:
                assert s.error is error
            return page, s

        yield open_file


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_shown_is_what_the_stepper_says(name, opened):
    page, s = opened(*PROGRAMS[name])
    assert page.index == 0
    assert page.shown(steps_of(s)) == steps_of_state(s, steps_of(s))


def steps_of_state(s, steps):
    return [said(s, index) for index in steps]


@pytest.mark.parametrize("table", ["memory", "standing", "streams", "steps"])
def test_control_a_record_that_is_late_by_a_step_is_found(table, watched, tmp_path):
    with emu.step(training, MESH) as s:
        record, steps = recorded(s, tensors=False), None
        column = record.tables[table].columns["rank" if table == "steps" else "step"]
        for i in range(len(column) // 2, len(column) // 2 + 8):
            column[i] = (column[i] + 1) % 4 if table == "steps" else column[i] + 1
        to_end(s)
        (tmp_path / "late.html").write_text(page_html("late", record.whole()))
        page = Opened(watched.page(), tmp_path / "late.html")
        steps = steps_of(s, 10**6)
        assert page.shown(steps) != steps_of_state(s, steps)


def test_keys_go_forth_and_back(opened):
    page, s = opened(training, MESH)
    last = len(s.history)
    assert page.press("ArrowRight") == 1 and "Step 1 of" in page.status
    assert page.press("n", "n", "ArrowRight") == 4
    assert page.press("b", "ArrowLeft") == 2
    assert page.press("Shift+ArrowRight", "Shift+ArrowRight") == 22
    assert page.press("Shift+ArrowLeft") == 12
    assert page.press("End") == last and "ended" in page.status
    assert page.press("ArrowRight") == last
    assert page.press("b") == last - 1
    assert page.press("Home") == 0 and page.press("b") == 0
    page.press("g")
    page.page.keyboard.press("Control+A")
    page.page.keyboard.type("57")
    page.page.keyboard.press("Enter")
    page.do("idle()")
    assert page.index == 57
    assert page.status == f"Step 57 of {last}. {words(s, 57)}"
    assert json.loads(json.dumps(page.shown([57])[0])) == said(s, 57)


def words(s, index):
    """The next step as the page says it, and the program's own line."""
    op = s.at(index).op
    inside = ", ".join(filter(None, (op.scope, op.phase)))
    parts = (f"Next: rank {op.rank}", op.label, op.detail, f"({inside})" if inside else "", f"at {op.line}")
    return " ".join([" ".join(filter(None, parts)) + ".", *op.code.split()])


@pytest.mark.parametrize(
    "what", ["all_reduce", "dp.all_reduce", "backward", "model.*", "stepped", "rank 3", "fused", "no such thing"]
)
def test_until_stands_where_the_stepper_stands(what, opened):
    page, s = opened(training, MESH)
    s.goto(3)
    page.do("goto(3)")
    page.press("u")
    page.page.keyboard.type(what)
    page.page.keyboard.press("Enter")
    page.do("idle()")
    try:
        assert page.index == s.until(what).index
    except emu.EmuError:
        assert page.index == 3 and what in page.alert


def test_buttons_do_what_keys_do(opened):
    page, s = opened(ring, emu.Mesh(dp=3))
    for label, index in [
        ("one step on", 1),
        ("one step on", 2),
        ("one step back", 1),
        ("to the end", s.index),
        ("to the beginning", 0),
    ]:
        page.page.get_by_label(label, exact=True).click()
        page.do("idle()")
        assert page.index == index
    page.page.get_by_label("step", exact=True).fill("5")
    page.do("idle()")
    assert page.index == 5


def test_keys_are_left_alone_where_text_is_written(opened):
    page, _ = opened(ring, emu.Mesh(dp=3))
    page.press("u")
    page.page.keyboard.type("nbnn")
    assert page.index == 0
    page.page.keyboard.press("Escape")
    assert page.press("n") == 1


def test_a_collective_hop_by_hop_shows_its_real_values(opened):
    page, s = opened(ring, emu.Mesh(dp=3))
    at = s.goto(0).until("all_reduce").index
    while not s.now.carried():
        s.next()
    page.do(f"goto({s.index})")
    walk, canvas = s.collective(), page.page.locator(".walk canvas")
    page.page.evaluate(KEEP_TEXT)
    page.press("c")
    for i, hop in enumerate(walk):
        page.page.evaluate("window.written = []")
        page.press("]")
        page.page.wait_for_timeout(400)  # a chunk glides
        says = page.page.locator(".walk .says").inner_text()
        assert says.startswith(f"hop {i + 1} of {len(walk)}: {hop.says}")
        label = canvas.get_attribute("aria-label")
        for move in hop.moves:
            assert f"rank {move.src} sends chunk {move.chunk} to rank {move.dst}, to {move.does}" in label
        written = " ".join(page.page.evaluate("window.written"))
        for held in hop.held.values():
            assert all(f"{value:g}" in written for value in held.tolist())
    page.press("[")
    assert page.page.locator(".walk .says").inner_text().startswith(f"hop {len(walk) - 1} of")
    assert at < s.index


KEEP_TEXT = """() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push(text);
    return write.call(this, text, ...rest);
  };
}"""


def test_tensors_with_their_values(opened):
    page, s = opened(ring, emu.Mesh(dp=3))
    s.goto(0).until("all_reduce")
    page.do(f"goto({s.index})")
    page.press("t")
    for rank in range(3):
        rows = page.page.locator(".tensors table.list tbody tr")
        found = [row.split("\t")[:3] for row in rows.all_inner_texts()]
        held = s.rank(rank).tensors()
        assert found == [[h.name, h.dtype, str(list(h.shape))] for h in held.values()]
        if not held:
            continue
        page.page.get_by_role("button", name="x", exact=True).click()
        cells = page.page.locator(".tensors table.numbers td").all_inner_texts()
        assert [float(cell) for cell in cells] == s.rank(rank).tensor("x").tolist()
        page.page.get_by_role("button", name="x", exact=True).click()
        page.press("ArrowDown")


HOSTILE = (
    "</script></title><img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    "${window.hacked=1}\u2028\ud83d&amp;"
)


def hostile(rank):
    model = nn.Module()
    model.register_parameter("weight<b>", nn.Parameter(torch.ones(2)))
    rank.watch(model, HOSTILE.replace(".", ""))
    rank.mark(HOSTILE)
    names = {HOSTILE: torch.ones(2) * rank}
    rank.group("dp").all_reduce(names[HOSTILE], name=HOSTILE)
    with rank.stream(HOSTILE.replace("\ud83d", "")), rank.kernel(HOSTILE.replace("\ud83d", "")):
        names[HOSTILE] * 2
    raise ValueError(HOSTILE)


def test_names_from_the_program_make_no_element_and_run_no_script(watched, tmp_path):
    hostile.__name__ = HOSTILE
    with emu.step(hostile, emu.Mesh(dp=2)) as s:
        s.save_html(tmp_path / "hostile.html")
        page = Opened(watched.page(), tmp_path / "hostile.html")
        page.press("t", "c", "?")
        for _ in range(page.page.evaluate("emuStepper.known") + 1):
            page.press("n")
            page.page.wait_for_timeout(10)
        assert "onerror" in page.status + page.page.locator(".emu").inner_text()
        counts = page.page.evaluate(
            "[document, document.querySelector('#emu-canvas').firstElementChild.shadowRoot].map((root) =>"
            " ['img', 'script', 'b', 'iframe', 'svg'].map((tag) => root.querySelectorAll(tag).length))"
        )
        assert counts == [[0, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
        assert page.page.evaluate("window.hacked") is None
        assert HOSTILE[:20] in page.page.title()
