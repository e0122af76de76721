"""Optimizers on shards: torch's own, on this rank's part of the parameters, with everyone's norm and everyone's overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emu.parallel.grouping import members_of
from emu.parallel.norms import any_overflow, clipping, global_norm
from emu.parallel.scaling import DIVIDED, UNKNOWN, LossScale
from emu.parallel.shards import Shards
from emu.parallel.states import States
from emu.parallel.summing import Summing
from emu.spmd import EmuError, Group, Precision

WHOLE_ONLY = ("Adafactor", "Muon")


class Stepped(NamedTuple):
    """What a step did.

    Fields:
        norm: of all gradients before clipping, a tensor of one number; None where nobody asked for it.
        skipped: whether an overflow on some rank kept every rank from it.
    """

    norm: Tensor | None
    skipped: bool


class Optimizer(States):
    """An optimizer of torch's on one rank's part of a model.

    It works element by element (SGD, Adam, AdamW, Lion, ...): what it does to an element may not depend on others of the
    same parameter, because a shard may hold only some of them (zero=0 without another precision has whole parameters, unless
    a sharding cuts them).

    Attributes:
        names: of the parameters of every group.
        torch: the optimizer of torch's, e.g. for its learning-rate schedulers: StepLR(optimizer.torch, ...).
        vectors: what it steps on.

    Args:
        model, summing, roles: a model under data parallelism, its gradients, and its dtypes by role. DataParallel's
            `optimizer` gives them, and takes the rest.
        kind: the optimizer's class, torch.optim.AdamW or another.
        groups: parameter groups: dicts with "params", names (with * for any characters) or the model's parameters, and
            options. What no group names is not trained. None makes one group of all.
        clip: the largest norm that all gradients of the model together may have; None does not clip. (torch's own
            clip_grad_norm_ finds whole gradients at zero=0 only.)
        norm: 2.0 or inf.
        scale: a LossScale that the loss was multiplied by.
        chain: the stages of a pipeline, one rank each: the norm and overflows are those of all of them. None: there is one.
        options: further arguments of `kind`.

    Raises:
        EmuError: a group that names nothing, a parameter in two groups, or a kind that needs whole parameters where this
            rank has pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        summing: Summing,
        roles: Precision | None,
        kind: Any,
        groups: Sequence[Mapping[str, Any]] | None = None,
        *,
        clip: float | None = None,
        norm: float = 2.0,
        scale: LossScale | None = None,
        chain: Group | None = None,
        **options: Any,
    ) -> None:
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or issubclass(
            kind, torch.optim.LBFGS
        ):
            what = getattr(kind, "__name__", repr(kind)[:60])
            raise EmuError(
                f"{what} is not a kind of optimizer that takes steps from gradients alone",
                "pass the class, and its arguments by name: dist.optimizer(torch.optim.AdamW, lr=1e-3)",
            )
        if norm not in (2.0, float("inf")):
            raise EmuError(f"norm={norm!r} cannot be clipped by", "use 2.0 or float('inf')")
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise EmuError(f"clip={clip!r} leaves nothing of the gradients", "give the largest norm, or None")
        if kind.__name__ in WHOLE_ONLY and summing.everyone is not None:
            raise EmuError(
                f"{kind.__name__} looks at all elements of a parameter at once, and a sharding (tp, ep, etp) leaves this rank "
                "pieces of some",
                "use an optimizer that works element by element (SGD, AdamW, ...), or a mesh of dp alone",
            )
        if kind.__name__ in WHOLE_ONLY and not all(g.shards.in_place for g in summing.gradients):
            raise EmuError(
                f"{kind.__name__} looks at all elements of a parameter at once, and a shard has only some",
                "use an optimizer that works element by element (SGD, AdamW, ...), or zero=0 in the model's own precision",
            )
        if roles is not None and roles.moments != roles.master:
            raise EmuError(
                f"moments in {roles.moments} beside a master copy in {roles.master}: torch's optimizers keep both alike",
                "give Precision the same dtype for master and moments",
            )
        if scale is not None:
            scale.belongs_to(summing)
        self.summing, self.clip, self.norm, self.scale, self.chain = summing, clip, norm, scale, chain
        self.vectors: list[Shards] = [g.shards for g in summing.gradients]
        members = members_of(model, groups, summing.names)
        self.names = [[name for name in members if members[name] == i] for i in range(len(groups) if groups else 1)]
        self.torch: Any = kind(self._grouped(members, groups), **options)
        self.begun = False
        self.made: list[nn.Parameter] = []

    def _grouped(self, members: Mapping[str, int], groups: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """torch's parameter groups, of this rank's parts."""
        out = [dict(group, params=[]) for group in groups] if groups is not None else [{"params": []}]
        for shards in self.vectors:
            for span, piece in shards.stepped():
                if (number := members.get(shards.flat.names[span.index])) is not None:
                    out[number]["params"].append(piece)
        return out

    def __repr__(self) -> str:
        kind, n = type(self.torch).__name__, sum(len(group["params"]) for group in self.torch.param_groups)
        clip = f", clip={self.clip:g}" if self.clip is not None else ""
        return f"Optimizer({kind} of {n} pieces on {self.summing.rank!r}{clip}; .torch is torch's, for schedulers)"

    def zero_grad(self) -> None:
        """Forgets the gradients, before a new step."""
        self.check_settled()
        self.summing.forget()

    def step(self) -> Stepped:
        """Unscales, clips, steps, and gives the parameters their new values on every rank.

        Raises:
            EmuError: gradients that are not finished, or from which a loss scale is divided out already.
        """
        given = self.begin()
        total, skipped, where = None, False, self.summing.rank.device
        if self.scale is not None:
            skipped = any_overflow(given, self.summing.group, self.chain, where)
        if not skipped:
            self.unscale(given)
            if self.clip is not None:
                total = global_norm(given, self.vectors, self.norm, self.summing.everyone, self.chain, where)
                self.clip_by(given, total)
            self.apply()
        return self.end(total, skipped)

    # What a step is made of: `step` above takes these at once, and OptimisticStep some of them again.

    def begin(self) -> list[Tensor]:
        """Gives torch's optimizer its gradients. Returns them, by vector. Raises an EmuError if they are not ready."""
        self.check_settled()
        if not self.summing.finished:
            raise EmuError(
                "the gradients are not finished: they are sums over tokens, and may be under way",
                "call finish(tokens) after the last backward of the step; backward(batch) does it itself",
            )
        self.prepare()
        self._check_scale()
        return [g.hand_over() for g in self.summing.gradients]

    def check_settled(self) -> None:
        """Raises an EmuError if an optimistic step is to be validated yet."""
        self.summing.check_settled()

    def prepare(self) -> None:
        """Before parameters change: whole copies go. Raises an EmuError where somebody holds them."""
        if self.summing.pinned:
            raise EmuError("a step within gathered() would leave old parameters whole", "leave the `with` block first")
        for shards in self.vectors:
            shards.prepare()

    def unscale(self, given: Sequence[Tensor]) -> None:
        """Divides the loss scale out of gradients, if there is one."""
        if self.scale is not None:
            for g in given:
                g.mul_(1 / self.scale.value)

    def clip_by(self, given: Sequence[Tensor], total: Tensor) -> None:
        """Shortens gradients, whose norm all together is `total`, to the clip's length."""
        assert self.clip is not None
        factor = clipping(total, self.clip)
        for g in given:
            g.mul_(factor)

    def apply(self) -> None:
        """torch's step, and every rank's parameters take its values."""
        self._forget_made()
        self.begun = True
        self.torch.step()
        self.summing.steps += 1
        self.refresh()

    def refresh(self) -> None:
        """Parameters on every rank of the stage take the values that the optimizer's have."""
        works = [shards.refresh() for shards in self.vectors]
        for work in works:
            if work is not None:
                work.wait()

    def end(self, total: Tensor | None, skipped: bool) -> Stepped:
        """After a step that was taken or skipped."""
        if self.scale is not None:
            self.scale.update(skipped)
        for g in self.summing.gradients:
            g.release()
        return Stepped(total, skipped)

    def _check_scale(self) -> None:
        """Raises an EmuError if the gradients do not carry the factor that the step would divide out."""
        carried = self.summing.scaled_by
        if carried == DIVIDED and self.scale is not None:
            raise EmuError(
                "an earlier step has divided the loss scale out of these gradients already",
                "call zero_grad() and backward before every step; one optimizer with several groups takes one step",
            )
        if carried not in (UNKNOWN, DIVIDED) and carried is not self.scale:
            says = [f"was given {scale or 'no loss scale'}" for scale in (carried, self.scale)]
            raise EmuError(
                f"backward {says[0]}, and the optimizer {says[1]}",
                "give both the same: dist.backward(batch, scale=scale), dist.optimizer(..., scale=scale)",
            )
        if self.scale is not None:
            self.summing.scaled_by = DIVIDED
