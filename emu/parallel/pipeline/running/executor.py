"""Doing what a schedule says: one batch through one rank's stages, action by action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from emu.parallel.checkpointing.offload import Offload, Visit
from emu.parallel.pipeline import actions as a
from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.running.form import Form
from emu.parallel.pipeline.running.mail import Mail
from emu.parallel.pipeline.running.split import Split
from emu.parallel.pipeline.running.stages import Stages


class Context(NamedTuple):
    """What surrounds the passes of a stage.

    Fields:
        forward: entered around each forward: precision, and the gathering of sharded parameters.
        backward: entered around each backward: the summing of gradients. Given how many steps came before its forward,
            and the stage's parameters where it is of weights alone.
        steps: how many there were by now.
        recompute: whether a stage keeps its input alone, and computes the rest again in its backward.
    """

    forward: Callable[[], AbstractContextManager[Any]]
    backward: Callable[..., AbstractContextManager[Any]]
    steps: Callable[[], int]
    recompute: bool = False


class Kept(NamedTuple):
    """What a forward leaves for its backward.

    Fields:
        incoming: the stage's input; None on the first.
        output: where the gradient of its output enters the graph; None if it needs none.
        loss: the same of its part of the loss.
        one: the gradient of that.
        split: what takes its backward apart, where the schedule does.
        last: its last layer, if what layers keep waits in the host's memory; see checkpointing/offload.py.
    """

    incoming: Tensor | None
    output: GradientEdge | None
    loss: GradientEdge | None
    one: Tensor | None
    split: Split | None
    last: Visit | None = None


class Execution:
    """One batch on one rank.

    Args:
        stages: those of this rank.
        mail: what joins it to the others; None where it is alone.
        row: what this rank does.
        microbatches: (x, y) of each.
        context: what surrounds passes.
        trains: False runs forwards alone.
    """

    def __init__(
        self,
        stages: Stages,
        mail: Mail | None,
        row: Sequence[Action],
        microbatches: Sequence[tuple[Tensor, Tensor]],
        context: Context,
        trains: bool = True,
    ) -> None:
        self.stages, self.mail, self.row, self.microbatches = stages, mail, row, microbatches
        self.context, self.trains = context, trains
        self.splits = any(part.kind == a.I for action in row for part in action.each())
        self.factor = 1.0  # by which losses count in backwards, as a loss scale
        self._begin()

    def _begin(self) -> None:
        self.at = 0  # in the row
        self._steps = self.context.steps()
        self.total: Tensor | None = None  # of the losses computed here
        self._kept: dict[tuple[int, int], Kept] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}  # on their way to the next stage
        self._gradients: dict[tuple[int, int], Tensor] = {}  # of a stage's input, on their way to the one before
        self._forms: dict[tuple[int, int], Form] = {}  # of outputs

    def run(self) -> Tensor | None:
        """Carries out the row. Returns the sum of the losses computed on this rank; None: none was."""
        self._do(len(self.row))
        if self.mail is not None:
            self.mail.finish()
        return self.total

    def _do(self, end: int) -> None:
        while self.at < end:
            if self.mail is not None and self.trains:  # what arrives when follows from backwards, too
                self.mail.release(self.at)
            for part in self.row[self.at].each():
                if self.trains or part.kind in (a.F, a.SEND_F, a.RECV_F):
                    _DO[part.kind](self, part.stage, part.microbatch)
            self.at += 1

    # Forwards in advance, of parameters that may yet prove wrong.

    def warm_up(self) -> None:
        """Carries out what comes before the first backward."""
        self._do(warm_up_of(self.row))

    def start_again(self, rows: Sequence[Sequence[Action]]) -> None:
        """Forgets a warm-up. All ranks must do so: what they sent each other in theirs is received, and forgotten, too.

        Args:
            rows: of all ranks; see `may_start_again`.
        """
        if self.mail is not None:
            sent = [x for row in rows for x in row[: warm_up_of(row)] if x.kind == a.SEND_F]
            for stage, microbatch in ((x.stage + 1, x.microbatch) for x in sent):
                if microbatch is not None and self.mail.places[stage, microbatch] == self.mail.here:
                    self.mail.forget_input(stage, microbatch, self._like(microbatch))
            self.mail.finish()
        self._begin()

    # Messages.

    def _like(self, microbatch: int) -> Any:
        """What every stage knows of a microbatch alike."""
        return tuple(self.microbatches[microbatch][0].shape)

    def _send_output(self, stage: int, microbatch: int) -> None:
        assert self.mail is not None
        output = self._outputs.pop((stage, microbatch))
        form = self._forms[stage, microbatch]
        self.mail.send(a.SEND_F, stage, microbatch, output.contiguous(), self._like(microbatch), form)

    def _send_gradient(self, stage: int, microbatch: int) -> None:
        assert self.mail is not None
        gradient = self._gradients.pop((stage, microbatch))
        self.mail.send(a.SEND_B, stage, microbatch, gradient.contiguous(), self._like(microbatch))

    def _expect_input(self, stage: int, microbatch: int) -> None:
        assert self.mail is not None
        self.mail.expect_input(stage, microbatch, self._like(microbatch))

    def _expect_gradient(self, stage: int, microbatch: int) -> None:
        assert self.mail is not None
        self.mail.expect_gradient(stage, microbatch, lambda: self._forms.get((stage, microbatch)))

    def _incoming(self, stage: int, microbatch: int) -> tuple[Tensor | None, Form | None]:
        """A stage's input, and what is known of it."""
        if not stage:
            return None, None
        here = self._outputs.pop((stage - 1, microbatch), None)
        if here is not None:  # of a stage on this rank
            form = self._forms[stage - 1, microbatch]
        else:
            assert self.mail is not None
            here = self.mail.take(a.F, stage, microbatch)
            form = self.mail.form(stage, self._like(microbatch))
        differs = self.trains and (here.is_floating_point() or here.is_complex())
        return here.requires_grad_() if differs else here, form

    def _gradient_of_output(self, stage: int, microbatch: int) -> Tensor:
        here = self._gradients.pop((stage + 1, microbatch), None)
        if here is not None:
            return here
        assert self.mail is not None
        return self.mail.take(a.B, stage, microbatch)

    # Computation.

    def _forward(self, stage: int, microbatch: int) -> None:
        self.stages.rank.mark(f"{stage}F{microbatch}")
        incoming, form = self._incoming(stage, microbatch)
        given = (stage, incoming, form, *self.microbatches[microbatch])
        split = Split() if self.splits else None
        offload: Offload | None = vars(self.stages.model).get("_offloads")
        before = offload.last if offload is not None else None
        with self.context.forward():
            if split is not None:
                with split:
                    output, loss = self._through(given)
            else:
                output, loss = self._through(given)
        if loss is not None:
            wide = torch.promote_types(loss.dtype, torch.float32)  # a sum in 8 or 11 bits would lose most of its terms
            self.total = loss.detach().to(wide, copy=True) if self.total is None else self.total + loss.detach()
        if output is not None:
            self._outputs[stage, microbatch] = output.detach()
            self._forms[stage, microbatch] = self.stages.form_of(output, form)
        if self.trains:
            edge = get_gradient_edge if split is None else split.edge
            out, own = (edge(t) if t is not None and t.requires_grad else None for t in (output, loss))
            one = torch.ones_like(loss, requires_grad=False) if own is not None and loss is not None else None
            last = offload.last if offload is not None and offload.last is not before else None
            self._kept[stage, microbatch] = Kept(incoming, out, own, one, split, last)

    def _through(
        self, given: tuple[int, Tensor | None, Form | None, Tensor, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not (self.context.recompute and self.trains):
            return self.stages.forward(*given)
        again: Any = checkpoint(self.stages.forward, *given, use_reentrant=False)
        return again

    def _roots(self, stage: int, microbatch: int, kept: Kept) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where a backward starts, and with which gradients."""
        if kept.last is not None:
            kept.last.comes()
        found: list[tuple[GradientEdge, Tensor]] = []
        if kept.loss is not None and kept.one is not None:
            found.append((kept.loss, kept.one if self.factor == 1.0 else kept.one * self.factor))
        if (stage, microbatch) in self._forms:
            gradient = self._gradient_of_output(stage, microbatch)
            if kept.output is not None:
                found.append((kept.output, gradient))
        return [edge for edge, _ in found], [gradient for _, gradient in found]

    def _backward(self, stage: int, microbatch: int) -> None:
        self.stages.rank.mark(f"{stage}B{microbatch}")
        kept = self._kept.pop((stage, microbatch))
        roots = self._roots(stage, microbatch, kept)
        with self.context.backward(self._steps):
            if kept.split is not None:
                kept.split.backward(*roots)
                kept.split.weights()
            elif roots[0]:
                torch.autograd.backward(*roots)
        self._keep_gradient(stage, microbatch, kept.incoming)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        self.stages.rank.mark(f"{stage}I{microbatch}")
        kept = self._kept[stage, microbatch]
        assert kept.split is not None
        roots = self._roots(stage, microbatch, kept)
        with self.context.backward(self._steps):
            kept.split.backward(*roots)
        self._keep_gradient(stage, microbatch, kept.incoming)
        self._kept[stage, microbatch] = Kept(None, None, None, None, kept.split)  # all that W needs

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        self.stages.rank.mark(f"{stage}W{microbatch}")
        kept = self._kept.pop((stage, microbatch))
        assert kept.split is not None
        with self.context.backward(self._steps, self.stages.parameters[stage]):
            kept.split.weights()

    def _keep_gradient(self, stage: int, microbatch: int, incoming: Tensor | None) -> None:
        if incoming is not None:
            found, incoming.grad = incoming.grad, None
            self._gradients[stage, microbatch] = torch.zeros_like(incoming) if found is None else found


def warm_up_of(row: Sequence[Action]) -> int:
    """How many actions of a row come before its first backward."""
    backward = (i for i, action in enumerate(row) if any(part.kind in a.BACKWARD for part in action.each()))
    return next(backward, len(row))


def may_start_again(rows: Sequence[Sequence[Action]]) -> bool:
    """Whether ranks wait in their warm-ups for nothing that others send only after theirs."""
    sent = {(x.stage + 1, x.microbatch) for row in rows for x in row[: warm_up_of(row)] if x.kind == a.SEND_F}
    return all((x.stage, x.microbatch) in sent for row in rows for x in row[: warm_up_of(row)] if x.kind == a.RECV_F)


def _nothing(execution: Execution, stage: int, microbatch: int) -> None:
    """Gathering and freeing are done by the units themselves, as they are used."""


_DO: dict[str, Callable[..., None]] = {
    a.F: Execution._forward,
    a.B: Execution._backward,
    a.I: Execution._backward_input,
    a.W: Execution._backward_weight,
    a.SEND_F: Execution._send_output,
    a.SEND_B: Execution._send_gradient,
    a.RECV_F: Execution._expect_input,
    a.RECV_B: Execution._expect_gradient,
    a.UNSHARD: _nothing,
    a.RESHARD: _nothing,
    a.REDUCE_GRAD: _nothing,
}
