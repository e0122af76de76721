"""What a stepper answers to a page: it goes on and back as asked, and says what is new since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emu.canvas.record import plain
from emu.spmd import EmuError
from emu.stepping.algorithms import WAYS
from emu.stepping.keeping import title_of
from emu.stepping.moment import Moment, RankMoment
from emu.stepping.questions import MOST_STEPS, Do, Question, Spans, Tensor, Tensors, Walked, question_of
from emu.stepping.recorded import Recording
from emu.stepping.stepper import Stepper
from emu.stepping.values import ELEMENTS, plain_values, plain_walk

MOST_WALKED = 8192  # numbers that all members of a collective give: every hop has as many again

Answer = dict[str, Any]


class Answers:
    """Answers for one stepper, which it does not keep alive. Values are as `emu.canvas.record.plain` makes them.

    Every answer has `index`, where the stepper stands. What the program raised, or what was wrong with the question, is
    `error`: {message, hint}.

    Attributes:
        news: called with {"part"}, {"record"} or {"spans"}, before the answer that brought them: a page adds a part to the
            record that it has, and takes a record instead of it (another rank was let go first).
    """

    def __init__(self, stepper: Stepper, news: Callable[[Answer], object]) -> None:
        self.news = news
        self._recording = Recording(stepper.history, stepper.mesh, stepper.cluster, title_of(stepper))
        self._begun = False

    def ask(self, stepper: Stepper, asked: Any) -> Answer:
        """Answers a question; whatever it is, nothing is raised."""
        try:
            found = self._answer(stepper, question_of(asked))
        except KeyboardInterrupt:
            found = {"error": {"message": "interrupted", "hint": "it stands before the step that it had come to"}}
        except Exception as error:
            found = {"error": told(error)}
        self.tell()
        return {"index": stepper.index, **sendable(found)}

    def tell(self) -> None:
        """Says what is new, if anybody has asked for the record."""
        if self._begun and (new := self._recording.news()):
            self.news(sendable(new))

    def _answer(self, stepper: Stepper, question: Question) -> Answer:
        match question:
            case Do(do="record"):
                return self._record()
            case Do():
                _go(stepper, question)
            case Tensors(tensors=at):
                held = _moment(stepper, at.step).rank(at.rank).tensors()
                return {"tensors": [plain(about.as_dict()) for about in held.values()]}
            case Tensor(tensor=at):
                return {"tensor": _tensor(_moment(stepper, at.step).rank(at.rank), at.name)}
            case Walked(walk=at):
                return _walk(_moment(stepper, at.step), at.algorithm)
            case Spans():
                self.tell()
                self.news(sendable({"spans": self._recording.spans()}))
        return {}

    def _record(self) -> Answer:
        self.tell()  # to the pages that have one: what comes after is new to all
        self._begun = True
        return {"record": self._recording.whole()}


def _go(s: Stepper, asked: Do) -> None:
    match asked.do:
        case "next":
            s.next(asked.n, asked.rank)
        case "back":
            s.back(asked.n)
        case "until":
            s.until(asked.what or "")
        case "goto":
            s.goto(asked.index or 0)
        case "end":
            s.next(MOST_STEPS)


def _moment(s: Stepper, step: int) -> Moment:
    if step > len(s.history):
        raise EmuError(f"step {step} is not known yet", "go on to there first")
    return s.at(step)


def _tensor(at: RankMoment, name: str) -> Answer:
    value, about = at.tensor(name), plain(at.tensors()[name].as_dict())
    if value.is_meta:
        return {"about": about, "value": None, "note": "it has a shape alone: this program is stepped without values"}
    shown, note = cut(value)
    return {"about": about, "value": plain_values(shown), "note": note}


def _walk(moment: Moment, algorithm: str | None) -> Answer:
    last = moment.carried()
    given = sum(call.source.numel() for call in last.calls if call.source is not None) if last else 0
    if last is not None and given > MOST_WALKED:
        raise EmuError(
            f"{last.label}.{last.calls[0].kind} moves {given:,} numbers, too many to be seen hop by hop",
            f"step with a smaller tensor: at most {MOST_WALKED:,} numbers on all ranks together",
        )
    walk = moment.collective(algorithm)
    return {"walk": plain_walk(walk), "algorithms": list(WAYS.get(walk.what.rpartition(".")[2], {}))}


def told(error: BaseException) -> Answer:
    """An error for people: what is wrong, and what to do."""
    if isinstance(error, EmuError):
        return {"message": error.message, "hint": error.hint}
    return {"message": f"{type(error).__name__}: {error}", "hint": "the program raised it: step back to look"}


def cut(value: torch.Tensor, most: int = ELEMENTS) -> tuple[torch.Tensor, str]:
    """A corner of a tensor of at most so many numbers, and what was left out in words."""
    sizes = list(value.shape)
    while (numbers := torch.Size(sizes).numel()) > most:
        largest = max(range(len(sizes)), key=lambda i: sizes[i])
        sizes[largest] = max(min(sizes[largest] - 1, sizes[largest] * most // numbers), sizes[largest] // 2, 1)
    if sizes == list(value.shape):
        return value, ""
    return value[tuple(slice(n) for n in sizes)], f"the first {sizes} of {list(value.shape)}"


def sendable(value: Any) -> Any:
    """Plain data in which all text is Unicode that can be sent: half a pair of surrogates becomes "?"."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {sendable(key): sendable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [sendable(part) for part in value]
    return value
