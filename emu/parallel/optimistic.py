"""A step that does not wait for what it must know: it is taken at once, looked at later, and taken back if it was wrong.

Clipping by the norm of all gradients, and skipping a step where one of them overflowed, need numbers from every stage of a
pipeline. Waiting for them makes all stages end a step together, and closes the parallelogram that zero-bubble schedules
are: stage r would stand still until the last has finished. Instead (Zero Bubble, arXiv 2401.10241, section 4, "bypassing
optimizer synchronizations"):

    step()      first -> last    what all stages before know arrives, and goes on with this stage's own added: overflowed?
                                 how long so far? If that says already that the step will be clipped or skipped, the stage
                                 waits; otherwise it keeps what a step changes, and takes it
    validate()  last -> first    what the last stage knows is all. If nothing is to be clipped or skipped, every step holds.
                                 Otherwise those that were taken are taken back, and with the right factor taken again

Nothing is lost on the way: stages' numbers are joined in the chain's order, as `Optimizer.step` joins them (norms.py), so the
norm has the same bits, and with it the factor, the parameters and the states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emu.parallel.norms import TINY, as_norm, dtype_of, joining, stage_overflow, stage_size
from emu.parallel.optimizer import Optimizer, Stepped
from emu.parallel.rollback import Options, Snapshot
from emu.spmd import EmuError, Group, Rank

SO_FAR, ALL = "known so far", "known of all"
MARGIN = 2.0**-20  # a norm so close to the limit is taken for one above it, whatever dtype the factor is computed in


class Known(NamedTuple):
    """What the host knows of some stages' gradients.

    Fields:
        overflow: whether any is not finite; False where nobody asked.
        size: their sum of squares, or largest entry; 0.0 where nobody asked.
    """

    overflow: bool = False
    size: float = 0.0


class Taken(NamedTuple):
    """A step between step() and validate().

    Fields:
        versions: of gradients, which tell whether somebody wrote into them.
        views: the gradients that the model's parameters hold.
        dtype: of the norm.
        before: options of the parameter groups before the step.
        after: the same after it.
        snapshot: what it changed; None where it was not taken yet, or is certain.
        known: of all stages up to this one.
    """

    versions: list[int]
    views: Sequence[tuple[Tensor, Tensor | None]]
    dtype: torch.dtype
    before: Options
    after: Options
    snapshot: Snapshot | None
    known: Known


class OptimisticStep:
    """Steps of an optimizer on one stage of a pipeline, taken in advance and validated later.

        optimist = OptimisticStep(optimizer, rank.group("pp"))
        for ...:
            ...                                 # backwards, finish(tokens)
            optimist.step()                     # does not wait for later stages
            ...                                 # may be: first forwards of the next step
            stepped = optimist.validate()       # before the next backward, step, zero_grad, evaluate, save, load
            if optimist.stale:
                ...                             # those forwards again: their parameters are no more

    Parameters, states, LossScale and Stepped end as those of `Optimizer.step()`, to the bit; only gradients that a step has
    skipped may be left without their loss scale. With validate() before the first
    forward a stage hides no more than the step itself; to hide the wait, forwards must come in between. A forward that did
    and is `stale` cannot be used by mistake: its loss refuses a backward. What it did besides (random numbers, statistics of
    batch norms) is for who runs it to take back.

    Ranks that share a stage (dp, tp) reduce what they know among themselves at once, and so decide alike; each is on a chain
    of its own.

    Attributes:
        stale: whether the last validate() found that a step, on some stage, was not as hoped; the same on all stages.
        taken_back: how many steps this rank took back so far.
        snapshot_bytes: what the last step() kept so as to be able to.

    Args:
        optimizer: of this rank's stage. Hooks of torch's optimizer run once more where a step is taken again.
        chain: the stages, one rank each, first to last; a group of its own, or that of the pipeline's messages, which then
            keep their order. None: the optimizer's. An optimizer without one gets it, also for its own `step()`.

    Raises:
        EmuError: another chain than the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, chain: Group | None = None) -> None:
        known = optimizer.chain
        if chain is None and known is None:
            raise EmuError(
                "there is no chain of stages along which to know the norm",
                'say OptimisticStep(optimizer, rank.group("pp"))',
            )
        if chain is not None and known is not None and chain.members != known.members:
            raise EmuError(
                f"the optimizer's norm is over the stages {list(known.members)}, the chain has {list(chain.members)}",
                "give both the same group",
            )
        found = chain if chain is not None else known
        assert found is not None
        self.chain = found
        self.optimizer = optimizer
        optimizer.chain = known if known is not None else chain
        self.stale, self.taken_back, self.snapshot_bytes = False, 0, 0
        self._taken: Taken | None = None
        self._sent: list[Any] = []  # works whose buffers must stay until they are received

    def __repr__(self) -> str:
        now = "to be validated" if self._taken is not None else "settled"
        return f"OptimisticStep({self.optimizer!r}, stage {self.chain.rank} of {self.chain.size}, {now})"

    @property
    def pending(self) -> bool:
        """Whether a step is still to be validated."""
        return self._taken is not None

    @property
    def _last(self) -> bool:
        return self.chain.rank == self.chain.size - 1

    @property
    def _asks(self) -> bool:
        """Whether anything must be known of other stages."""
        return self.optimizer.clip is not None or self.optimizer.scale is not None

    def step(self) -> None:
        """Takes the step on what is known so far, or leaves it to validate() if that speaks against it.

        Raises:
            EmuError: what `Optimizer.step` raises, or a step before this one that was not validated.
        """
        optimizer, chain = self.optimizer, self.chain
        optimizer.check_settled()
        earlier: Any = None
        if self._asks and chain.rank:
            earlier = chain.recv(self._empty(), chain.rank - 1, async_op=True, name=SO_FAR)
        given = optimizer.begin()
        state = self._state(given, earlier) if self._asks else None
        if state is not None and chain.size > 1:
            self._send(state, *((chain.rank - 1, ALL) if self._last else (chain.rank + 1, SO_FAR)))
        known = Known() if state is None else _read(state, optimizer.summing.rank)
        optimizer.summing.unsettled = True
        before, snapshot, dtype = Options(optimizer.torch), None, dtype_of(given)
        gradients = optimizer.summing.gradients
        views = [(p, p.grad) for g in gradients if g.shards.in_place for p in g.shards.parameters]
        certain = self._last or state is None
        if certain and not known.overflow:
            self._take(given, known)
        versions = [g.own()._version for g in gradients]
        if not certain and self._holds(known):
            snapshot = Snapshot(optimizer)
            optimizer.apply()
        for g in gradients:
            g.release()  # copies in the optimizer's precision: they are made again if they are needed again
        self.snapshot_bytes = snapshot.nbytes if snapshot is not None else 0
        after = before if snapshot is None else Options(optimizer.torch)
        self._taken = Taken(versions, views, dtype, before, after, snapshot, known)

    def validate(self) -> Stepped:
        """Finishes the step that step() began: it holds, or is taken again with the right factor, or was to be skipped.

        Returns:
            What `Optimizer.step()` would have.

        Raises:
            EmuError: no step() before it; gradients that were forgotten or written into since; parameters held by gathered().
        """
        optimizer, chain = self.optimizer, self.chain
        taken = self.check()
        known = taken.known
        if self._asks and not self._last:
            # On a stream of its own: the host looks at what comes, and need not wait for the forwards that are under way.
            with optimizer.summing.rank.stream("validation"):
                state = chain.recv(self._empty(), chain.rank + 1, name=ALL)
                if chain.rank:
                    self._send(state, chain.rank - 1, ALL)
                known = _read(state, optimizer.summing.rank)
        self._taken, optimizer.summing.unsettled = None, False
        self.stale = chain.size > 1 and not self._holds(known)
        if self.stale:
            if not self._last:
                self._take_again(taken, known)
            optimizer.summing.steps += 1  # no loss from before has a backward
        return optimizer.end(self._norm(known, taken.dtype), known.overflow)

    def _state(self, given: list[Tensor], earlier: Any) -> Tensor:
        """What is known of all stages up to this one: whether any overflowed, and their gradients' size. float64, [2]."""
        optimizer, where = self.optimizer, self.optimizer.summing.rank.device
        bad = size = torch.zeros((), dtype=torch.float64, device=where)
        if optimizer.scale is not None:
            bad = stage_overflow(given, optimizer.summing.group, where).double()
            optimizer.unscale(given)
        if optimizer.clip is not None:
            size = stage_size(given, optimizer.vectors, optimizer.norm, optimizer.summing.everyone, where).double()
        if earlier is not None:
            bad_before, size_before = earlier.wait().unbind()
            bad, size = torch.maximum(bad_before, bad), joining(optimizer.norm)(size_before, size)
        return torch.stack([bad, size])

    def _empty(self) -> Tensor:
        return torch.empty(2, dtype=torch.float64, device=self.optimizer.summing.rank.device)

    def _send(self, state: Tensor, to: int, name: str) -> None:
        """Sends without waiting; what the last step sent to that stage was received long ago."""
        for work in self._sent[:-1]:
            work.wait()
        self._sent = [*self._sent[-1:], self.chain.send(state, to, async_op=True, name=name)]

    def _holds(self, known: Known) -> bool:
        """Whether nothing is to be clipped or skipped, so far as this is known. All stages find the same of the same."""
        optimizer = self.optimizer
        norm = math.sqrt(known.size) if optimizer.norm == 2.0 else known.size
        return not known.overflow and (optimizer.clip is None or norm * (1 + MARGIN) + TINY <= optimizer.clip)

    def _norm(self, known: Known, dtype: torch.dtype) -> Tensor | None:
        optimizer = self.optimizer
        if known.overflow or optimizer.clip is None:
            return None
        size = torch.full((), known.size, dtype=torch.float64, device=optimizer.summing.rank.device)
        return as_norm(size, optimizer.norm, dtype)

    def _take(self, given: list[Tensor], known: Known) -> None:
        """The step, clipped if it is to be, where all is known."""
        total = self._norm(known, dtype_of(given))
        if total is not None:
            self.optimizer.clip_by(given, total)
        self.optimizer.apply()

    def _take_again(self, taken: Taken, known: Known) -> None:
        """Takes back what was taken, and does what was to be done."""
        optimizer, now = self.optimizer, Options(self.optimizer.torch)
        optimizer.prepare()
        if taken.snapshot is not None:
            taken.snapshot.restore()
            self.taken_back += 1
        if not known.overflow:
            taken.before.restore()  # a schedule may have gone on since
            gradients = optimizer.summing.gradients
            given = [g.hand_over() for g in gradients]
            optimizer.unscale([x for x, g in zip(given, gradients) if not _shared(x, g.own())])
            self._take(given, known)
        elif taken.snapshot is not None:
            optimizer.refresh()
        now.restore(besides=taken.after)

    def check(self) -> Taken:
        """The step that validate() would finish. Raises, on this rank alone, what it would; no other rank is asked."""
        taken, summing = self._taken, self.optimizer.summing
        if taken is None:
            raise EmuError("there is no step to validate", "call step() first; every step is validated once")
        forgotten = not summing.finished or any(p.grad is not grad for p, grad in taken.views)
        if forgotten or [g.own()._version for g in summing.gradients] != taken.versions:
            raise EmuError(
                "the gradients of a step were "
                f"{'forgotten' if forgotten else 'written into'} before it was validated: it cannot be taken again",
                "call validate() before zero_grad() and before the next backward",
            )
        return taken


def _read(state: Tensor, rank: Rank) -> Known:
    """The host waits for a state. Of one that has only a shape it knows nothing bad."""
    if state.is_meta:
        rank.event().record().synchronize()
        return Known()
    overflow, size = state.tolist()
    return Known(bool(overflow), size)


def _shared(a: Tensor, b: Tensor) -> bool:
    """Whether they lie in one memory. (Addresses would mean nothing in a shape run.)"""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
