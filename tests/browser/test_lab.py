"""The widget in JupyterLab, in a real browser without a network: keys move the stepper in Python, and cells move the widget."""

from __future__ import annotations

import urllib.request

import pytest
from browser.conftest import Watched
from browser.lab import Lab, Notebook

pytestmark = pytest.mark.browser

PROGRAM = """
import hashlib, threading, torch, emu

def program(rank):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * (rank + 1)
    y = rank.group("dp").all_reduce(x, algorithm="ring", name="sum of x")
    z = (y + 1) * torch.rand(5)
    if rank == 2:
        raise ValueError("of my own <b>making</b>")
    return z

def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(("emu ", "rank "))]

def bits():
    held = [(r, n, s.rank(r).tensor(n)) for r in range(3) for n in s.rank(r).tensors()]
    return hashlib.sha256(repr([(r, n, t.tolist()) for r, n, t in held]).encode()).hexdigest(), len(held)

s = emu.step(program, emu.Mesh(dp=3))
s
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture
def browser(chromium):
    """A context that may ask this computer alone; nothing that runs in it may fail."""
    watched = Watched(chromium, viewport={"width": 1200, "height": 1400})
    yield watched
    watched.context.close()
    assert not watched.left and not watched.errors


@pytest.fixture
def notebook(lab, browser, request):
    """A notebook whose first cell shows a stepper."""

    def open_notebook(*cells):
        name = f"{request.node.name}.ipynb"
        lab.write(name, [PROGRAM, *cells])
        notebook = Notebook(lab, browser.page(), name)
        notebook.run(0)
        notebook.says(0, "Step 0 of")
        return notebook

    return open_notebook


def test_forth_and_back_on_both_sides(notebook):
    notebook = notebook(
        "s.index",
        "s.next(4).index",
        "s.goto(8); print(*bits())",
        "s.close(); print(s.index, threads())",
        "s",
    )
    assert notebook.pictures(0) == [False]  # the widget stands in its place
    notebook.press(0, "ArrowRight", "n", "n", "b")
    notebook.says(0, "Step 2 of 4 known so far.")
    assert notebook.run(1) == "2"
    assert notebook.run(2) == "6"
    notebook.says(0, "Step 6 of 7 known so far.")

    before = notebook.run(3)
    notebook.says(0, "Step 8 of 9 known so far.")
    assert before.split()[1] != "0"
    notebook.press(0, "Home")
    notebook.says(0, "Step 0 of 9")
    notebook.press(0, "Shift+ArrowRight")
    notebook.says(0, "Step 10 of")
    notebook.press(0, "b", "b")
    notebook.says(0, "Step 8 of")
    assert notebook.run(1) == "8"
    assert notebook.run(3) == before  # the same bits, there again

    notebook.press(0, "u")
    notebook.page.keyboard.type("rank 2")
    notebook.page.keyboard.press("Enter")
    notebook.says(0, "Next: rank 2")

    notebook.run(5)  # a second view of the same stepper
    words = notebook.stepper(0).locator(".status").inner_text()
    notebook.says(5, words)
    notebook.press(5, "Home", "n", "n", "n")
    notebook.says(5, "Step 3 of")
    notebook.says(0, "Step 3 of")

    assert notebook.run(4) == "3 []"  # closed halfway: no thread is left
    for i in (0, 5):
        notebook.stepper(i).locator(".alert", has_text="the stepper was closed").wait_for()
    notebook.press(0, "b")
    notebook.says(0, "Step 2 of")  # what was seen can still be looked at


def test_what_the_program_raises_is_shown_as_text_and_tensors_have_their_values(notebook):
    notebook = notebook("s.error, s.index, threads()", "s.goto(2); print(s.rank(0).tensor('x').tolist())")
    stepper = notebook.stepper(0)
    notebook.press(0, "End")
    notebook.says(0, "Ended by ValueError: of my own <b>making</b>")
    assert "ValueError" in notebook.run(1)
    notebook.press(0, "c")
    stepper.locator(".walk .says", has_text="before the first of").wait_for()
    notebook.press(0, "]")
    stepper.locator(".walk .says", has_text="hop 1 of").wait_for()
    notebook.press(0, "c")

    values = notebook.run(2)
    notebook.says(0, "Step 2 of")
    notebook.press(0, "t")
    stepper.get_by_role("button", name="x", exact=True).click()
    stepper.locator("table.numbers").wait_for()
    cells = stepper.locator("table.numbers td").all_inner_texts()
    assert [float(cell) for cell in cells] == eval(values, {}) == [1.0, 2.0, 3.0, 4.0, 5.0]

    notebook.press(0, "u")
    notebook.page.keyboard.type("__import__('os')")
    notebook.page.keyboard.press("Enter")
    stepper.locator(".alert", has_text="__import__").wait_for()
    assert stepper.locator("b, img, script").count() == 0


def test_without_its_kernel_what_was_seen_stays_and_opened_again_it_is_the_picture(notebook, lab, browser):
    notebook = notebook("s.next(3); 1")
    notebook.run(1)
    notebook.says(0, "Step 3 of")
    notebook.save()
    (session,) = [each for each in lab.get("/api/sessions") if each["path"] == notebook.name]
    restart = urllib.request.Request(f"{lab.url}/api/kernels/{session['kernel']['id']}/restart", method="POST")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(restart, timeout=60).close()
    notebook.page.wait_for_timeout(1000)
    notebook.press(0, "b", "b")
    notebook.says(0, "Step 1 of 4")

    again = Notebook(lab, browser.page(), notebook.name)
    again.cell(0).locator("img").wait_for()
    assert again.pictures(0) == [True] and again.stepper(0).count() == 0
