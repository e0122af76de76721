"""A page without a browser: it asks, and keeps the record that it is told of, as the JavaScript does."""

from __future__ import annotations

from typing import Any

from canvas.reader import Reader, carried

import emu
from emu.stepping.answers import Answers


class Page:
    """What a page knows of a stepper.

    Attributes:
        reader: the record, as told so far.
        index: where the last answer said that it stands.
        spans: the times, as told last.
    """

    def __init__(self, s: emu.Stepper) -> None:
        self._stepper, self._answers = s, Answers(s, self.hear)
        self.spans: Any = None
        first = self.ask({"do": "record"})
        self.reader = Reader(first["record"])

    def hear(self, news: dict[str, Any]) -> None:
        for kind, value in carried(news).items():
            if kind == "part":
                self.reader.join(value)
            elif kind == "record":
                self.reader = Reader(value)
            else:
                self.spans = value
                self.reader.head["strings"] += value.get("strings", [])

    def ask(self, asked: Any) -> dict[str, Any]:
        answer = carried(self._answers.ask(self._stepper, asked))
        self.index = answer["index"]
        return answer

    def state(self) -> dict[str, Any]:
        return self.reader.state(self.index)
