"""One segment of a policy in one forward: the calls of its layers, noted down, and how they are made again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from emu.parallel.checkpointing.frames import Frame
from emu.parallel.checkpointing.keeping import Arguments, Kept, after_backward
from emu.parallel.checkpointing.operators import Results
from emu.parallel.checkpointing.policy import Segment
from emu.parallel.checkpointing.remembered import Before, Memory
from emu.parallel.checkpointing.surroundings import RandomState, autocast_as, autocasts, undrawn
from emu.spmd import EmuError


class Link(NamedTuple):
    """On a layer's output: where it came from.

    Fields:
        chain: of layers; a model may have several.
        piece: that the layer was called in; None when nothing needs it any more.
        calls: how many the piece had with it: there is but one way through a piece.
        layer: its place in the chain.
        version: of the output, by which writes are noticed.
        random: the generators after the layer.
    """

    chain: Any
    piece: weakref.ref[Piece]
    calls: int
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
        device: the kind that it runs on.
    """

    def __init__(
        self,
        layer: nn.Module,
        run: Callable[..., Any],
        arguments: Arguments,
        frame: Frame,
        random: RandomState | None,
        device: str,
    ) -> None:
        self.layer, self._run, self._arguments, self._random = layer, run, arguments, random
        self.where = frame.where
        self._frame = weakref.ref(frame)  # which holds on to the piece: it dies with the graph
        self._training = layer.training
        self._versions = _versions(layer)
        self.results: Results | None = None  # of operators that do not run again
        self._before: Before | None = Before(layer, frame.where)
        self._memory: Memory | None = None
        self._autocast = autocasts(device)

    @property
    def frame(self) -> Frame | None:
        return self._frame()

    def over(self) -> None:
        """The first call is over."""
        assert self._before is not None
        self._memory, self._before = self._before.after(), None

    def again(self, x: Tensor) -> Tensor | None:
        """The layer's output once more; None if it is no tensor."""
        if self._training != self.layer.training:
            raise EmuError(
                f"{self.where} was {'' if self._training else 'not '}in training when it was called, and is "
                f"{'not ' if self._training else ''}now that it is computed again",
                "call train() or eval() after backward",
            )
        if self._versions != _versions(self.layer):
            raise EmuError(
                f"parameters of {self.where} changed between its forward and its backward: computed again it would be another",
                "call backward before the optimizer's step, or compute the loss again",
            )
        if self._random is not None:
            self._random.set()
        args, kwargs = self._arguments.again(x)
        given_back = nullcontext() if self.results is None else self.results.given_back()
        assert self._memory is not None
        with self._memory.back(), autocast_as(self._autocast), given_back:
            return first_tensor(self._run(*args, **kwargs))

    def fill(self, x: Tensor) -> Tensor | None:
        """The same, and what it saved is there again."""
        frame = self.frame
        with saved_tensors_hooks(_nothing, _nothing) if frame is None else frame.filled():
            out = self.again(x)
        if frame is not None:
            frame.check()
        return out


def _needed(out: Tensor | None, call: Call) -> Tensor:
    """What a call returned, from which the next one is computed again."""
    if out is None:
        raise EmuError(
            f"{call.where} returns no tensor of activations, from which layers after it could be computed again",
            "let it return its activations, or a tuple with these first",
        )
    return out


def _versions(layer: nn.Module) -> list[int]:
    return [p._version for p in layer.parameters()]


def _nothing(_: Any) -> Any:
    """Nobody will ask for it."""


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

    def __init__(self, segment: Segment, start: Start | None, before: Piece | None) -> None:
        self.segment, self._start, self._before = segment, start, before
        self._passing: Start | None = None  # kept within a backward
        self.followed = False  # whether there is a piece after it
        self.learns = False  # whether its first layer's input has a gradient
        self.calls: list[Call] = []

    def compute(self) -> None:
        """Runs the segment's layers again, and fills what they saved."""
        way: list[Piece] = [self]
        while way[-1]._nearest is None:
            assert way[-1]._before is not None
            way.append(way[-1]._before)
        begin = way[-1]._nearest
        assert begin is not None
        with undrawn():
            begin.random.set()
            x = begin.x.again()
            with torch.no_grad():
                for piece, following in zip(way[:0:-1], way[-2::-1]):
                    for call in piece.calls:
                        x = _needed(call.again(x), call)
                    if following is not self and following.segment.start in self.segment.keeps:
                        following._pass_by(x)
                x = x.detach()
            with torch.enable_grad():
                x.requires_grad_(self.learns)
                last = self.calls[-1]
                for call in self.calls[:-1]:
                    x = _needed(call.fill(x), call)
                last.fill(x)  # whose output nobody needs
        self._passing = None
        after_backward(self._forget)

    @property
    def follows(self) -> bool:
        """Whether its input follows from a piece before."""
        return self._start is None

    @property
    def _nearest(self) -> Start | None:
        return self._start or self._passing

    def _pass_by(self, x: Tensor) -> None:
        """Backward is on its way to a later piece, and will come back for this one."""
        self._passing = Start(Kept(x, in_backward, f"the input of {self.calls[0].where}"), RandomState.now())
        after_backward(self._forget)

    def _forget(self) -> None:
        """What backward did not ask for goes, as where a graph is kept, or only some gradients are taken."""
        self._passing = None
        for call in self.calls:
            if (frame := call.frame) is not None:
                frame.forget()


def in_backward(x: Tensor) -> Callable[[], Tensor]:
    """Keeps x for as long as a backward takes."""
    return lambda: x


def first_tensor(out: Any) -> Tensor | None:
    """A layer's activations: what it returns, or the first of it."""
    if isinstance(out, (tuple, list)) and out:
        out = out[0]
    return out if isinstance(out, Tensor) else None
