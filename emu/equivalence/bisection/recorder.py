"""Keeps every tensor that a rank makes: its numbers, what it was made of, and where in the program."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from emu.spmd import Rank
from emu.spmd.calls import Call, Message
from emu.trace.ops import op_of
from emu.virtual.lines import user_line
from emu.virtual.names import Names
from emu.virtual.rendezvous import Half, Rendezvous
from emu.virtual.streams import extent

if TYPE_CHECKING:
    from emu.spmd.group import Group

MOST_BYTES = 2 << 30  # of numbers that are kept, of all ranks; beyond, nothing is bisected

_here = threading.local()  # .recorder: of the rank whose thread this is
_node_now = torch._C._current_autograd_node
_torch: Any = torch._C
_number_now = _torch._autograd._get_sequence_nr


class TooLarge(Exception):
    """More numbers than are kept."""


class Made:
    """A tensor as one op, or one communication, left it.

    Attributes:
        rank, time: who made it, and when among everything that all ranks made.
        op: the operator ("mm"), or the communication ("all_reduce over 'dp'"); "" for what came from outside.
        layer, direction, line: the module it ran in, "forward", "backward" or "", and the user's line.
        value: its numbers in float64; None where it has none that are rounded (tokens, masks).
        inputs: what it was made of.
        next_line: where it was first used, on another line than its own; "" if nowhere.
        members: of a communication, the ranks that take part.
    """

    __slots__ = ("direction", "inputs", "layer", "line", "members", "next_line", "op", "rank", "time", "turn", "value")

    def __init__(
        self,
        rank: int,
        time: int,
        op: str,
        where: tuple[str, str, str],
        value: Tensor | None,
        inputs: list[Made],
        members: tuple[int, ...] = (),
    ) -> None:
        self.rank, self.time, self.op, self.value, self.inputs, self.members = rank, time, op, value, inputs, members
        self.layer, self.direction, self.line = where
        self.next_line = ""
        self.turn = 0  # how many of its kind its rank made before

    @property
    def is_number(self) -> bool:
        return self.value is not None and not self.value.dim()

    @property
    def kind(self) -> tuple[str, ...]:
        """What it has in common with what other ranks make at the same place."""
        return self.op, self.layer, self.direction, self.line


def _accumulates() -> bool:
    """Whether autograd is just handing a gradient to its leaf, which has no place in forward."""
    node = _node_now()
    return node is not None and node.name().endswith("AccumulateGrad")


def touched(line: str, made: Iterable[Made]) -> None:
    """Notes that a line uses tensors."""
    for x in made:
        if not x.next_line and line != x.line:
            x.next_line = line


def is_zero(made: Made) -> bool:
    """Whether there are numbers in it, and all are zero."""
    return made.value is not None and made.value.numel() > 0 and not bool(made.value.any())


class Record:
    """Everything that all ranks of a run made."""

    def __init__(self) -> None:
        self.made: list[Made] = []
        self.recorders: dict[int, Recorder] = {}
        self.bytes = 0
        self.by_kind: dict[tuple[int, tuple[str, ...]], list[Made]] = {}  # of a rank

    def add(self, made: Made) -> None:
        self.made.append(made)
        same = self.by_kind.setdefault((made.rank, made.kind), [])
        made.turn = len(same)
        same.append(made)

    def copy(self, x: Tensor) -> Tensor | None:
        if not x.is_floating_point() or x.layout is not torch.strided:
            return None
        self.bytes += x.numel() * 8
        if self.bytes > MOST_BYTES:
            raise TooLarge
        return x.detach().to(torch.float64, copy=True)

    @contextmanager
    def within(self, rank: Rank) -> Iterator[None]:
        """Keeps what a rank makes on this thread."""
        recorder = self.recorders[rank.id] = _here.recorder = Recorder(self, rank.id)
        device: Any = rank._device
        device.watch = recorder.names.watch
        try:
            with recorder:
                yield
        finally:
            _here.recorder = None

    def forget(self) -> None:
        """Lets go of everything at once: it may be gigabytes, and holds on to itself in circles."""
        for made in self.made:
            made.inputs, made.value = [], None
        self.made.clear()
        self.by_kind.clear()
        for recorder in self.recorders.values():
            recorder.writers.clear()
            recorder._storages.clear()
        self.recorders.clear()

    def makers(self, rank: int, x: Tensor) -> list[Made]:
        """What a tensor that a rank returns was last written by; nothing if that was no op."""
        if x.layout is not torch.strided or x.untyped_storage()._cdata not in self.recorders[rank].writers:
            return []
        return self.recorders[rank].makers(x)


class Written(NamedTuple):
    """Bytes of a storage, and what they were last written by."""

    start: int
    end: int
    made: Made

    def besides(self, start: int, end: int) -> Iterator[Written]:
        """What is left of it where some bytes are written anew."""
        if self.start < start:
            yield self._replace(end=min(self.end, start))
        if end < self.end:
            yield self._replace(start=max(self.start, end))


class Recorder(TorchDispatchMode):
    """Keeps what one rank's ops make."""

    def __init__(self, record: Record, rank: int) -> None:
        super().__init__()
        self.record, self.rank, self.names = record, rank, Names()
        self.writers: dict[int, list[Written]] = {}  # by storage: who wrote its bytes last
        self._storages: list[Any] = []  # kept, so that no number is given twice
        self._next = 0  # the number that autograd gives its next node
        self._numbers: list[int] = [-1]  # of autograd nodes, from which on ...
        self._lines: list[str] = [""]  # ... forward stood at this line

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = op_of(func)
        if op.views:  # a backward may communicate where forward only looks at a tensor anew
            line = self.where()[2]
            if not _accumulates():
                touched(line, [made for x in _tensors(args) for made in self.makers(x)])
            return func(*args, **kwargs)
        inputs = [made for x in _tensors((*args, *kwargs.values())) for made in self.makers(x)]
        out = func(*args, **kwargs)
        written = _tensors([args[i] for i in op.writes if i < len(args)] + [kwargs.get(n) for n in op.out_names])
        where = self.where(any(x.requires_grad for x in _tensors(args)))
        for x in written or _tensors([out]):
            self.wrote(x, op.name, where, inputs)
        return out

    def wrote(
        self,
        x: Tensor,
        op: str,
        where: tuple[str, str, str],
        inputs: Sequence[Made],
        members: tuple[int, ...] = (),
    ) -> None:
        """Notes that an op, or a communication, wrote a tensor."""
        storage, record = x.untyped_storage(), self.record
        start, end = extent(x)
        made = Made(self.rank, len(record.made), op, where, record.copy(x), list(dict.fromkeys(inputs)), members)
        touched(made.line, [x for x in inputs if x.rank == self.rank])
        record.add(made)
        if storage._cdata not in self.writers:
            self._storages.append(storage)
        before = self.writers.get(storage._cdata, [])
        rest = [part for w in before for part in w.besides(start, end)] if x.is_contiguous() else before
        self.writers[storage._cdata] = [*rest, Written(start, end, made)]

    def makers(self, x: Tensor) -> list[Made]:
        """What wrote a tensor last, part by part; what came from outside counts as made when it is first read."""
        storage = x.untyped_storage()
        if storage._cdata not in self.writers:
            self.wrote(x, "", ("", "", ""), [])
        start, end = extent(x)
        return [w.made for w in self.writers[storage._cdata] if w.start < end and start < w.end]

    def where(self, learns: bool = False) -> tuple[str, str, str]:
        """Layer, direction and line. Of a backward it is the line at which forward made the node.

        Args:
            learns: whether a gradient is wanted of what is read.
        """
        node = _node_now()
        if node is None or torch.is_grad_enabled():
            line, following, scope = user_line(), _number_now(), self.names.scope
            if following > self._next:  # nodes were made since the last op: this one's, and those of what it is part of
                self._numbers.append(self._next)
                self._lines.append(line)
                self._next = following
            return scope, "forward" if scope or learns else "", line
        if _accumulates():
            return "", "backward", user_line()
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self.names.of_node(node), "backward", self._lines[at] or user_line()


class Overheard(Rendezvous):
    """Carries communications out, and notes what they write."""

    def __init__(self, scheduler: Any, record: Record) -> None:
        super().__init__(scheduler)
        self._record = record
        self._pair = (0, 0)

    def carry_out(self, group: Group, calls: Sequence[Call], line: str) -> None:
        recorders = [self._record.recorders[member] for member in group.members]
        inputs = [m for r, c in zip(recorders, calls) if c.source is not None for m in r.makers(c.source)]
        super().carry_out(group, calls, line)
        layer, direction, here = _here.recorder.where()
        where = layer, direction, here if direction == "backward" else line.partition(" while ")[0]
        for recorder, call in zip(recorders, calls):
            if call.target is not None:
                what = f"{call.kind} over {group.label!r}"
                recorder.wrote(call.target, what, where, inputs, group.members)

    def post(self, group: Group, message: Message, line: str) -> Half:
        me, peer = group.members[group.rank], group.members[message.peer]
        self._pair = (me, peer) if message.kind == "send" else (peer, me)
        return super().post(group, message, line)

    def deliver(self, group: Group, target: Tensor, source: Tensor, line: str) -> None:
        sender, receiver = (self._record.recorders[rank] for rank in self._pair)
        given = sender.makers(source)
        super().deliver(group, target, source, line)
        layer, direction, here = _here.recorder.where()
        where = layer, direction, here if direction == "backward" else line.partition(" while ")[0]
        receiver.wrote(target, f"send from rank {self._pair[0]} to {self._pair[1]}", where, given, self._pair)


@contextmanager
def naming() -> Iterator[None]:
    """While it is on, torch tells the recorder of a thread which module is being called."""

    def enter(module: Any, args: Any) -> None:
        if (recorder := getattr(_here, "recorder", None)) is not None:
            recorder.names.enter(module)

    def leave(module: Any, args: Any, out: Any) -> None:
        if (recorder := getattr(_here, "recorder", None)) is not None:
            recorder.names.leave()

    handles = [
        nn_module.register_module_forward_pre_hook(enter),
        nn_module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: Any) -> list[Tensor]:
    """The dense tensors among an op's arguments or results, in lists too."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, (list, tuple)) else (value,)
    return [x for x in found if isinstance(x, Tensor) and x.layout is torch.strided]
