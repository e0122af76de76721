"""A chain of layers under a checkpointing policy: what forward notes down, and how backward computes it again.

Each layer's call stays where it is in the model's own forward; only what it saves for backward is left out (frames.py). It is
noted down in a Piece, which is one segment of the policy in one forward. The output of a layer carries a link to its piece, so
the next layer, called with exactly that output, goes on there: microbatches may be under way in any number, and any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from emu.parallel.checkpointing.frames import Frame
from emu.parallel.checkpointing.keeping import Arguments, Keep, Kept
from emu.parallel.checkpointing.operators import Results
from emu.parallel.checkpointing.policy import Policy, Segment
from emu.parallel.checkpointing.surroundings import RandomState, as_it_was, autocasts, counted, unremembered, written
from emu.spmd import EmuError


class Link(NamedTuple):
    """On a layer's output: where it came from.

    Fields:
        piece: that the layer was called in; None when nothing needs it any more.
        layer: its place in the chain.
        version: of the output, by which writes are noticed.
        random: the generators after the layer.
    """

    piece: weakref.ref[Piece]
    layer: int
    version: int
    random: RandomState


class Call:
    """One call of a layer.

    Args:
        layer: the module.
        run: its plain call.
        arguments: but for the activations.
        frame: what it saves.
        random: the generators before it, where they are not what the layer before left; None: they are.
    """

    def __init__(
        self,
        layer: nn.Module,
        run: Callable[..., Any],
        arguments: Arguments,
        frame: Frame,
        random: RandomState | None,
    ) -> None:
        self.layer, self._run, self._arguments, self._random = layer, run, arguments, random
        self.where = frame.where
        self._frame = weakref.ref(frame)  # which holds on to the piece: it dies with the graph
        self._training = layer.training
        self.results: Results | None = None  # of operators that do not run again
        self.writes: list[nn.Module] = []  # parts that write into their buffers

    @property
    def frame(self) -> Frame | None:
        return self._frame()

    def again(self, x: Tensor) -> Tensor:
        """The layer's output once more."""
        if self._training != self.layer.training:
            raise EmuError(
                f"{self.where} was {'' if self._training else 'not '}in training when it was called, and is "
                f"{'not ' if self._training else ''}now that it is computed again",
                "call train() or eval() after backward",
            )
        if self._random is not None:
            self._random.set()
        args, kwargs = self._arguments.again(x)
        given_back = nullcontext() if self.results is None else self.results.given_back()
        with unremembered(self.layer, self.writes), given_back:
            return first_tensor(self._run(*args, **kwargs))  # type: ignore[return-value]

    def fill(self, x: Tensor) -> Tensor:
        """The same, and what it saved is there again."""
        frame = self.frame
        with saved_tensors_hooks(_nothing, _nothing) if frame is None else frame.filled():
            out = self.again(x)
        if frame is not None:
            frame.check()
        return out


class Start(NamedTuple):
    """From where one can set out: a layer's input, and the generators there."""

    x: Kept
    random: RandomState


class Piece:
    """One segment in one forward.

    Args:
        segment: of the policy.
        start: its input, where that is kept; None: it follows from that of a piece before.
        before: the piece before; None where start is given.
    """

    def __init__(self, segment: Segment, start: Start | None, before: Piece | None, device: str) -> None:
        self.segment, self._start, self._before = segment, start, before
        self._passing: Start | None = None  # kept within a backward
        self.learns = False  # whether its first layer's input has a gradient
        self.calls: list[Call] = []
        self._autocast = autocasts(device)

    def compute(self) -> None:
        """Runs the segment's layers again, and fills what they saved."""
        way: list[Piece] = [self]
        while way[-1]._nearest is None:
            assert way[-1]._before is not None
            way.append(way[-1]._before)
        begin = way[-1]._nearest
        assert begin is not None
        with as_it_was(self._autocast):
            begin.random.set()
            x = begin.x.again()
            with torch.no_grad():
                for piece, following in zip(way[:0:-1], way[-2::-1]):
                    for call in piece.calls:
                        x = call.again(x)
                    if following is not self and following.segment.start in self.segment.keeps:
                        following._pass_by(x)
                x = x.detach()
            with torch.enable_grad():
                x.requires_grad_(self.learns)
                for call in self.calls:
                    x = call.fill(x)
        self._passing = None
        self._forget_later()

    @property
    def _nearest(self) -> Start | None:
        return self._start or self._passing

    def _pass_by(self, x: Tensor) -> None:
        """Backward is on its way to a later piece, and will come back for this one."""
        self._passing = Start(Kept(x, in_backward, f"the input of {self.calls[0].where}"), RandomState.now())
        self._forget_later()

    def _forget_later(self) -> None:
        """When backward is over, what it did not ask for goes, as where a graph is kept, or only some gradients are taken."""
        if torch._C._current_graph_task_id() < 0:
            return
        me = weakref.ref(self)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _forget(me()))


def _forget(piece: Piece | None) -> None:
    if piece is not None:
        piece._passing = None
        for call in piece.calls:
            if (frame := call.frame) is not None:
                frame.forget()


def _nothing(_: Any) -> Any:
    """Nobody will ask for it."""


def in_backward(x: Tensor) -> Callable[[], Tensor]:
    """Keeps x for as long as a backward takes."""
    return lambda: x


class Chain:
    """The layers of one model, under a policy.

    Args:
        policy: which.
        names: of the layers, in order.
        keep: what kept inputs pass through.
        operators: whose results are kept, too (operators.py).
    """

    def __init__(
        self, policy: Policy, names: Sequence[str], keep: Keep, operators: frozenset[str] = frozenset()
    ) -> None:
        self.policy, self.names, self.keep, self.operators = policy, list(names), keep, operators
        self._segments = [policy.segment_of(i) for i in range(policy.layers)]

    def call(self, layer: nn.Module, i: int, first: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a layer's call comes to."""
        segment = self._segments[i]
        if segment is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        name = self.names[i]
        x = args[0] if args else kwargs.get(first)
        if not isinstance(x, Tensor):
            raise EmuError(
                f"{name} is called with a {type(x).__name__} first, where a checkpointed layer takes its activations",
                "let its first argument be one tensor of activations",
            )
        link: Link | None = getattr(x, "_emu_link", None)
        piece = self._piece(i, segment, x, link)
        goes_on = link is not None and piece.calls and link.piece() is piece
        follows = link is not None and piece._start is None
        random = None
        if goes_on or follows:
            assert link is not None
            now = RandomState.now()
            random = None if link.random.same(now) else now
        elif piece._start is None:
            raise AssertionError("a piece without a start follows another")
        frame = Frame(name, piece.compute)
        arguments = Arguments(args, kwargs, self.keep, name, but=x)
        call = Call(layer, run, arguments, frame, random)
        if not piece.calls:
            piece.learns = x.requires_grad
        version, buffers = x._version, counted(layer)
        if self.operators:
            call.results = Results(self.operators, self.keep, name)
        with frame.empty(), nullcontext() if call.results is None else call.results.noting():
            out = run(*args, **kwargs)
        if x._version != version and not piece.calls and piece._start is not None:
            raise EmuError(
                f"{name} writes into its input in place, which is kept to compute it again from",
                "let it write elsewhere (x = x + y, not x += y; inplace=False), or leave that layer out of checkpointing",
            )
        call.writes = written(buffers)
        piece.calls.append(call)
        if (result := first_tensor(out)) is not None:
            result._emu_link = Link(weakref.ref(piece), i, result._version, RandomState.now())  # type: ignore[attr-defined]
        return out

    def _piece(self, i: int, segment: Segment, x: Tensor, link: Link | None) -> Piece:
        """The piece that a call belongs to."""
        before = link.piece() if link is not None else None
        whole = link is not None and link.layer < i and link.version == x._version
        own = segment.start == segment.source
        if before is not None and whole:
            assert link is not None
            if before.segment is segment:
                return before
            if not own:
                return Piece(segment, None, before, x.device.type)
        if before is None and link is not None and whole:
            pass  # nothing of the layers before is needed: as good as a beginning
        elif not (own and segment.start == i) and i and not x.is_leaf:
            raise self._no_chain(i, link)
        where = f"the input of {self.names[i]}"
        return Piece(segment, Start(Kept(x, self.keep, where), RandomState.now()), None, x.device.type)

    def _no_chain(self, i: int, link: Link | None) -> EmuError:
        name, policy = self.names[i], self.policy.name
        how = "checkpoint every layer by itself: checkpoint=full"
        if link is None:
            return EmuError(
                f"checkpoint={policy} computes {name} again from layers before it, but it is not called with what "
                f"{self.names[i - 1]} returned",
                f"call layers one after the other with nothing in between; or {how}",
            )
        if link.layer >= i:
            return EmuError(
                f"{name} is called after {self.names[link.layer]}, which comes after it in the list of layers",
                f"register layers in the order of their use; or {how}",
            )
        return EmuError(
            f"what {self.names[link.layer]} returned was overwritten in place before {name} was called with it",
            f"write elsewhere (x = x + y, not x += y) between layers; or {how}",
        )

    def __deepcopy__(self, memo: Any) -> Chain:
        made = memo[id(self)] = Chain(self.policy, self.names, self.keep, self.operators)
        return made


def first_tensor(out: Any) -> Tensor | None:
    """A layer's activations: what it returns, or the first of it."""
    if isinstance(out, tuple) and out:
        out = out[0]
    return out if isinstance(out, Tensor) else None
