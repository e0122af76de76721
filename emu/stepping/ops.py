"""What a step is: one thing that a rank does, as it is about to do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from emu.trace.ops import op_of
from emu.virtual.kernel import name_of
from emu.virtual.lines import code_at, user_line

if TYPE_CHECKING:
    from emu.virtual.device import VirtualDevice
    from emu.virtual.thread import Stop

KINDS = ("kernel", "allocation", "host read", "collective", "transfer", "wait", "event", "host", "mark", "breakpoint")


class Op(NamedTuple):
    """One thing that a rank does: a kernel, an allocation, a communication, a wait, a mark."""

    rank: int
    kind: str  # one of KINDS
    name: str  # "mm", "all_reduce", "send", "wait", or what the program called a mark
    group: str  # label of the group of a communication; "" otherwise
    given: str  # the name that a communication was given, or what is waited for; "" otherwise
    scope: str  # dotted module path, e.g. "blocks.0.attention"; "" outside any module
    phase: str  # "forward", "backward", "recompute", "optimizer" or ""
    stream: str  # that is given it
    line: str  # of the user's program, "file.py:12"
    detail: str  # its operands: "float32[4, 6] float32[6, 8]"

    @property
    def label(self) -> str:
        """What to call it: "mm", "dp.all_reduce", "mark step 3"."""
        if self.kind == "mark":
            return f"mark {self.name}"
        if self.kind == "wait":
            return f"wait for {self.given}"
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def code(self) -> str:
        """What stands at its line; "" where that cannot be read."""
        return code_at(self.line)

    def names(self) -> Iterator[str]:
        """All that `until` knows it by, besides its scope and phase."""
        yield from (self.name, self.kind, self.label, f"rank {self.rank}")
        if self.given:
            yield self.given

    def is_called(self, pattern: str) -> bool:
        """Whether a name of it matches a shell pattern, e.g. "dp.*"."""
        return any(fnmatchcase(name, pattern) for name in self.names())

    def is_within(self, pattern: str) -> bool:
        """Whether it belongs to a module, or a part of one, that matches a shell pattern; or to a phase."""
        parts = self.scope.split(".")
        paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return any(path and fnmatchcase(path, pattern) for path in (*paths, self.phase))


def op_at(device: VirtualDevice, stop: Stop) -> Op | None:
    """The step that a rank stands before; None where nothing runs and nothing new lives: no step.

    Called on the rank's thread. What runs inside one kernel (`rank.kernel`) is a part of that kernel.
    """
    kind, of, args = stop
    tracker = device.tracker
    if tracker is not None and tracker._kernel is not None and kind == "op":
        return None
    rank, stream = device.rank, device.stream_now.name
    if kind == "op":
        facts = op_of(of)
        happens = facts.launches or facts.host_reads or facts.fresh or facts.resizes  # a view does none of these
        if not happens or facts.composite or of.namespace == "profiler":
            return None
        what = "host read" if facts.host_reads else "kernel" if facts.launches else "allocation"
        scope, phase = _where(device, args)
        name = "tensor" if facts.name == "lift_fresh" else facts.name  # torch.tensor(...), as its users call it
        return Op(rank, what, name, "", "", scope, phase, stream, user_line(), _operands(args))
    scope, phase = _where(device, ())
    line = user_line()
    if kind == "collective":
        detail = " ".join(filter(None, (_operands((args.source,)), args.op, args.algorithm)))
        on = stream if device._synchronous.depth else of.label
        return Op(rank, kind, args.kind, of.label, args.name, scope, phase, on, line, detail)
    if kind == "messages":
        name = args[0].kind if len(args) == 1 else "exchange"
        detail = ", ".join(_message(of.members, m) for m in args)
        given = " ".join(m.name for m in args if m.name)
        return Op(rank, "transfer", name, of.label, given, scope, phase, stream, line, detail)
    if kind == "wait":
        given = of if isinstance(of, str) else ", ".join(of.told())
        return Op(rank, kind, "wait", "", given, scope, phase, stream, line, "")
    return Op(rank, kind, of, "", "", scope, phase, stream, line, "")


def _where(device: VirtualDevice, args: Sequence[Any]) -> tuple[str, str]:
    """Module scope and phase, as the record will say."""
    tracker = device.tracker
    if tracker is None:
        return "", ""
    node, names = torch._C._current_autograd_node(), tracker.names
    if node is not None:
        if torch.is_grad_enabled() or names.again:
            return names.scope, "recompute"
        return names.of_node(node), "backward"
    if tracker.stepping:
        return names.scope, "optimizer"
    learns = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)
    return names.scope, "forward" if names.scope or learns else ""


def _message(members: Sequence[int], message: Any) -> str:
    toward = "to" if message.kind == "send" else "from"
    return f"{message.kind} {toward} rank {members[message.peer]} {_operands((message.tensor,))}"


def _operands(args: Sequence[Any]) -> str:
    """Tensors among an operator's arguments, by dtype and shape."""
    found: list[Tensor] = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(t for t in a if isinstance(t, Tensor))
    text = " ".join(described(t.dtype, t.shape) for t in found[:3])
    return f"{text} and {len(found) - 3} more" if len(found) > 3 else text


def described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """ "float32[4, 6]"."""
    return f"{name_of(dtype)}{list(shape)}"
