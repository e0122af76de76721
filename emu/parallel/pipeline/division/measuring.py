"""How much every unit of a plain model computes and keeps: measured, on shapes alone.

One microbatch goes forward through a copy of the model on torch's meta device. Nothing is computed and nothing allocated;
it takes milliseconds a layer. It happens in a thread of its own: whatever looks on in the caller's, as a virtual device
does at each of a rank's operations, sees nothing of it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from emu.parallel.pipeline.division.units import units_of
from emu.spmd import EmuError

META = torch.device("meta")


class Measured(NamedTuple):
    """What one unit needs for one microbatch, code after it and before the next one included.

    Fields:
        flops: of its products, forward; a multiply-add is two. Looking up an embedding is none, nor is a norm.
        saved: storage -> bytes, of what is kept for backward, parameters and the batch itself not included. Two units may
            keep the same storage.
        parameters: parameter -> how many numbers it has. Two units may use the same parameter.
        input_bytes: of its first argument.
    """

    flops: int
    saved: dict[int, int]
    parameters: dict[int, int]
    input_bytes: int


def measure(model: nn.Module, x: Tensor, y: Tensor) -> list[Measured]:
    """What every unit of a model needs, in the order of `units_of`.

    Args:
        model: a plain module with `loss_sum(x, y)`; it is left as it is.
        x, y: one microbatch, of which only shapes and dtypes count.

    Raises:
        EmuError: the model's forward cannot do without numbers.
    """
    return _apart(lambda: _measured(model, x, y))


def _apart(work: Callable[[], Any]) -> Any:
    """The result of work in a new thread, which has none of the caller's modes."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="measuring")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _measured(model: nn.Module, x: Tensor, y: Tensor) -> list[Measured]:
    shapes = _on_meta(model)
    rehearsal = _Rehearsal(shapes)
    batch = tuple(torch.empty_like(t, device=META) for t in (x, y))
    rehearsal.known.update(_storage(t)[0] for t in batch)
    try:
        with META, rehearsal.watching(), rehearsal:  # what is made without a device is on that one
            kept: Any = shapes
            loss = kept.loss_sum(*batch)
    except EmuError:
        raise
    except Exception as error:
        raise EmuError(
            f"{type(model).__name__} cannot be measured: on shapes without numbers its forward fails with "
            f"{type(error).__name__}: {error}",
            "say where stages begin yourself: layers per stage, as stages=[3, 3, 2], or the names of modules",
        ) from error
    del loss
    return rehearsal.result()


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without numbers."""
    without: dict[int, Any] = {}
    for module in model.modules():
        for t in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(t, Tensor) and id(t) not in without:
                empty = torch.empty_like(t.detach(), device=META)
                without[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copy.deepcopy(model, without)


class _Rehearsal(TorchDispatchMode):
    """Sees the operations of a forward, and puts them down to units."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # not cheap to import

        self._counts = flop_registry
        self.units = units_of(model)
        self.known = {_storage(t)[0] for t in (*model.parameters(), *model.buffers())}
        self.now = 0
        self.flops = [0] * len(self.units)
        self.saved: list[dict[int, int]] = [{} for _ in self.units]
        self.input_bytes = [0] * len(self.units)
        self._alive: list[Any] = []  # storages, so that none is made in the place of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.flops[self.now] += _attention_flops(*args, **kwargs)
        elif func._overloadpacket in self._counts:
            self.flops[self.now] += self._counts[func._overloadpacket](*args, **kwargs, out_val=out)
        return out

    @contextmanager
    def watching(self) -> Any:
        """While it lasts, units say when they are called, and autograd what it keeps."""
        for number, unit in enumerate(self.units):
            unit.module.register_forward_pre_hook(self._entering(number), with_kwargs=True)
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t):
            yield

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.now = number
            first = next(iter((*args, *kwargs.values())), None)
            if isinstance(first, Tensor):
                self.input_bytes[number] = max(self.input_bytes[number], first.nbytes)

        return enter

    def _keep(self, t: Tensor) -> Tensor:
        key, storage = _storage(t)
        if key not in self.known:
            self._alive.append(storage)
            self.saved[self.now][key] = storage.nbytes()
        return t

    def result(self) -> list[Measured]:
        parameters = [{id(p): p.numel() for p in unit.module.parameters()} for unit in self.units]
        return [Measured(*each) for each in zip(self.flops, self.saved, parameters, self.input_bytes)]


def _storage(t: Tensor) -> tuple[int, Any]:
    storage = t.untyped_storage()
    return storage._cdata, storage


def _attention_flops(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **rest: Any
) -> int:
    """Of attention in one kernel, which torch does not count for the CPU: two products over the pairs that meet."""
    queries, keys = q.shape[-2], k.shape[-2]
    pairs = sum(min(i + 1, keys) for i in range(queries)) if is_causal else queries * keys
    return 2 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1])
