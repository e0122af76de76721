"""What one rank holds of a distributed model: its part of the parameters, their gradients, and what makes both whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from emu.parallel.gathering import Gathering
from emu.parallel.gradients import Gradients
from emu.parallel.optimizer import Optimizer
from emu.parallel.shards import Shards
from emu.parallel.state.piece import Piece
from emu.parallel.summing import Summing
from emu.parallel.tensor.held import Sharding
from emu.spmd import EmuError, Grads, Group, Precision


class Holding:
    """Parameters and gradients of a model on one rank, however they are laid out.

    Attributes:
        model: the module that they are of.
        vectors: its parameters.
        summing: its gradients.
        roles: dtypes by role; None leaves all in the model's own.
        sharding: of a model that is cut inside its layers, what is here of each parameter.
    """

    model: nn.Module
    vectors: list[Shards]
    summing: Summing
    roles: Precision | None
    sharding: Sharding | None
    _gathering: Gathering | None
    _chain: Group | None  # the stages of a pipeline

    @property
    def gradients(self) -> list[Gradients]:
        """Those of every vector that trains, in the order in which ranks reduce them."""
        return self.summing.gradients

    def optimizer(self, kind: Any, groups: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> Optimizer:
        """An optimizer of this rank's part of the parameters; see `Optimizer`."""
        return Optimizer(self.model, self.summing, self.roles, kind, groups, chain=self._chain, **options)

    def pieces(self) -> list[Piece]:
        """This rank's part of the parameters, in the optimizer's precision."""
        self.summing.check_settled()
        return [piece for shards in self.vectors for piece in shards.pieces()]

    def gather_gradients(self) -> Grads:
        """Whole gradients by name, in the optimizer's precision, on every rank. Every rank must call it, after finish.

        Of a model that is cut inside its layers they are this rank's pieces, with their layouts.
        """
        self.summing.check_settled()
        return self._in_order({k: v for g in self.gradients for k, v in g.whole().items()})

    def gather_parameters(self) -> Grads:
        """Whole parameters by name, in the optimizer's precision, on every rank. Every rank must call it."""
        self.summing.check_settled()
        return self._in_order({k: v for shards in self.vectors for k, v in shards.whole().items()})

    def _in_order(self, values: Mapping[str, Tensor]) -> Grads:
        layouts = self.sharding.layouts if self.sharding is not None else {}
        return Grads({name: values[name] for name, _ in self.model.named_parameters() if name in values}, layouts)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Within it all parameters are whole on every rank, to be read. Every rank must enter it.

        Raises:
            EmuError: they were written, which the shards, or copies in another precision, would not notice; or a step was
                taken in advance and is not validated.
        """
        self.summing.check_settled()
        if self._gathering is not None:
            self._gathering.arrive_all()
        parameters = [(n, p) for s in self.vectors if s.is_a_copy for n, p in zip(s.flat.names, s.parameters)]
        before = [p._version for _, p in parameters]
        try:
            yield self.model
            written = [name for (name, p), version in zip(parameters, before) if p._version != version]
            if written:
                raise EmuError(
                    f"{written[0]} was written within gathered(), which is for reading: the optimizer has its own copy",
                    "load values into the model before DataParallel takes it over (rank 0's count), "
                    "or with emu.parallel.state.load",
                )
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
        if self.sharding is not None or not all(gradients.shards.in_place for gradients in self.gradients):
            raise EmuError(
                "the optimizer's parameters are this rank's pieces, or copies in another precision",
                "make it with .optimizer(torch.optim.AdamW, lr=...); for their values use gather_parameters()",
            )
        return self.model.named_parameters()
