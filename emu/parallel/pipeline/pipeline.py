"""Pipeline parallelism: every rank holds some layers of a model, and microbatches flow through the ranks.

Losses are summed, and one division by the global number of tokens comes last, so it does not matter how a batch is cut
into microbatches: uneven ones, and ones without rows, weigh what their tokens weigh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.batch import Batch, as_batch, check_model, checked_plain, checked_rank
from emu.parallel.data import DataParallel
from emu.parallel.optimistic import OptimisticStep
from emu.parallel.pipeline.asked import checked, maker, rows_of
from emu.parallel.pipeline.division.units import divided
from emu.parallel.pipeline.division.weighing import WEIGHED, weighed
from emu.parallel.pipeline.running.agreement import agree, attends
from emu.parallel.pipeline.running.executor import Context, Execution, may_start_again
from emu.parallel.pipeline.running.mail import Mail
from emu.parallel.pipeline.running.stages import Stages
from emu.parallel.pipeline.schedule import Generator, Schedule
from emu.parallel.scaling import LossScale, checked_scale
from emu.parallel.tensor.held import Sharding
from emu.spmd import EmuError, Group, PlanError, Rank


class Pipeline(DataParallel):
    """A model under pipeline and data parallelism. It is no module: `.model` is, with this rank's layers in it.

    Args:
        model: a plain module with `loss_sum(x, y)`, the sum of the loss over labels. It is cut between modules that are
            called one after the other, each with the activations as its first argument; whatever else a module is passed
            must follow from x and y alone, so modules hand each other nothing but results, and what layers add to the loss
            by themselves is what `model.balance_sum(y)` returns. Its parameters are taken over: each stage's values are those
            of the first rank that holds it, so give all ranks the same seed.
        rank: the rank it runs on; ranks along the mesh's axis pp form the pipeline.
        axes: the mesh axes that cut the batch.
        schedule: its name, a Schedule, or a generator of one: (rank, ranks, microbatches, chunks) -> that rank's actions.
        microbatches: into how many each rank's rows are cut.
        chunks: how many stages a rank holds, where the schedule lets one choose.
        stages: where the model is cut: "even", layers per stage, or the names of modules (see `divided`); "cost", so that
            the stage that computes most has as little to do as possible, or "memory", so that the rank that needs most
            needs as little as possible (see `layers_by_cost` and `layers_by_memory`, which have more to choose).
        example: for these two: (x, y), a microbatch, of which only the shapes count.
        recompute: keep only stages' inputs, and compute the rest again in their backward.
        sharding: what `shard_model` returned, for a model that is cut inside its layers.
        options: further arguments of DataParallel: zero, precision, ...

    Raises:
        PlanError: what the schedule cannot do, or a model that has fewer layers than there are stages.
        EmuError: as DataParallel.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: Rank,
        *axes: str,
        schedule: str | Schedule | Generator = "1f1b",
        microbatches: int = 1,
        chunks: int = 1,
        stages: str | Sequence[int] | Sequence[str] = "even",
        example: tuple[Tensor, Tensor] | None = None,
        recompute: bool = False,
        sharding: Sharding | None = None,
        **options: Any,
    ) -> None:
        check_model(model)
        checked_rank(rank, "Pipeline(model, rank, ...)")
        if sharding is None:
            checked_plain(model, "Pipeline(model, rank, ...)")
        if unknown := [name for name in options if name not in signature(DataParallel.__init__).parameters]:
            raise EmuError(
                f"Pipeline has no option {unknown[0]!r}",
                "options of a schedule are said where it is made: schedule=make('interleaved', 4, 8, 2, count=4), of "
                "emu.parallel.pipeline",
            )
        if not isinstance(recompute, bool):
            raise PlanError(f"recompute={recompute!r}", "say True, or False", field="recompute", nearest=False)
        self._schedule_of = maker(schedule, rank.mesh.axes.get("pp", 1), chunks)
        self.schedule = self._schedule_of(microbatches)
        self.recompute = recompute
        if isinstance(stages, str) and stages in WEIGHED:
            stages = weighed(stages, model, self.schedule, example, recompute)
        self.stages = Stages(model, rank, self.schedule, divided(model, self.schedule.stages, stages), sharding)
        self._follow(self.schedule)
        self.mail = Mail(rank, self._lowered) if self.schedule.ranks > 1 else None
        self._warm: Execution | None = None  # within backward: of its batch, with the first forwards done
        self._attends = False  # whether it is known that stages call mask.attend
        self._torn = False  # whether a batch was left in the middle, with messages under way
        super().__init__(model, rank, *axes, sharding=self.stages.sharding, **options)
        self._chain = rank.group("pp") if self.mail is not None else None
        self.stages.sequences = self.sequences

    def _follow(self, schedule: Schedule) -> None:
        if schedule.stages_of != self.schedule.stages_of:
            raise PlanError(
                f"with {schedule.microbatches} microbatches {schedule.name} lays stages out otherwise than with "
                f"{self.schedule.microbatches}",
                f"make the Pipeline with microbatches={schedule.microbatches}",
                field="microbatches",
            )
        self.schedule, self._lowered = schedule, checked(schedule)

    # A training step.

    def backward(
        self,
        batch: Batch | tuple[Tensor, Tensor],
        sizes: Sequence[int] | None = None,
        microbatches: int | Sequence[int] | None = None,
        scale: LossScale | None = None,
        optimist: OptimisticStep | None = None,
    ) -> Tensor:
        """Computes the gradients of the mean loss over all tokens of the batch. Returns that loss, in float64.

        Args:
            sizes: rows of every rank along the data axes, in group order; balanced where not given.
            microbatches: how many, where other than the Pipeline's; or the rows of each, which may differ, or be none.
            scale: a LossScale; gradients stay scaled by it until the optimizer's step.
            optimist: whose last step is still to be validated: that is done between the first forwards and the first
                backward, so that no stage waits for the others between two steps, but to sum the loss that is returned.
                If the step is taken back, these forwards are done again. There is no zero_grad() in between: this forgets
                the old gradients itself.

        Raises:
            EmuError: gradients of earlier batches that are neither finished nor forgotten; a step in advance that is not
                validated, and no optimist to do it; or what the last batch left in the middle.
        """
        batch = as_batch(batch)
        pending = optimist is not None and self._pending(optimist)
        # All that can be wrong with the call is told before the first message of the batch.
        if pending:
            checked_scale(scale)
        else:
            self._check_backward(scale)
        parts = self._cut(batch, sizes, microbatches)
        try:
            if pending and optimist is not None:
                self._warm = self._validated(parts, optimist)
            return self._backward(batch, parts, scale)
        finally:
            self._warm = None  # never of another batch

    def _pending(self, optimist: OptimisticStep) -> bool:
        """Whether a step of this pipeline's is to be validated. Raises an EmuError if that cannot be done."""
        if not isinstance(optimist, OptimisticStep) or optimist.optimizer.summing is not self.summing:
            raise EmuError(
                f"optimist={optimist!r:.80} is no OptimisticStep of this Pipeline's optimizer",
                "optimist = OptimisticStep(pipe.optimizer(...)), and then pipe.backward(batch, optimist=optimist)",
            )
        if optimist.pending:
            optimist.check()
        return optimist.pending

    def _validated(self, parts: Sequence[tuple[Tensor, Tensor]], optimist: OptimisticStep) -> Execution | None:
        """The first forwards of a batch, of parameters that hold."""
        if not may_start_again(self._lowered.rows):
            optimist.validate()
            return None
        random = torch.get_rng_state()
        execution = self._execution(parts)
        with self._giving_up():
            execution.warm_up()
            optimist.validate()
            if optimist.stale:
                torch.set_rng_state(random)
                execution.start_again(self._lowered.rows)
                execution.warm_up()
        return execution

    def add_gradients(
        self,
        batch: Batch | tuple[Tensor, Tensor],
        sizes: Sequence[int] | None = None,
        microbatches: int | Sequence[int] | None = None,
    ) -> Tensor:
        """Adds the gradients of a batch's summed loss to those of earlier ones: for steps of several batches.

        `finish(tokens)` ends the step, with the labels that count in all of them. Arguments as for `backward`.

        Returns:
            The sum of the batch's losses that were computed on this rank.

        Raises:
            EmuError: gradients of a step that is over, and not forgotten; or a step in advance that is not validated.
        """
        self.summing.check_settled()
        if self._failed:
            self.zero_grad()  # what a backward left when it failed
            self._failed = False
        self.summing.check_begin(self.summing.steps)
        return self._add_gradients(self._cut(as_batch(batch), sizes, microbatches), None)

    def evaluate(
        self,
        batch: Batch | tuple[Tensor, Tensor],
        sizes: Sequence[int] | None = None,
        microbatches: int | Sequence[int] | None = None,
    ) -> Tensor:
        """The mean loss over all tokens of a batch, without gradients. Every rank must call it.

        Raises:
            EmuError: a step was taken in advance and is not validated: some stages have taken it, and others not.
        """
        batch = as_batch(batch)
        self.summing.check_settled()
        with torch.no_grad():
            total = self._run(self._execution(self._cut(batch, sizes, microbatches), trains=False))
        return self._losses().all_reduce(total, name="loss").div_(batch.tokens)

    def loss_sum(self, x: Tensor, y: Tensor) -> Tensor:
        raise EmuError(
            "a stage of a pipeline has no loss of its own",
            "call .backward(batch), or .add_gradients(batch) and .finish(tokens), or .evaluate(batch)",
        )

    def _cut(
        self, batch: Batch, sizes: Sequence[int] | None, microbatches: int | Sequence[int] | None
    ) -> list[tuple[Tensor, Tensor]]:
        """This rank's microbatches; the schedule becomes one of so many."""
        if self._torn:
            raise EmuError(
                "an earlier batch failed in the middle, and messages of it may still be under way between stages",
                "make the Pipeline anew, or emu.parallel.state.load into a new one what was saved last",
            )
        x, y = batch.part(self.rows, sizes)
        rows = rows_of(len(x), self.schedule.microbatches if microbatches is None else microbatches)
        if min(rows) < 0 or sum(rows) != len(x):
            raise EmuError(
                f"microbatches of {rows} rows do not make up the {len(x)} rows of rank {self.rank}",
                "give the rows of each, adding up to this rank's",
            )
        if len(rows) != self.schedule.microbatches:
            self._follow(self._schedule_of(len(rows)))
            if self.mail is not None:
                self.mail.follow(self._lowered)
        if self.mail is not None:
            agree(self.rank.group("pp"), self.schedule, rows, x, y)
        return list(zip(x.split(rows), y.split(rows)))

    def _add_gradients(self, microbatches: Sequence[tuple[Tensor, Tensor]], scale: LossScale | None) -> Tensor:
        execution = self._warm or self._execution(microbatches)
        execution.factor = 1.0 if scale is None else scale.value
        with self.no_sync():  # ranks are at different microbatches: gradients are summed at the end
            return self._run(execution)

    def _execution(self, microbatches: Sequence[tuple[Tensor, Tensor]], trains: bool = True) -> Execution:
        summing = self.summing
        context = Context(self._within_forward, summing.backward_pass, lambda: summing.steps, self.recompute)
        row = self._lowered.rows[self.rank.coords.get("pp", 0)]
        parts = [(self._as_activation(x), y) for x, y in microbatches]
        return Execution(self.stages, self.mail, row, parts, context, trains)

    def _run(self, execution: Execution) -> Tensor:
        with self._giving_up():
            total = execution.run()
            if self.sequences is not None and self.mail is not None and not self._attends:
                self._attends = attends(self.rank.group("pp"), self.sequences, execution.microbatches)
        # Ranks without the loss do not know its dtype.
        return torch.zeros((), dtype=torch.float64, device=self.rank.device) if total is None else total.double()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Within it a batch is under way."""
        try:
            yield
        except BaseException:
            self._torn = self.mail is not None
            if self._gathering is not None:
                self._gathering.give_up()
            raise

    @contextmanager
    def _within_forward(self) -> Iterator[None]:
        gathering = self._gathering
        if gathering is not None:
            gathering.enter(gathering.root)
        with self._autocast():
            yield
        if gathering is not None:
            gathering.leave(gathering.root)

    def _losses(self) -> Group:
        axes = [axis for axis in self.rank.mesh.axes if axis == "pp" or axis in self.axes]
        return self.rank.group(*axes) if axes else self.group

    def __repr__(self) -> str:
        here = self.rank.coords.get("pp", 0)
        stages = ", ".join(map(str, self.schedule.stages_of[here]))
        return (
            f"Pipeline({type(self.model).__name__} on {self.rank!r}: stage {stages} of {self.schedule.stages}, "
            f"{self.schedule.name} with {self.schedule.microbatches} microbatches; .backward(batch) trains it)"
        )
