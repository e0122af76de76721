"""What a rank sends to and receives from other ranks of a pipeline: outputs forward, their gradients backward.

All is asynchronous: a send does not wait, and a receive is waited for at its use. What was sent must stay until it has
arrived; see releases.py for when that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emu.parallel.pipeline.actions import SEND_F, Action, B, F
from emu.parallel.pipeline.running.form import Form
from emu.parallel.pipeline.running.releases import releases
from emu.parallel.pipeline.schedule import Schedule
from emu.spmd import EmuError, Rank
from emu.spmd.words import tell, told

NEVER = -1  # a position in no row

Key = tuple[str, int, int]  # kind, stage, microbatch: of the receive


class Expected(NamedTuple):
    """A receive that cannot be posted yet, because nobody has said what shape comes."""

    key: Key
    form: Callable[[bool], Form | None]  # whether to wait for it


class Mail:
    """One rank's messages along pp.

    Args:
        schedule: with sends and receives.
    """

    def __init__(self, rank: Rank, schedule: Schedule) -> None:
        self.rank, self.here = rank, rank.coords.get("pp", 0)
        members = rank.group("pp").members
        self.forward = rank.group(members=members, label="pp.F")
        self.backward = rank.group(members=members, label="pp.B")
        self._forms: dict[tuple[int, Any], Form] = {}  # stage, microbatch's shape -> what its input is like
        self._told: set[tuple[int, Any]] = set()
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """From now on this schedule says in which order messages go."""
        self.places = schedule.places
        self._releases = releases(schedule)[self.here], releases(schedule, at_use=True)[self.here]
        self._news: set[int] = set()  # peers that were told of a shape in this batch: they ask late
        self._coming: dict[Key, tuple[Tensor, Any]] = {}
        self._expected: dict[tuple[int, str], deque[Expected]] = {}  # by source and kind
        self._sent: dict[int, list[Any]] = {}  # works, by the position in the row before which they are waited for
        self._taken: set[Key] = set()

    def send(self, kind: str, stage: int, microbatch: int, tensor: Tensor, like: Any, form: Form | None = None) -> None:
        """Sends a stage's output to the next stage, or its input's gradient to the one before.

        Args:
            like: of the microbatch, what its receiver knows, too: its shape.
            form: of an output.
        """
        forward = kind == SEND_F
        other = stage + 1 if forward else stage - 1
        peer = self.places[other, microbatch]
        if form is not None and (other, like) not in self._told:
            self._told.add((other, like))
            self._news.add(peer)
            tell(self.forward, [other, *form.words()], peer)
        group = self.forward if forward else self.backward
        work = group.send(tensor, peer, async_op=True, name=f"{stage}{kind[-1]}{microbatch}")
        due = self._releases[forward and peer in self._news].get(Action(stage, kind, microbatch), NEVER)
        self._sent.setdefault(due, []).append(work)

    def release(self, position: int) -> None:
        """The row has come to a position: what was sent, and has arrived by now, goes."""
        for work in self._sent.pop(position, ()):
            work.wait()

    def expect_input(self, stage: int, microbatch: int, like: Any) -> None:
        """A stage's input will come from the stage before: posts its receive as soon as its shape is known."""
        peer = self.places[stage - 1, microbatch]

        def form(wait: bool) -> Form | None:
            found = self._forms.get((stage, like))
            if found is None and wait:
                words = told(self.forward, peer)
                if words[0] != stage:
                    raise EmuError(
                        f"rank {self.rank} expected the shape of stage {stage}'s input, and heard of stage {words[0]}'s",
                        "every rank must run the same schedule, on batches of the same shape",
                    )
                found = self._forms[stage, like] = Form.of(words[1:])
            return found

        self._expect(peer, Expected((F, stage, microbatch), form))

    def expect_gradient(self, stage: int, microbatch: int, form: Callable[[], Form | None]) -> None:
        """The gradient of a stage's output will come from the next stage. `form`: of that output, once there is one."""
        self._expect(self.places[stage + 1, microbatch], Expected((B, stage, microbatch), lambda wait: form()))

    def forget_input(self, stage: int, microbatch: int, like: Any) -> None:
        """Receives an input that was sent and is of no use, unless it was taken."""
        key = (F, stage, microbatch)
        if key in self._taken:
            self._taken.discard(key)
            return
        if key not in self._coming and not any(e.key == key for queue in self._expected.values() for e in queue):
            self.expect_input(stage, microbatch, like)
        self.take(F, stage, microbatch)
        self._taken.discard(key)

    def _expect(self, peer: int, expected: Expected) -> None:
        queue = self._expected.setdefault((peer, expected.key[0]), deque())
        if expected.key in self._coming or any(other.key == expected.key for other in queue):
            return  # a warm-up that was forgotten asked for it
        queue.append(expected)
        self._post(peer, expected.key[0], None)

    def _post(self, peer: int, kind: str, until: Key | None) -> None:
        """Posts receives from a peer in their order: as far as shapes are known, and up to `until` at any rate."""
        queue = self._expected[peer, kind]
        group = self.forward if kind == F else self.backward
        while queue:
            key, form = queue[0]
            found = form(until is not None and until not in self._coming)
            if found is None:
                return
            queue.popleft()
            buffer = torch.empty(found.shape, dtype=found.dtype, device=self.rank.device)
            _, stage, microbatch = key
            sender = stage - 1 if kind == F else stage + 1
            work = group.recv(buffer, peer, async_op=True, name=f"{sender}{kind}{microbatch}")
            self._coming[key] = buffer, work

    def form(self, stage: int, like: Any) -> Form:
        """Of a stage's input that has come."""
        return self._forms[stage, like]

    def take(self, kind: str, stage: int, microbatch: int) -> Tensor:
        """The input (F) or the gradient of the output (B) of a stage that was expected; the current stream waits for it."""
        other = stage - 1 if kind == F else stage + 1
        peer, key = self.places[other, microbatch], (kind, stage, microbatch)
        if key not in self._coming:
            self._post(peer, kind, key)
        buffer, work = self._coming.pop(key)
        self._taken.add(key)
        work.wait()
        return buffer

    def finish(self) -> None:
        """The batch is over: waits for what is still under way."""
        self._taken.clear()
        self._news.clear()
        for works in self._sent.values():
            for work in works:
                work.wait()
        self._sent.clear()
