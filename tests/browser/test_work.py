"""Drawing costs what is seen, and not what there is: a page of a run four times as long does as much."""

from __future__ import annotations

import pytest
from browser.large import write_page
from browser.opened import Opened

pytestmark = pytest.mark.browser

COUNT = """
window.work = 0;
const context = CanvasRenderingContext2D.prototype;
for (const name of ["fillRect", "strokeRect", "fill", "stroke", "fillText", "drawImage", "lineTo", "arc", "rect"]) {
  const does = context[name];
  context[name] = function (...all) { window.work += 1; return does.apply(this, all); };
}
"""


def work(watched, path):
    """Calls to the canvas for the first look, and of single steps all over the run: (first, most of a step)."""
    page = Opened(watched.page(), path)
    page.do("idle()")
    first, steps = page.page.evaluate("window.work"), []
    known = page.page.evaluate("emuStepper.known")
    for share in (0.9, 0.5, 0.1, 0.7):
        page.do(f"goto({int(known * share)})")
        before = page.page.evaluate("window.work")
        page.do("next()")
        steps.append(page.page.evaluate("window.work") - before)
    return first, max(steps)


def test_work_does_not_grow_with_the_run(watched, tmp_path):
    few, _ = write_page(tmp_path / "few.html", 4, 4_000)
    many, _ = write_page(tmp_path / "many.html", 4, 16_000)
    assert many > 3.5 * few
    watched.context.add_init_script(COUNT)
    small, large = work(watched, tmp_path / "few.html"), work(watched, tmp_path / "many.html")
    print(small, large)
    assert small[0] > 0 and large[0] < 1.5 * small[0] + 500
    assert small[1] > 0 and large[1] < 1.5 * small[1] + 100
