"""Fully sharded parameters (ZeRO-3, FSDP; arXiv 2304.11277): gathered before use, freed after, in forward and backward.

A unit's whole parameters are there from just before its forward to just after, and again from when the gradient of its
output is known to when its own gradients are. While one unit computes, those it will be followed by are on their way:
`prefetch` of them, so that at most 1 + prefetch units are whole at a time, beside the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.shards import Shards


class Gathered:
    """One unit's comings and goings.

    Args:
        vectors: its parameters, trainable and frozen.
    """

    def __init__(self, vectors: Sequence[Shards]) -> None:
        self.vectors = list(vectors)
        self.uses = 0  # forward calls under way
        self.in_backward = False

    def gather(self) -> None:
        for shards in self.vectors:
            shards.gather()

    def arrive(self) -> None:
        self.gather()
        for shards in self.vectors:
            shards.arrive()

    def free(self) -> None:
        for shards in self.vectors:
            shards.free()


class Gathering:
    """All units of a model.

    Args:
        root: the model, and its own parameters: whole during all of a forward and all of a backward.
        units: modules and their parameters in the order in which they are expected to be used; the order of the last
            forward counts once there was one. A module's call is a use.
        prefetch: how many units are on their way while one computes.
        reshard_after_forward: False keeps parameters whole between forward and backward: a gather less, and their memory.
    """

    def __init__(
        self,
        root: tuple[nn.Module, Gathered],
        units: Sequence[tuple[nn.Module, Gathered]],
        prefetch: int,
        reshard_after_forward: bool,
    ) -> None:
        self.root, self.units = root[1], [unit for _, unit in units]
        self.prefetch, self.reshard = prefetch, reshard_after_forward
        self.pinned = False  # whether parameters stay, whatever begins or ends
        self._done: list[Shards] = []  # of which a backward has all gradients
        self._order = list(self.units)
        self._seen: list[Gathered] = []
        for module, unit in (root, *units):
            module.register_forward_pre_hook(self._entering(unit), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leaving(unit), always_call=True)  # also when it fails

    def _entering(self, unit: Gathered) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.enter(unit)
            if torch.is_grad_enabled():
                for t in tensors_of((args, kwargs)):
                    if t.requires_grad and not t.is_leaf:
                        t.register_hook(lambda grad: self._inputs_done(unit))

        return enter

    def _leaving(self, unit: Gathered) -> Any:
        def leave(module: nn.Module, args: Any, out: Any) -> None:
            # It failed: what it left behind is in use, and will be freed later.
            if out is None and sys.exc_info()[0] is not None:
                if not unit.in_backward:
                    unit.uses -= 1
                return
            self.leave(unit)
            if torch.is_grad_enabled():
                for t in (*tensors_of(out), *(_aside(module) if unit is not self.root else ())):
                    if t.grad_fn is not None:  # its hooks come after those of t itself: `_inputs_done` of who used it
                        t.grad_fn.register_prehook(lambda grads: self.enter_backward(unit))

        return leave

    def enter(self, unit: Gathered) -> None:
        """A forward begins, or a recomputation of one within backward."""
        if unit.in_backward:
            unit.arrive()  # it may have gone, if another recomputation came before
            return
        unit.uses += 1
        unit.arrive()
        if unit is self.root:
            if unit.uses == 1:
                self._seen = []
                self._fetch(self._order[: self.prefetch])
            return
        self._seen.append(unit)
        if unit in self._order:
            at = self._order.index(unit) + 1
            # A recomputation is not followed by units whose backward has come by.
            self._fetch([after for after in self._order[at : at + self.prefetch] if not after.in_backward])

    def leave(self, unit: Gathered) -> None:
        """A forward is over."""
        if unit.in_backward:
            return
        unit.uses -= 1
        if unit is self.root and not unit.uses and self._seen:
            self._order = list(dict.fromkeys(self._seen))
            for other in self.units:  # fetched, and then not used
                if (
                    (self.reshard or not torch.is_grad_enabled())
                    and not self.pinned
                    and not other.uses
                    and not other.in_backward
                ):
                    other.free()
        if not unit.uses and not self.pinned and (self.reshard or not torch.is_grad_enabled()):
            unit.free()

    def enter_backward(self, unit: Gathered) -> None:
        """The gradient of a unit's output is known, so those who used it have computed all of theirs."""
        for shards in self._done:
            if not any(shards is own for own in unit.vectors):
                shards.free()
        self._done = []
        unit.arrive()  # again for an earlier call of the same module: it may have gone after the later one
        if unit.in_backward:
            return
        unit.in_backward = True
        at = len(self._order) if unit is self.root else self._order.index(unit) if unit in self._order else 0
        self._fetch(self._order[max(at - self.prefetch, 0) : at][::-1])

    def enter_weights(self, weights: set[int]) -> None:
        """A backward of weights alone begins: gathers the units of these parameters, by their ids, until its end.

        Weights' gradients need values of weights where one is made of several, or a product has several.
        """
        units = [u for u in self.units if any(id(p) in weights for shards in u.vectors for p in shards.parameters)]
        for unit in units:
            unit.gather()
        for unit in units:
            unit.arrive()
            unit.in_backward = True

    def _fetch(self, units: Sequence[Gathered]) -> None:
        for unit in units:
            unit.gather()

    def _inputs_done(self, unit: Gathered) -> None:
        """The gradients of a unit's inputs are known: frozen parameters, which have no gradients, served for them."""
        if unit.in_backward and not self.pinned:
            for shards in unit.vectors:
                if not shards.trainable:
                    shards.free()

    def done(self, shards: Shards) -> None:
        """Backward has all gradients of a vector. Its values may yet serve for those of the unit's inputs."""
        if not self.pinned:
            self._done.append(shards)

    def end_backward(self) -> None:
        """Nothing of the backward is left to compute."""
        self._done = []
        for unit in (self.root, *self.units):
            unit.in_backward = False
            if not self.pinned:
                unit.free()

    def arrive_all(self) -> None:
        """All parameters are whole, until `free_all`."""
        self.pinned = True
        for unit in (self.root, *self.units):
            unit.gather()
        for unit in (self.root, *self.units):
            unit.arrive()

    def free_all(self) -> None:
        """Ends what `arrive_all` began."""
        self.pinned = False
        for unit in (self.root, *self.units):
            for shards in unit.vectors:
                shards.leave()

    def give_up(self) -> None:
        """A forward has failed: none is under way."""
        for unit in (self.root, *self.units):
            unit.uses = 0


def _aside(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module keeps as attributes, such as its part of the loss."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor):
                yield value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
