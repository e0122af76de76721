"""A page of a stepper in a browser, and what it says."""

from __future__ import annotations

import json
from typing import Any

from canvas.reader import carried


class Opened:
    """The page in one HTML file.

    Attributes:
        page: playwright's.
    """

    def __init__(self, page: Any, path: Any) -> None:
        self.page = page
        page.goto(path.as_uri())
        page.wait_for_function("window.emuStepper !== undefined")

    def do(self, what: str) -> None:
        """Does something with the page's own handle, and waits until it is done."""
        self.page.evaluate(f"(async () => {{ await emuStepper.{what}; await emuStepper.idle(); }})()")

    def press(self, *keys: str) -> int:
        """Presses keys where the stepper has the focus; where it then stands."""
        self.page.locator(".emu").focus()
        for key in keys:
            self.page.keyboard.press(key)
        self.page.evaluate("emuStepper.idle()")
        return self.index

    @property
    def index(self) -> int:
        return self.page.evaluate("emuStepper.index")

    @property
    def status(self) -> str:
        """The line that is read out."""
        return " ".join(self.page.locator(".emu .status").inner_text().split())

    @property
    def alert(self) -> str:
        return self.page.evaluate("emuStepper.message")

    def shown(self, indexes: list[int]) -> list[dict[str, Any]]:
        """What it shows at steps, as data."""
        return json.loads(self.page.evaluate("all => JSON.stringify(all.map((i) => emuStepper.shown(i)))", indexes))


def said(s: Any, index: int) -> dict[str, Any]:
    """What the stepper says at a step, as a page is told it."""
    return carried(s.at(index).state(times=False))


def steps_of(s: Any, most: int = 40) -> list[int]:
    """Many steps, the first and the last among them."""
    last = len(s.history) - (not s.history.ended)
    return sorted({*range(0, last + 1, max(last // most, 1)), last})
