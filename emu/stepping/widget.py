"""The stepper as a widget: what is shown is drawn by the page's JavaScript, from a record that Python goes on adding to.

Messages from the page are {view, id, ask: question} or {view, gone: true}; to it {id, answer}, or {news: ...} for all views.
Where the stepper stands is the trait `index`, which both sides set.
"""

from __future__ import annotations

import weakref
from typing import Any
from uuid import uuid4

import anywidget
import traitlets

from emu.canvas import module
from emu.spmd import EmuError
from emu.stepping.answers import Answers, told
from emu.stepping.stepper import Stepper

MOST_VIEWS = 1000  # whoever claims more is no notebook


class StepperWidget(anywidget.AnyWidget):
    """Shows a stepper, in as many views as there are; all agree.

    It keeps the stepper while somebody looks at it. When the last view is gone, the stepper ends as if it was never shown:
    when nobody has it any more.

    Attributes:
        index: where the stepper stands. The page sets it to steps that are known; it goes on by asking.
        closed: whether the stepper was closed: then the page shows what was seen.
        mark: stands in the pictures that are shown in its stead, by which the page knows them.
    """

    _esm = module("widget")
    index = traitlets.Int(0).tag(sync=True)
    closed = traitlets.Bool(False).tag(sync=True)
    mark = traitlets.Unicode().tag(sync=True)

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self._kept = weakref.ref(stepper), stepper
        self._views: set[str] = set()
        self._answers = Answers(stepper, lambda news: self.send({"news": news}))
        super().__init__(index=stepper.index, closed=stepper.closed, mark=f"emu stepper {uuid4().hex}")
        self.on_msg(self._heard)
        stepper.watchers.append(self._moved)
        weakref.finalize(stepper, self.close).atexit = False

    def close(self) -> None:
        """Closes the widget, and the stepper with it: no thread is left."""
        stepper = self._stepper()
        if stepper is not None and not stepper.closed:
            stepper.close()
        super().close()

    def _moved(self) -> None:
        """The stepper has moved, by a page or by a cell."""
        stepper = self._stepper()
        if stepper is not None:
            self._answers.tell()
            self.index, self.closed = stepper.index, stepper.closed

    @traitlets.observe("index")
    def _set(self, change: Any) -> None:
        """A page has moved within what is known."""
        stepper = self._stepper()
        if stepper is None or change["new"] == stepper.index:
            return
        if 0 <= change["new"] <= len(stepper.history) - (not stepper.history.ended):
            stepper.index = change["new"]
        else:
            self.index = stepper.index

    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        """A message from a page, which may be anything."""
        view, asked = (content.get("view"), content.get("id")) if isinstance(content, dict) else (None, None)
        if not isinstance(view, str) or len(view) > 100:
            return
        if content.get("gone") is True:
            self._views.discard(view)
            if not self._views:
                self._kept = None
        elif isinstance(asked, str) and len(asked) < 200:
            stepper = self._stepper()
            if stepper is not None and len(self._views) < MOST_VIEWS:
                self._views.add(view)
                self._kept = stepper
            gone = {"error": told(EmuError("the stepper is gone", "make another: emu.step(program, mesh)"))}
            answer = gone if stepper is None else self._answers.ask(stepper, content.get("ask"))
            self.send({"id": asked, "answer": answer})


def widget_of(stepper: Stepper) -> StepperWidget:
    """The widget of a stepper: one, however often it is shown."""
    widget = stepper._widget
    if widget is None or widget.comm is None:
        widget = stepper._widget = StepperWidget(stepper)
    return widget
