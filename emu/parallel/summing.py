"""The gradients of a whole model: summed over ranks as backward gives them, in one order, and divided once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from emu.parallel.gathering import Gathering
from emu.parallel.gradients import Gradients
from emu.parallel.scaling import UNKNOWN
from emu.spmd import EmuError, Group, Rank

PASS = 0x7FFFFFFF  # in place of autograd's number, of several of its backwards together


class Summing:
    """What a backward does to gradients on its way, and what makes them those of a step.

    Args:
        gradients: in the order in which ranks reduce them.
        group: the ranks along the axes that cut the batch.
        gathering: of sharded parameters, which come and go with a backward; or None.
        find_unused: whether a missing gradient is to be understood, and not an error.
        everyone: all ranks that the model is spread over (of a pipeline, the stage), where those are more than the group's.
        names: of all of a pipeline's parameters, of which this stage has some; None: there is no other stage.

    Attributes:
        finished: whether the gradients are those of a step: complete, and divided.
        waits: whether a backward ends with its gradients there; False where `finish` follows at once, and waits itself.
        scaled_by: the LossScale that they carry, or None; UNKNOWN; DIVIDED once an optimizer has divided it out.
        unsettled: whether an OptimisticStep has begun a step and not validated it.
    """

    def __init__(
        self,
        gradients: Sequence[Gradients],
        rank: Rank,
        group: Group,
        gathering: Gathering | None,
        find_unused: bool,
        everyone: Group | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.gradients, self.rank, self.everyone, self.names = list(gradients), rank, everyone, names
        here = [name for g in self.gradients for name in g.shards.flat.names]
        self._number = {name: i for i, name in enumerate(here if names is None else names)}
        self.group = group if everyone is None else everyone
        self._askers = self.group if names is None else rank.group()
        self.find_unused = find_unused
        self.finished, self.waits, self.unsettled = False, True, False
        self.scaled_by: Any = UNKNOWN
        self.steps = 0  # that an optimizer has taken
        self._gathering = gathering
        self._syncs = True
        self._reduced = 0  # vectors that the backward under way has begun to reduce
        self._versions: list[int] = []  # of parameters, at the first backward of a step
        self._in_backward = -1  # autograd's number of the backward under way
        for vector in self.gradients:
            for i, p in enumerate(vector.shards.parameters):
                p.register_post_accumulate_grad_hook(self._receiver(vector, i))

        elsewhere = [p for vector in self.gradients if not vector.shards.in_place for p in vector.shards.parameters]
        if elsewhere:
            refuse_torchs_own(elsewhere)

    def _receiver(self, gradients: Gradients, index: int) -> Any:
        return lambda p: self._received(gradients, index)

    @property
    def pinned(self) -> bool:
        """Whether whole parameters are held to be read."""
        return self._gathering is not None and self._gathering.pinned

    @property
    def unfinished(self) -> bool:
        """Whether there are sums of earlier backwards, not finished and not forgotten."""
        return not self.finished and any(g.used for g in self.gradients) and not self._torch_forgot()

    def check_settled(self) -> None:
        """Raises an EmuError if an optimistic step is to be validated yet."""
        if self.unsettled:
            raise EmuError(
                "a step was taken in advance, and it is not known yet whether it holds",
                "call validate() of the OptimisticStep first: before the next backward, step, zero_grad, evaluate, save or "
                "load, and before parameters or gradients are gathered",
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A backward within it adds to this rank's own gradients only."""
        outer, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = outer

    def begin(self, steps: int) -> None:
        """A backward begins, of a loss that was computed after so many steps. Called within it.

        Raises:
            EmuError: the gradients of the last step were not forgotten.
        """
        self.check_begin(steps)
        if torch.is_grad_enabled():
            raise EmuError(
                "backward(create_graph=True) would add to gradients that are summed over ranks on the way",
                "take second derivatives with torch.autograd.grad inside loss_sum, and call a plain backward()",
            )
        task = torch._C._current_graph_task_id()
        if self._in_backward in (task, PASS):  # of a sum of several losses this is not the first
            return
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._enter(task)

    def check_begin(self, steps: int) -> None:
        """Raises an EmuError where a backward, of a loss that was computed after so many steps, may not begin."""
        if self.finished and self._torch_forgot():
            self.forget()
        if self.finished:
            raise EmuError(
                "a backward would add to gradients that are divided already",
                "call zero_grad() after the step: this model's, its optimizer's, or that of torch's own which sets gradients to "
                "None",
            )
        if steps != self.steps:
            raise EmuError(
                "this loss was computed before the last step: its backward would mix old activations with new parameters",
                "call backward before the optimizer's step, or compute the loss again",
            )

    @contextmanager
    def backward_pass(self, steps: int, weights: Sequence[Tensor] = ()) -> Iterator[None]:
        """Backwards within it, of whatever roots, are one of this model's, of a forward that ran after so many steps.

        Args:
            weights: parameters that it reaches without passing their units' outputs, which would have them gathered.

        Raises:
            EmuError: as `begin`.
        """
        self.check_begin(steps)
        self._enter(PASS)
        if self._gathering is not None and weights:
            self._gathering.enter_weights({id(p) for p in weights})
        try:
            yield
        except BaseException:
            self._in_backward = -1
            raise
        self._end()

    def _enter(self, task: int) -> None:
        self._check_untouched()
        self._reduced, self._in_backward = 0, task
        for gradients in self.gradients:
            gradients.arrived.clear()
            gradients.before()
        if self._gathering is not None:
            self._gathering.enter_backward(self._gathering.root)

    def _check_untouched(self) -> None:
        """Raises an EmuError if parameters changed since the first backward of the step."""
        vectors = [gradients.shards for gradients in self.gradients if gradients.shards.in_place]
        now = [p._version for shards in vectors for p in shards.parameters]
        if any(gradients.used for gradients in self.gradients) and now != self._versions:
            raise EmuError(
                "parameters changed after a backward whose gradients are not finished: they are sums, not yet divided",
                "call finish(tokens) after the last backward of a step and before the optimizer's step",
            )
        self._versions = now

    def _torch_forgot(self) -> bool:
        """Whether an optimizer of torch's own has set every gradient to None."""
        parameters = [p for g in self.gradients if g.shards.in_place for p in g.shards.parameters]
        return bool(parameters) and all(p.grad is None for p in parameters)

    def _received(self, gradients: Gradients, index: int) -> None:
        if gradients.shards.parameters[index].grad is None:
            return  # a region's entrance offers gradients of all its maps, of which this forward used some
        if self._in_backward < 0:
            raise EmuError(
                f"rank {self.rank}: a backward reached {gradients.shards.flat.names[index]} from a loss that is not this model's",
                "take the loss from .loss_sum(x, y) of the DataParallel, not of the model inside it",
            )
        if not gradients.shards.here:
            raise EmuError(
                f"rank {self.rank}: backward reached {gradients.shards.flat.names[index]} before it was gathered again",
                "a tensor of its unit went to the loss by a way that emu does not see: return it from the unit's forward",
            )
        if index in gradients.arrived and self._syncs and gradients in self.gradients[: self._reduced]:
            raise EmuError(
                f"rank {self.rank}: {gradients.shards.flat.names[index]} got a second gradient in one backward, after its "
                "first was sent to be summed: its module is called in several reentrant checkpoints",
                "say checkpoint(..., use_reentrant=False), or put backward within no_sync()",
            )
        gradients.receive(index)
        if not gradients.complete:
            return
        if self._gathering is not None:
            self._gathering.done(gradients.shards)
        if self._syncs:
            self._reduce_in_order(lambda g: g.complete)

    def _reduce_in_order(self, ready: Any) -> None:
        """Ranks must reduce in one order, though their gradients may come in another."""
        while self._reduced < len(self.gradients) and ready(self.gradients[self._reduced]):
            self.gradients[self._reduced].reduce()
            self._reduced += 1
            if self._reduced > 1 and self.gradients[self._reduced - 2].takes_more:
                self.gradients[self._reduced - 2].collect()  # at most two buckets at a time take more than they keep

    def _end(self) -> None:
        self._in_backward = -1
        if self._syncs:
            self._reduce_in_order(lambda gradients: True)
            for gradients in self.gradients if self.waits else ():
                if gradients.shards.place.stage < 2:
                    gradients.collect()  # .grad is there after backward, as everywhere
        if self._gathering is not None:
            self._gathering.end_backward()

    def _look_for_unused(self) -> None:
        """A parameter that no rank used has no gradient, as on a single device; one that some used has theirs."""
        flags = [i in g.used for g in self.gradients for i in range(len(g.shards.parameters))]
        if not self.find_unused:
            if not all(flags):
                names = [name for g in self.gradients for name in g.shards.flat.names]
                missing = [name for name, used in zip(names, flags) if not used]
                raise EmuError(
                    f"rank {self.rank}: backward gave no gradient to {', '.join(missing[:5])}{' ...' if missing[5:] else ''}",
                    "if that is meant, say find_unused=True; if not, the loss does not depend on it, or no backward ran",
                )
            return
        numbers = [self._number[name] for g in self.gradients for name in g.shards.flat.names]
        words = [0] * len(self._number)
        for number, flag in zip(numbers, flags):
            words[number] = int(flag)
        used = torch.tensor(words, dtype=torch.int32)  # made on the host: of one made on "meta", torch tells nobody
        used = used.to(self.rank.device)
        self._askers.all_reduce(used, op="max", name="used parameters")
        if all(flags):  # nothing to learn: the host need not wait
            return
        found = words if used.is_meta else used.tolist()
        each = iter(numbers)
        for g in self.gradients:
            g.nowhere = {i for i in range(len(g.shards.parameters)) if not found[next(each)]}

    def finish(self, tokens: float) -> None:
        """Waits for all sums, and divides them.

        Raises:
            EmuError: no tokens; gradients that were finished before; or a parameter without a gradient.
        """
        if not tokens > 0:
            raise EmuError("the batch has no tokens to learn from", "give at least one label that is not -100")
        if self.finished:
            raise EmuError(
                "the gradients are finished already: a second division would shrink them", "zero_grad() first"
            )
        self._check_untouched()
        for gradients in self.gradients[self._reduced :]:
            gradients.reduce()
        self._reduced = 0
        self._look_for_unused()
        for gradients in self.gradients:
            gradients.finish(tokens)
        self.finished = True

    def forget(self) -> None:
        """Before a new step."""
        for gradients in self.gradients:
            gradients.forget()
        self.finished, self.waits = False, True
        self.scaled_by = UNKNOWN
        self._reduced = 0


_elsewhere: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by id


def refuse_torchs_own(parameters: Sequence[Tensor]) -> None:
    """From now on an optimizer of torch's own that steps on these parameters is an error: it finds no gradients there."""
    _elsewhere.update((id(p), p) for p in parameters)
    _watch_optimizers()


@cache
def _watch_optimizers() -> None:
    """One hook for all parameters: every step of any optimizer calls it."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in (group["params"][0], group["params"][-1]) if group["params"] else ():  # these tell
            if _elsewhere.get(id(p)) is p:
                raise EmuError(
                    f"{type(optimizer).__name__} steps on parameters whose gradients, or whose values, it does not find here",
                    "make it with .optimizer(torch.optim.AdamW, lr=...) of the DataParallel",
                )
