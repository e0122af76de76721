"""A chain of layers under a checkpointing policy: what each call of a layer comes to.

Each layer's call stays where it is in the model's own forward; only what it saves for backward is left out (frames.py). It is
noted down in a Piece, which is one segment of the policy in one forward. The output of a layer carries a link to its piece, so
the next layer, called with exactly that output, goes on there: microbatches may be under way in any number, and any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.checkpointing.frames import Frame
from emu.parallel.checkpointing.keeping import Arguments, Keep, Kept
from emu.parallel.checkpointing.operators import Results
from emu.parallel.checkpointing.pieces import Call, Link, Piece, Start, first_tensor
from emu.parallel.checkpointing.policy import Policy, Segment
from emu.parallel.checkpointing.surroundings import RandomState
from emu.spmd import EmuError


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
        self._segments = policy.of_layers()

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
        link = link if link is not None and link.chain is self else None
        piece = self._piece(i, segment, x, link)
        random = None
        if link is not None and (piece.calls or piece.follows):
            now = RandomState.now()
            random = None if link.random.same(now) else now
        frame = Frame(name, piece.compute)
        arguments = Arguments(args, kwargs, self.keep, name, but=x)
        call = Call(layer, run, arguments, frame, random, x.device.type)
        if not piece.calls:
            piece.learns = x.requires_grad
        version = x._version
        if self.operators:
            call.results = Results(self.operators, self.keep, name)
        with frame.empty(), nullcontext() if call.results is None else call.results.noting():
            out = run(*args, **kwargs)
        if x._version != version and not piece.calls:
            raise EmuError(
                f"{name} writes into its input in place, which may be kept to compute it again from",
                "let it write elsewhere (x = x + y, not x += y; inplace=False), or leave that layer out of checkpointing",
            )
        call.over()
        piece.calls.append(call)
        result: Any = first_tensor(out)
        if result is not None:
            end = Link(self, weakref.ref(piece), len(piece.calls), i, result._version, RandomState.now())
            result._emu_link = end
        return out

    def _piece(self, i: int, segment: Segment, x: Tensor, link: Link | None) -> Piece:
        """The piece that a call belongs to."""
        before = link.piece() if link is not None else None
        own = segment.source == segment.start
        # Whether x is what a layer before returned; whether the way through the layers ends there.
        intact = link is not None and link.layer < i and link.version == x._version
        ends = intact and before is not None and link is not None and link.calls == len(before.calls)
        if ends and before is not None:
            if before.segment is segment and not before.followed:
                return before
            if before.segment is not segment and not own:
                before.followed = True
                return Piece(segment, None, before)
        begins = i == 0 or x.is_leaf or (own and i == segment.start)
        # As good as a beginning: nothing before is needed any more, or a segment's first layer was left out.
        begins = begins or (intact and (before is None or (own and before.segment is not segment)))
        if not begins:
            raise self._no_chain(i, x, link)
        start = Start(Kept(x, self.keep, f"the input of {self.names[i]}"), RandomState.now())
        return Piece(segment, start, None)

    def _no_chain(self, i: int, x: Tensor, link: Link | None) -> EmuError:
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
        if x._version == link.version:
            return EmuError(
                f"{name} is called with what {self.names[link.layer]} returned, and so was another layer: checkpoint={policy} "
                "follows one way through its layers",
                how,
            )
        return EmuError(
            f"what {self.names[link.layer]} returned was overwritten in place before {name} was called with it",
            f"write elsewhere (x = x + y, not x += y) between layers; or {how}",
        )

    def __deepcopy__(self, memo: Any) -> Chain:
        made = memo[id(self)] = Chain(self.policy, self.names, self.keep, self.operators)
        return made
