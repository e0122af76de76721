"""Data parallelism in all its forms: every rank works on its share of the batch, and holds all of the model or a shard.

Losses are summed, gradients are summed over ranks, and one division by the global number of tokens comes last. So it
does not matter how the batch is cut: ranks with fewer rows, or none, weigh what their tokens weigh. (A mean of
per-rank means would weigh every rank alike; see pytorch/pytorch#67253.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.batch import Batch, as_batch, check_model, checked_rank
from emu.parallel.context.fitting import check_kind
from emu.parallel.context.sequences import AXIS, Sequences
from emu.parallel.gathering import Gathering
from emu.parallel.grouping import BUCKET_BYTES
from emu.parallel.holding import Holding
from emu.parallel.scaling import LossScale, checked_scale
from emu.parallel.shards import Shards
from emu.parallel.summing import Summing
from emu.parallel.tensor.held import Sharding
from emu.parallel.wrapping import checked_options, wrap
from emu.spmd import EmuError, Group, Precision, Rank

AUTOCAST = (torch.bfloat16, torch.float16)  # the dtypes that torch's autocast knows on every device


class DataParallel(Holding):
    """A model under data parallelism. It is no module: `.model` is.

    Args:
        model: a plain module with `loss_sum(x, y)`, the sum of the loss over labels, in float32 at least. Its parameters
            are taken over: rank 0's values count on every rank, of buffers, too. Later every rank has its own buffers: see
            `synchronize_statistics` for batch norms.
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
        sharding: what `shard_model` returned, for a model that is cut inside its layers.
        context: how attention crosses ranks along the axis cp, which cuts sequences and not rows: "ring", "zigzag",
            "striped", "all-gather", "ulysses" or "usp"; see `Sequences`.

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
        sharding: Sharding | None = None,
        context: str = "zigzag",
    ) -> None:
        check_model(model)
        checked_rank(rank, "emu.DataParallel(model, rank, ...)")
        if (cut := getattr(model, "cut_inside", None)) is not sharding:
            raise EmuError(
                f"{type(model).__name__} is {'cut inside its layers' if cut is not None else 'no model that was cut'}, and "
                f"DataParallel was {'not told how' if sharding is None else 'given a sharding of another'}",
                "sharding = shard_model(model, rank); DataParallel(model, rank, 'dp', sharding=sharding)",
            )
        if sharding is not None:
            sharding.check_axes(axes)
        self.model, self.rank, self.axes, self.zero, self.sharding = model, rank, axes, zero, sharding
        alone = sharding is not None and not axes  # every rank gets the whole batch
        self.group = rank.group(members=[rank.id], label="alone") if alone else rank.group(*axes)
        check_kind(context)
        self.sequences = Sequences(model, rank, context) if AXIS in axes else None
        self.rows = self.group  # the ranks that the rows are cut over
        if self.sequences is not None:
            cutting = [axis for axis in axes if axis != AXIS]
            self.rows = rank.group(*cutting) if cutting else rank.group(members=[rank.id], label="alone")
        checked_options(self.group.size, self.group.label, zero, replicate, prefetch, bucket_bytes)
        self._chain: Group | None = None  # the stages of a pipeline
        self.roles = Precision.preset(precision) if precision is not None else None
        rank.watch(model)
        wrapped = wrap(
            model,
            rank,
            self.group,
            zero,
            replicate,
            self.roles,
            bucket_bytes,
            units,
            replicated,
            by_owner,
            axes,
            sharding,
        )
        self.vectors: list[Shards] = wrapped.vectors
        self._gathering: Gathering | None = wrapped.gathering(prefetch, reshard_after_forward) if zero == 3 else None
        everyone = sharding.everyone() if sharding is not None else None
        names = list(sharding.shapes) if sharding is not None and sharding.pipeline else None
        self.summing = Summing(wrapped.gradients, rank, self.group, self._gathering, find_unused, everyone, names)
        self._failed = False  # whether `backward` was left by an exception
        taken: Any = model
        taken.in_data_parallel = True  # so that nobody takes it for a plain one
        taken.in_parts_of_sequences = self.sequences is not None and self.sequences.group.size > 1

    # A training step.

    def loss_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """The summed loss of this rank's rows. Its `.backward()` sums gradients over ranks while it goes on."""
        gathering = self._gathering
        model: Any = self.model
        if gathering is not None:
            gathering.enter(gathering.root)
        x = self._as_activation(x)
        try:
            with self._autocast():
                if self.sequences is None:
                    loss = model.loss_sum(x, y)
                else:
                    with self.sequences.part(x, y) as (x, y, more):
                        loss = model.loss_sum(x, y, **more)
        except BaseException:
            if gathering is not None:
                gathering.give_up()
            raise
        if gathering is not None:
            gathering.leave(gathering.root)
        if isinstance(loss, Tensor) and loss.requires_grad:
            steps = self.summing.steps
            loss.register_hook(lambda grad: self.summing.begin(steps))
        return loss

    def _as_activation(self, x: Tensor) -> Tensor:
        roles = self.roles
        return x.to(roles.param) if roles is not None and x.is_floating_point() else x

    def _autocast(self) -> Any:
        """Activations in another dtype than parameters: torch's autocast decides op by op."""
        roles = self.roles
        if roles is None or roles.activations == roles.param or roles.activations not in AUTOCAST:
            return nullcontext()  # autocast only narrows: wider activations than parameters there are not
        return torch.autocast(self.rank.device.type, dtype=roles.activations)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward within it adds to this rank's own gradients only; the first one after it sums them all.

        What counts is where backward runs; where forward ran does not matter. With zero=2 and 3 gradients are whole
        in the meantime, and take the memory that they take with zero=1.
        """
        with self.summing.paused():
            yield

    def finish(self, tokens: float) -> None:
        """The step's gradients are complete: waits for them, and divides them once.

        Args:
            tokens: labels that count in all of the step's batches on all ranks; what gradients are divided by.

        Raises:
            EmuError: no tokens; gradients that were finished before; or a parameter without a gradient, unless
                find_unused was said.
        """
        for shards in self.vectors:
            if not shards.trainable and any(p.grad is not None for p in shards.parameters):
                name = next(n for n, p in zip(shards.flat.names, shards.parameters) if p.grad is not None)
                raise EmuError(
                    f"{name} has a gradient, but was frozen when DataParallel took the model over: no rank would sum it",
                    "call requires_grad_() before DataParallel(model, ...)",
                )
        self.summing.finish(tokens)

    def zero_grad(self) -> None:
        """Forgets the gradients, before a new step."""
        self.summing.forget()

    def backward(
        self,
        batch: Batch | tuple[Tensor, Tensor],
        sizes: Sequence[int] | None = None,
        microbatches: int = 1,
        scale: LossScale | None = None,
    ) -> Tensor:
        """Computes the gradients of the mean loss over all tokens of the batch. Returns that loss.

        Args:
            sizes: rows of every rank, in group order; balanced where not given.
            microbatches: this rank's rows are cut into so many, one after the other. Gradients are summed over ranks
                once, after the last; with zero=2 and 3 after each, so that they are never whole for long.
            scale: a LossScale; gradients stay scaled by it until the optimizer's step.

        Raises:
            EmuError: gradients of earlier batches that are neither finished nor forgotten.
        """
        batch = as_batch(batch)
        x, y = batch.part(self.rows, sizes)
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise EmuError(f"microbatches={microbatches!r}", "cut the rows into 1 or more")
        parts = list(zip(x.tensor_split(microbatches), y.tensor_split(microbatches)))
        return self._backward(batch, parts, scale)

    def _backward(self, batch: Batch, microbatches: Sequence[tuple[Tensor, Tensor]], scale: LossScale | None) -> Tensor:
        """The same, of this rank's microbatches."""
        self._check_backward(scale)
        if self.summing.finished or self._failed:  # what the last call left when it failed
            self.zero_grad()
        self._failed, self.summing.waits = True, False  # until they are finished, below
        total = self._add_gradients(microbatches, scale)
        self.finish(batch.tokens)
        self._failed, self.summing.waits = False, True
        self.summing.scaled_by = scale
        return self._losses().all_reduce(total, name="loss").div_(batch.tokens)

    def _check_backward(self, scale: Any) -> None:
        """Raises an EmuError where a batch cannot be all that gradients are of."""
        checked_scale(scale)
        self.summing.check_settled()
        if self.summing.unfinished and not self._failed:
            raise EmuError(
                "gradients of earlier batches are not finished: backward(batch) would add to them, and divide them all by "
                "the tokens of this batch alone",
                "call finish(tokens) for the step of those batches, or zero_grad() to forget them",
            )

    def _add_gradients(self, microbatches: Sequence[tuple[Tensor, Tensor]], scale: LossScale | None) -> Tensor:
        """Adds gradients of the summed loss of some microbatches to what there is. Returns this rank's sum."""
        total = torch.zeros(())
        for i, (x, y) in enumerate(microbatches):
            loss = self.loss_sum(x, y)
            wide = torch.promote_types(loss.dtype, torch.float32)  # a sum in 8 or 11 bits would lose most of its terms
            with self.no_sync() if self.zero < 2 and i < len(microbatches) - 1 else nullcontext():
                (loss if scale is None else loss.to(wide) * scale.value).backward()
            total = total + loss.detach() if i else loss.detach().to(wide, copy=True)
        return total

    def _losses(self) -> Group:
        """The ranks whose losses add up to the batch's."""
        return self.group

    def evaluate(self, batch: Batch | tuple[Tensor, Tensor], sizes: Sequence[int] | None = None) -> Tensor:
        """The mean loss over all tokens of a batch, without gradients. Every rank must call it.

        Args:
            sizes: rows of every rank, in group order; balanced where not given.
        """
        batch = as_batch(batch)
        self.summing.check_settled()  # stages whose steps hold, and others whose steps do not, are no model
        with torch.no_grad():
            total = self.loss_sum(*batch.part(self.rows, sizes)).detach().clone()
        return self._losses().all_reduce(total, name="loss").div_(batch.tokens)

    def __getattr__(self, name: str) -> Any:  # only what is not found otherwise
        model = self.__dict__.get("model")
        where = f"; it is no module: its model is, so use .model.{name}" if hasattr(model, name) else ""
        raise AttributeError(f"DataParallel has no {name!r}{where}")

    def __deepcopy__(self, memo: Any) -> Any:
        raise EmuError(
            "a copy of a DataParallel would train without its hooks", "copy the plain model, and wrap the copy anew"
        )

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
