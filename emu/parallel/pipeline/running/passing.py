"""One forward of one stage: what the call of each unit of a model comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from emu.parallel.pipeline.running.elsewhere import Elsewhere, becomes, elsewhere, here
from emu.parallel.pipeline.running.form import DTYPES, Form
from emu.parallel.tensor.arguments import with_first
from emu.spmd import EmuError


class Leaves(BaseException):
    """A stage is over: the next one's first unit was called. No Exception, so that no model catches it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class Staged(Protocol):
    """A model in stages: which pass is under way, if one is, and the number of the last stage."""

    under_way: Pass | None
    last: int


class Placed(nn.Module):
    """What is mixed into the class of every unit."""

    stage: int
    path: str
    first: str
    number: int  # in the order of all units
    of: Staged


class Pass:
    """One forward of one stage.

    Args:
        stage: which.
        incoming: what the stage before sent; None on the first stage.
        form: what is known of it, and of what the units before returned.
        known: of every unit of this stage that was called, by its number: the shape and dtype that it returned.
    """

    def __init__(self, stage: int, incoming: Tensor | None, form: Form | None) -> None:
        self.stage, self.incoming, self.form = stage, incoming, form
        self.entered = False
        self.known: dict[int, tuple[tuple[int, ...], torch.dtype] | None] = {}

    def call(self, unit: Placed, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit's call comes to on this stage."""
        args, kwargs = here(args), here(kwargs)
        if any(type(value) in (list, dict, set) for value in (*args, *kwargs.values())):
            raise EmuError(
                f"{unit.path} is given a list, a dict or a set, into which it may write: other stages would not see it",
                "return what later modules need, and pass tensors or tuples",
            )
        if unit.stage < self.stage:
            return self._elsewhere(unit)
        if unit.stage > self.stage:
            raise Leaves(self._sent(unit, args, kwargs))
        if not self.entered and self.incoming is not None:
            incoming = self.incoming
            if incoming.requires_grad and not torch.is_grad_enabled():
                raise EmuError(
                    f"{unit.path} is called without gradients, as within a reentrant checkpoint: nothing before it would learn",
                    "say checkpoint(..., use_reentrant=False), or Pipeline(recompute=True), which does the same for all",
                )
            args, kwargs = with_first(unit.path, unit.first, args, kwargs, lambda there: becomes(there, incoming))
        self.entered = True
        if lacking := [value for value in (*args, *kwargs.values()) if isinstance(value, Elsewhere)]:
            raise EmuError(
                f"{unit.path} needs {lacking[0]._whose}, which lies before stage {self.stage} and was not sent to it: only the "
                "first argument of a stage's first module is",
                "let the stage begin elsewhere, so that both lie on one; or pass both as one tensor",
            )
        out = run(*args, **kwargs)
        single = isinstance(out, Tensor) and out.dtype in DTYPES
        self.known[unit.number] = (tuple(out.shape), out.dtype) if single else None
        return out

    def _elsewhere(self, unit: Placed) -> Elsewhere:
        """What a unit of an earlier stage returned there."""
        if self.entered:
            raise disorder(f"{unit.path} (stage {unit.stage}) is called after modules of stage {self.stage}")
        assert self.incoming is not None and self.form is not None
        known = self.form.units[unit.number]
        if known is None:
            raise EmuError(
                f"{unit.path} returns no single tensor of activations, so stage {self.stage} cannot do without it",
                "let layers return one tensor each, or let no stage begin after this one",
            )
        return elsewhere(known[0], known[1], self.incoming.device, f"the output of {unit.path}")

    def _sent(self, unit: Placed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The stage's output: the first argument of the next stage's first unit."""
        if unit.stage != self.stage + 1 or not self.entered:
            raise disorder(f"stage {self.stage} calls {unit.path}, which lies on stage {unit.stage}")
        found: list[Any] = []
        with_first(unit.path, unit.first, args, kwargs, found.append)
        sent = found[0]
        if not isinstance(sent, Tensor) or isinstance(sent, Elsewhere) or not differentiable(sent):
            raise EmuError(
                f"the first argument of {unit.path} is no tensor of activations that stage {self.stage} could send",
                "let stages begin at modules whose first argument brings all activations",
            )
        return sent


def differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def disorder(what: str) -> EmuError:
    return EmuError(
        what,
        "stages follow the order in which modules are registered, and must be called in it: say where stages begin by the "
        "names of modules, or register them in the order of their use",
    )
