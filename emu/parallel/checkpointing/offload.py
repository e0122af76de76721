"""Activations in the host's memory between forward and backward, on the way while other layers compute.

What a layer keeps for backward sets out for the host as soon as the next layer keeps something, and is off the device when
`ahead` more layers are done; in backward it is fetched `ahead` layers before its own begins. So of n layers at most 1 + ahead
are on the device at a time, and copies are hidden if what a layer keeps takes no longer over the host link than a layer takes
to compute. Otherwise the device waits for what is missing; peak memory is the same.

    keeps of layer    forward: 0   1   2   3   backward: 3   2   1   0        ahead = 1
    on the device              0   01  12  23            32  21  10  0
    d2h, h2d                       0   1   2             2   1   0

The last layer's stay: no layer comes after it, and it is the first to go back. Losses and gradients are the same to the last
bit. The idea is vDNN's (arXiv 1602.08124) and ZeRO-Infinity's (arXiv 2104.07857).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from emu.parallel.checkpointing.apply import layers_to_checkpoint
from emu.parallel.checkpointing.travelling import Luggage, Registry, Seat, Ticket, storage_of, travels
from emu.parallel.gathering import tensors_of
from emu.spmd import EmuError, HostCopy, PlanError, Rank


def offloaded(
    model: nn.Module,
    rank: Rank,
    layers: str | Sequence[nn.Module] | None = None,
    ahead: int = 1,
    least_bytes: int = 0,
) -> Offload:
    """Changes a plain model's layers so that what they keep for backward waits in the host's memory.

    Parameters, buffers, and arguments without gradients (masks, tables) never travel. Of a checkpointed model the inputs
    travel that it keeps to compute again from: call `checkpointed` first, then this, then Pipeline or DataParallel.

    Args:
        model: with a list of layers that are called one after the other.
        rank: the rank it runs on.
        layers: whose activations travel: modules, or the path of a list of them; None: the longest outermost list.
        ahead: how many layers before its use a layer's are fetched, and how many after it they may still be leaving.
        least_bytes: storages smaller than this stay: the latency of a copy is worth more.

    Raises:
        EmuError: no rank; a model without a list of layers; one that is offloaded already, or cut into stages.
        PlanError: ahead is no number from 1, or least_bytes none from 0.
    """
    if not isinstance(rank, Rank):
        raise EmuError(f"the rank is a {type(rank).__name__}", "pass the rank that the program gets: it has a host")
    for name, value, least in (("ahead", ahead, 1), ("least_bytes", least_bytes, 0)):
        if type(value) is not int or value < least:
            raise PlanError(f"{name}={value!r} is no whole number from {least}", f"say {name}={least}", field="offload")
    chosen = layers_to_checkpoint(model, layers)
    chain = layers_to_checkpoint(model, None) if layers is not None else chosen
    ours = {id(layer) for _, layer in chosen}
    if not ours <= {id(layer) for _, layer in chain}:
        chain = chosen
    for name, layer in chain:
        if "_offload" in vars(layer):
            raise EmuError(f"{name} is offloaded already", "offload a model once; change a plain copy of it")
        if "of" in vars(layer) and "stage" in vars(layer):
            raise EmuError(f"{name} lies on a stage of a pipeline", "offload the model before Pipeline takes it over")
    offload = vars(model)["_offloads"] = Offload(rank, ahead, least_bytes)
    for place, (name, layer) in enumerate(chain):
        made: Any = layer
        made.__class__ = _offloading(type(layer))
        vars(layer)["_offload"] = (offload, place, name, id(layer) in ours)
        for part in layer.modules():
            if (checkpoints := vars(part).get("_chain")) is not None:
                checkpoints.keep = offload.keep
    return offload


class Visit:
    """One call of a layer.

    Args:
        place, name: of the layer.
        goes: whether what it keeps travels.
        before: the call of the layer before it in the same forward, if that was its predecessor here.
    """

    def __init__(self, offload: Offload, place: int, name: str, goes: bool, before: Visit | None) -> None:
        self.offload, self.place, self.name, self.before = offload, place, name, before
        self.goes, self.entered, self.kept = goes, False, False
        self.luggage: list[weakref.ref[Luggage]] = []  # its own, and what it shares with layers before
        self.copies: list[HostCopy] = []  # on their way to the host
        self._here: Callable[[], set[int]] = set

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> saved_tensors_hooks:
        """Within it, what is saved gets tickets."""
        given = [t for t in tensors_of((args, kwargs)) if not t.requires_grad or t.is_leaf]
        held = [*layer.parameters(), *layer.buffers()]
        # Looked up late: sharded parameters come when their unit begins.
        self._here = lambda: {storage_of(t) for t in (*given, *held) if t.layout is torch.strided}
        return saved_tensors_hooks(self.pack, _unpack)

    def end(self) -> None:
        self._here = set

    def pack(self, x: Tensor) -> Ticket | Seat:
        if not self.kept:
            self.kept = True
            self.offload.set_out()
        opened = self.enter
        if not (self.goes and travels(x)) or isinstance(x._base, nn.Parameter) or storage_of(x) in self._here():
            return Seat(x, self.name, opened)
        if x.untyped_storage().nbytes() < self.offload.least_bytes:
            return Seat(x, self.name, opened)
        luggage, new = self.offload.registry.luggage(x)
        if new or all(luggage is not known() for known in self.luggage):
            self.luggage.append(weakref.ref(luggage))
        return Ticket(x, luggage, self.name, opened)

    def alive(self) -> Iterator[Luggage]:
        return (luggage for reference in self.luggage if (luggage := reference()) is not None)

    def send(self) -> None:
        """Starts to copy to the host what is not there."""
        going = [luggage for luggage in self.alive() if luggage.may_leave]
        self.copies = self.offload.rank.to_host([luggage.send() for luggage in going], self.name) if going else []
        for luggage, copy in zip(going, self.copies):
            luggage.copy = copy

    def leave(self) -> None:
        """The device lets go of it, when it is on the host."""
        for copy in self.copies:
            copy.wait()
        self.copies = []

    def comes(self) -> None:
        """Its backward is the next: it is fetched while the device waits for the gradient."""
        if not self.entered:
            self.offload.fetch(self, self.offload.ahead)

    def enter(self) -> None:
        """Its backward begins: the first of its saved tensors is asked for."""
        if not self.entered:
            self.entered = True
            self.offload.enters(self)

    def stay(self) -> None:
        """It is needed again before it left. What nobody asks for any more leaves all the same."""
        needed = {id(luggage.copy) for luggage in self.alive()}
        for copy in self.copies:
            if id(copy) not in needed:
                copy.wait()
        self.copies = []

    def fetch(self) -> bool:
        """Starts to bring it back. Returns whether there is anything of it."""
        alive = list(self.alive())
        self.offload.rank.fetch([luggage.copy for luggage in alive if luggage.copy is not None])
        return bool(alive)


class Offload:
    """What one rank's layers have in the host's memory.

    Args:
        rank, ahead, least_bytes: see `offloaded`.
    """

    def __init__(self, rank: Rank, ahead: int, least_bytes: int) -> None:
        self.rank, self.ahead, self.least_bytes = rank, ahead, least_bytes
        self.registry = Registry()
        self.last: Visit | None = None  # the last call that is over
        self._now: Visit | None = None  # the call under way
        self._ready: list[Visit] = []  # calls that are over, whose tensors have not set out
        self._leaving: list[Visit] = []  # whose tensors have set out, and are on the device, too

    def call(
        self, at: tuple[Offload, int, str, bool], run: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any
    ):
        """A layer's call."""
        if not torch.is_grad_enabled() or _within_a_checkpoint(at[2]):
            return run(*args, **kwargs)
        _, place, name, goes = at
        last = self.last
        visit = Visit(self, place, name, goes, last if last is not None and last.place == place - 1 else None)
        outer, self._now = self._now, visit
        try:
            with visit.begin(layer, args, kwargs):
                out = run(*args, **kwargs)
        finally:
            self._now, self.last = outer, visit
            visit.end()
        if visit.kept:
            while len(self._leaving) >= self.ahead:
                self._leaving.pop(0).leave()
            self._ready.append(visit)
        return out

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """What a checkpointed layer's kept inputs pass through; see keeping.py."""
        if self._now is None:
            return lambda: x
        kept = self._now.pack(x)
        return lambda: _unpack(kept)

    def set_out(self) -> None:
        """A layer begins to keep something, so the one before is not the last."""
        ready, self._ready = self._ready, []
        for visit in ready:
            visit.send()
            if visit.copies:
                self._leaving.append(visit)

    def enters(self, visit: Visit) -> None:
        """A layer's backward begins."""
        if visit in self._ready:
            self._ready.remove(visit)
        if visit in self._leaving:
            self._leaving.remove(visit)
            visit.stay()
        visit.fetch()
        self.fetch(visit.before, self.ahead)

    def fetch(self, visit: Visit | None, most: int) -> None:
        """Starts to bring back what so many layers kept, from one on towards the first."""
        while visit is not None and most:
            most -= visit.fetch()
            visit = visit.before

    def __deepcopy__(self, memo: Any) -> Offload:
        made = memo[id(self)] = Offload(self.rank, self.ahead, self.least_bytes)
        return made


def _unpack(kept: Ticket | Seat) -> Tensor:
    kept.opened()
    return kept.tensor()


def _within_a_checkpoint(name: str) -> bool:
    """Whether a checkpoint decides what is kept here, which will be computed again."""
    torchs: Any = torch._C  # whose types do not say all that it has
    hooks = torchs._autograd._top_saved_tensors_default_hooks(True)
    module = "" if hooks is None else getattr(hooks[0], "__module__", "")
    if module == "emu.parallel.checkpointing.frames":
        raise EmuError(
            f"{name} was checkpointed after it was offloaded, so nothing of it would travel",
            "call checkpointed(model, ...) first, and then offloaded(model, rank)",
        )
    return module == "torch.utils.checkpoint"


_classes: dict[type, type] = {}


def _offloading(cls: type) -> type:
    """A module class whose calls send what they keep to the host."""
    if cls not in _classes:
        plain: Any = cls.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            at = self._offload
            return at[0].call(at, plain.__get__(self), self, args, kwargs)

        about = {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (cls,), about)
    return _classes[cls]
