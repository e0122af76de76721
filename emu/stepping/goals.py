"""What `until` waits for."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from emu.spmd import EmuError
from emu.stepping.history import History
from emu.stepping.ops import Op

What = str | int | Callable[[Op], object]


class Until:
    """Reached before the first step after `start` that is what was asked for.

    Names match the step itself. A scope or phase matches the first step in it: on each rank, one whose step before was not.

    Args:
        what: an op's name, a kind of collective, "group.kind", a mark, a scope or a phase, with * for any characters; a
            rank; or a function of the step.
    """

    def __init__(self, what: What, start: int) -> None:
        if isinstance(what, bool) or not (isinstance(what, (str, int)) or callable(what)) or what == "":
            raise EmuError(
                f"until({what!r}) names nothing to wait for",
                'give a name ("all_reduce", "layers.0.*", "step 3"), a rank, or a function of the step',
            )
        self.what, self.start = what, start
        self.found = False
        self.error: Exception | None = None  # of a function that was given
        self._inside: dict[int, bool] = {}

    def begin(self, history: History) -> None:
        """Looks at the last step of every rank: whether each is within what is asked for already."""
        if isinstance(self.what, str):
            for op in reversed(history.ops[: self.start + 1]):
                if op.rank not in self._inside:
                    self._inside[op.rank] = op.is_within(self.what)
                    if len(self._inside) == len(history.ranks):
                        return

    def __call__(self, index: int, op: Op) -> bool:
        if index <= self.start:
            return False
        if isinstance(self.what, str):
            self.found = self._named(op, self.what)
        elif isinstance(self.what, int):
            self.found = op.rank == self.what
        else:
            try:
                self.found = bool(self.what(op))
            except Exception as error:  # a mistake of who asks, and not of the program
                self.error = error
                return True
        return self.found

    def _named(self, op: Op, what: str) -> bool:
        within = op.is_within(what)
        enters = within and not self._inside.get(op.rank, False)
        self._inside[op.rank] = within
        return enters or op.is_called(what)

    def nothing(self, history: History) -> EmuError:
        """What to say where the program ended before it."""
        names = dict.fromkeys(name for op in history.ops for name in (*op.names(), op.scope, op.phase) if name)
        near = get_close_matches(str(self.what), names, 3, 0.5)
        what = repr(self.what) if isinstance(self.what, (str, int)) else "what was asked for"
        hint = f"near it are {', '.join(near)}" if near else f"there are {', '.join(list(names)[:12])}"
        return EmuError(f"the program ended before {what}", f"{hint}; step back to look again")
