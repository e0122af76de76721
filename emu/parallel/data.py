"""Data parallelism in all its forms: every rank works on its share of the batch, and holds all of the model or a shard.

Losses are summed, gradients are summed over ranks, and one division by the global number of tokens comes last. So it
does not matter how the batch is cut: ranks with fewer rows, or none, weigh what their tokens weigh. (A mean of
per-rank means would weigh every rank alike; see pytorch/pytorch#67253.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.batch import Batch, as_batch, check_model, checked_rank
from emu.parallel.gathering import Gathering
from emu.parallel.gradients import Gradients
from emu.parallel.grouping import BUCKET_BYTES
from emu.parallel.optimizer import Optimizer
from emu.parallel.shards import Shards
from emu.parallel.state.piece import Piece
from emu.parallel.wrapping import checked_options, wrap
from emu.spmd import EmuError, Grads, Precision, Rank

AUTOCAST = (torch.bfloat16, torch.float16)  # the dtypes that torch's autocast knows on every device


class DataParallel:
    """A model under data parallelism. It is no module: `.model` is.

    Args:
        model: a plain module with `loss_sum(x, y)`. Its parameters are taken over: rank 0's values count on every rank.
        rank: the rank it runs on.
        axes: the mesh axes that cut the batch.
        zero: what is sharded over them: 0 nothing (DDP), 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
        replicate: HSDP: the ranks form this many groups, shards lie within a group and are replicated across.
        reshard_after_forward: with zero=3: whether parameters are freed between a unit's forward and its backward.
        prefetch: with zero=3: how many units are gathered ahead of the one that computes.
        precision: dtypes by role, or a preset; None leaves all in the model's own.
        bucket_bytes: with zero below 3: gradients travel in buckets of at least so many bytes, in backward order.
        units: with zero=3: which modules are gathered, used and freed together, by path, with * for any characters;
            None takes the entries of the outermost module lists and sequences.
        replicated: parameters that stay whole on every rank whatever zero says, by name, with *.
        by_owner: every bucket or unit is held by one rank, which broadcasts it and to which gradients are reduced,
            instead of being cut over all.
        find_unused: whether ranks may differ in which parameters get a gradient, or leave some without any: costs a
            small all-reduce a step. Otherwise a missing gradient is an error.

    Raises:
        EmuError: no module, one without loss_sum, a rank that is none, or options that do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: Rank,
        *axes: str,
        zero: int = 0,
        replicate: int = 1,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        precision: Precision | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        units: Sequence[str] | None = None,
        replicated: Sequence[str] = (),
        by_owner: bool = False,
        find_unused: bool = False,
    ) -> None:
        check_model(model)
        checked_rank(rank, "emu.DataParallel(model, rank, ...)")
        self.model, self.rank, self.axes, self.zero = model, rank, axes, zero
        self.group = rank.group(*axes)
        checked_options(self.group.size, self.group.label, zero, replicate, prefetch, bucket_bytes)
        self.roles = Precision.preset(precision) if precision is not None else None
        self.find_unused = find_unused
        rank.watch(model)
        wrapped = wrap(model, rank, self.group, zero, replicate, self.roles, bucket_bytes, units, replicated, by_owner)
        self.vectors: list[Shards] = wrapped.vectors
        self.gradients: list[Gradients] = wrapped.gradients  # in the order in which they are reduced
        self._gathering: Gathering | None = wrapped.gathering(prefetch, reshard_after_forward) if zero == 3 else None
        self._syncs = True
        self._finished = False
        self._unscaled = False  # whether an optimizer has divided the loss scale out of the gradients
        self._reduced = 0  # vectors that the backward under way has begun to reduce
        self._in_backward = -1  # autograd's number of the backward under way
        for gradients in self.gradients:
            for i, p in enumerate(gradients.shards.parameters):
                p.register_post_accumulate_grad_hook(self._receiver(gradients, i))

    def _receiver(self, gradients: Gradients, index: int) -> Any:
        return lambda p: self._received(gradients, index)

    # A training step.

    def loss_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """The summed loss of this rank's rows. Its `.backward()` sums gradients over ranks while it goes on."""
        gathering = self._gathering
        if gathering is not None:
            gathering.enter(gathering.root)
        x = self._as_activation(x)
        try:
            with self._autocast():
                loss = self.model.loss_sum(x, y)  # type: ignore[operator]
        except BaseException:
            if gathering is not None:
                gathering.give_up()
            raise
        if gathering is not None:
            gathering.leave(gathering.root)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._backward_begins)
        return loss

    def _as_activation(self, x: Tensor) -> Tensor:
        roles = self.roles
        return x.to(roles.param) if roles is not None and x.is_floating_point() else x  # type: ignore[arg-type]

    def _autocast(self) -> Any:
        """Activations in another dtype than parameters: torch's autocast decides op by op."""
        roles = self.roles
        if roles is None or roles.activations == roles.param or roles.activations not in AUTOCAST:
            return nullcontext()  # autocast only narrows: wider activations than parameters there are not
        return torch.autocast(self.rank.device.type, dtype=roles.activations)  # type: ignore[arg-type]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward within it adds to this rank's own gradients only; the first one after it sums them all.

        What counts is where backward runs; where forward ran does not matter. With zero=2 and 3 gradients are whole
        in the meantime, and take the memory that they take with zero=1.
        """
        outer, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = outer

    def finish(self, tokens: float) -> None:
        """The step's gradients are complete: waits for them, and divides them once.

        Args:
            tokens: labels that count in all of the step's batches on all ranks; what gradients are divided by.

        Raises:
            EmuError: no tokens; gradients that were finished before; or a parameter without a gradient, unless
                find_unused was said.
        """
        if not tokens > 0:
            raise EmuError("the batch has no tokens to learn from", "give at least one label that is not -100")
        if self._finished:
            raise EmuError(
                "the gradients are finished already: a second division would shrink them", "zero_grad() first"
            )
        for gradients in self.gradients[self._reduced :]:
            gradients.reduce()
        self._reduced = 0
        self._look_for_unused()
        for gradients in self.gradients:
            gradients.finish(tokens)
        self._finished = True

    def zero_grad(self) -> None:
        """Forgets the gradients, before a new step."""
        for gradients in self.gradients:
            gradients.forget()
        self._finished = self._unscaled = False

    def backward(
        self,
        batch: Batch | tuple[Tensor, Tensor],
        sizes: Sequence[int] | None = None,
        microbatches: int = 1,
        scale: Any = None,
    ) -> Tensor:
        """Computes the gradients of the mean loss over all tokens of the batch. Returns that loss.

        Args:
            sizes: rows of every rank, in group order; balanced where not given.
            microbatches: this rank's rows are cut into so many, one after the other. Gradients are summed over ranks
                once, after the last; with zero=2 and 3 after each, so that they are never whole for long.
            scale: a LossScale; gradients stay scaled by it until the optimizer's step.
        """
        batch = as_batch(batch)
        x, y = batch.shard(self.rank, *self.axes, sizes=sizes)
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise EmuError(f"microbatches={microbatches!r}", "cut the rows into 1 or more")
        if self._finished:
            self.zero_grad()
        total = torch.zeros(())
        for i, (some_x, some_y) in enumerate(zip(x.tensor_split(microbatches), y.tensor_split(microbatches))):
            loss = self.loss_sum(some_x, some_y)
            with self.no_sync() if self.zero < 2 and i < microbatches - 1 else nullcontext():
                (loss if scale is None else loss * scale.value).backward()
            total = total + loss.detach() if i else loss.detach().clone()
        self.finish(batch.tokens)
        return self.group.all_reduce(total, name="loss").div_(batch.tokens)

    # What backward does on the way.

    def _backward_begins(self, grad: Tensor) -> None:
        if self._finished and self._torch_forgot():
            self.zero_grad()
        if self._finished:
            raise EmuError(
                "a backward would add to gradients that are divided already",
                "call zero_grad() after the step (the optimizer's, or this model's), before the next backward",
            )
        task = torch._C._current_graph_task_id()
        if self._in_backward == task:  # of a sum of several losses this is not the first
            return
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)  # type: ignore[attr-defined]
        self._reduced, self._in_backward = 0, task
        for gradients in self.gradients:
            gradients.arrived.clear()
            gradients.before()
        if self._gathering is not None:
            self._gathering.enter_backward(self._gathering.root)

    def _torch_forgot(self) -> bool:
        """Whether an optimizer of torch's own has set every gradient to None."""
        parameters = [p for g in self.gradients if g.shards.in_place for p in g.shards.parameters]
        return bool(parameters) and all(p.grad is None for p in parameters)

    def _received(self, gradients: Gradients, index: int) -> None:
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

    def _backward_ends(self) -> None:
        self._in_backward = -1
        if self._syncs:
            self._reduce_in_order(lambda gradients: True)
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
        used = torch.tensor(flags, dtype=torch.int32)  # made on the host: of one made on "meta", torch tells nobody
        used = used.to(self.rank.device)
        self.group.all_reduce(used, op="max", name="used parameters")
        if all(flags):  # nothing to learn: the host need not wait
            return
        found = iter(flags if used.is_meta else used.tolist())
        for g in self.gradients:
            g.nowhere = {i for i in range(len(g.shards.parameters)) if not next(found)}

    # What it holds.

    def optimizer(self, kind: Any, groups: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> Optimizer:
        """An optimizer of this rank's part of the parameters; see `Optimizer`."""
        return Optimizer(self, kind, groups, **options)

    def pieces(self) -> list[Piece]:
        """This rank's part of the parameters, in the optimizer's precision."""
        return [piece for shards in self.vectors for piece in shards.pieces()]

    def gather_gradients(self) -> Grads:
        """Whole gradients by name, on every rank. Every rank must call it, after finish."""
        return self._in_order({k: v for g in self.gradients for k, v in g.whole().items()})

    def gather_parameters(self) -> Grads:
        """Whole parameters by name, in the optimizer's precision, on every rank. Every rank must call it."""
        return self._in_order({k: v for shards in self.vectors for k, v in shards.whole().items()})

    def _in_order(self, values: Mapping[str, Tensor]) -> Grads:
        return Grads({name: values[name] for name, _ in self.model.named_parameters() if name in values}, {})

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Within it all parameters are whole on every rank, to be read. Every rank must enter it."""
        if self._gathering is not None:
            self._gathering.arrive_all()
        try:
            yield self.model
        finally:
            if self._gathering is not None:
                self._gathering.free_all()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, e.g. for an optimizer of torch's.

        Raises:
            EmuError: an optimizer must work on something else: shards, or copies in another precision.
        """
        return iter([p for _, p in self.named_parameters()])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters with their names. Raises an EmuError where an optimizer must work on something else."""
        if not all(gradients.shards.in_place for gradients in self.gradients):
            raise EmuError(
                "the optimizer's parameters are this rank's shards, or copies in another precision",
                "make it with .optimizer(torch.optim.AdamW, lr=...); for their values use gather_parameters()",
            )
        return self.model.named_parameters()

    def __getattr__(self, name: str) -> Any:  # only what is not found otherwise
        model = self.__dict__.get("model")
        where = f"; it is no module: its model is, so use .model.{name}" if hasattr(model, name) else ""
        raise AttributeError(f"DataParallel has no {name!r}{where}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise EmuError(
            "DataParallel is no module and cannot be called",
            "train it with .backward(batch), or call its model: .model(x)",
        )

    def __repr__(self) -> str:
        model, group = type(self.model).__name__, self.group
        how = f", zero={self.zero}" if self.zero else ""
        return (
            f"DataParallel({model} on {self.rank!r}, batch cut over the {group.size} ranks of {group.label!r}{how}; "
            "no module: .backward(batch) trains it, .model is the module)"
        )
