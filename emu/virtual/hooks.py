"""Process-wide hooks that torch offers no per-thread form of, in force while any launch is on.

They serve the rank whose thread calls, and do nothing on any other thread.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from torch.utils import _python_dispatch

from emu.virtual.tracker import Tracker

_MODE_FLAGS = [
    name for name in vars(_python_dispatch) if name.startswith("_is_in_") and name.endswith(("mode", "internals"))
]
_here = threading.local()  # .tracker: the Tracker of the rank whose thread this is


_HOST_READS = ("tolist", "numpy", "__repr__")  # ways to a tensor's values that are no operators


def set_tracker(tracker: Tracker | None) -> None:
    """Says which rank this thread is; None when it is none any more."""
    _here.tracker = tracker


def _tracker() -> Tracker | None:
    return getattr(_here, "tracker", None)


class TorchHooks:
    """Module scopes, parameters, optimizer steps, storage resizes and copies, as torch announces them.

    In force once, however many launches are under way (one may be inside another).
    """

    users = 0
    lock = threading.Lock()
    resize: Any = None
    undo = ExitStack()
    emptied: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # storage -> bytes that it had

    def __enter__(self) -> TorchHooks:
        with self.lock:
            TorchHooks.users += 1
            if TorchHooks.users == 1:
                TorchHooks.undo = self._install()
        return self

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            TorchHooks.users -= 1
            if not TorchHooks.users:
                TorchHooks.undo.close()
                _refill()

    def _install(self) -> ExitStack:
        import torch.optim.optimizer as optimizer

        undo = ExitStack()
        TorchHooks.resize = torch.UntypedStorage.resize_
        undo.callback(setattr, torch.UntypedStorage, "resize_", TorchHooks.resize)
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
        undo.callback(delattr, torch.UntypedStorage, "clone")  # what it inherits shows again
        torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
        for name in _HOST_READS:
            undo.callback(_restore, Tensor, name, vars(Tensor).get(name))
            setattr(Tensor, name, _host_read(name, getattr(Tensor, name)))
        undo.callback(setattr, torch, "load", torch.load)
        torch.load = _loading(torch.load)
        if "ipykernel" in sys.modules:  # whose own hook ignores a breakpoint() on a rank's thread
            import pdb

            undo.callback(setattr, sys, "breakpointhook", sys.breakpointhook)
            sys.breakpointhook = pdb.set_trace
        for flag in _MODE_FLAGS:  # torch puts them back in order of nesting, which ranks do not keep
            undo.callback(setattr, _python_dispatch, flag, getattr(_python_dispatch, flag))
        for handle in (
            nn_module.register_module_forward_pre_hook(_before_forward),
            nn_module.register_module_forward_hook(_after_forward, always_call=True),
            nn_module.register_module_parameter_registration_hook(_parameter),
            nn_module.register_module_buffer_registration_hook(_buffer),
            optimizer.register_optimizer_step_pre_hook(_before_step),
            optimizer.register_optimizer_step_post_hook(_after_step),
        ):
            undo.callback(handle.remove)
        return undo


def _before_forward(module: Any, _: Any) -> None:
    if (tracker := _tracker()) is None:
        return
    tracker.stepping = False  # inside a step this is a closure's forward; after one that raised, torch told nobody
    if tracker.names.enter(module):
        tracker.watch(module, "")


def _after_forward(module: Any, _: Any, __: Any) -> None:
    if (tracker := _tracker()) is not None:
        tracker.names.leave()


def _parameter(module: Any, name: str, parameter: Any) -> None:
    if (tracker := _tracker()) is not None and isinstance(parameter, Tensor):
        tracker.adopt(parameter)


def _buffer(module: Any, name: str, buffer: Any) -> None:
    if (tracker := _tracker()) is not None and isinstance(buffer, Tensor):
        tracker.account(buffer, "parameters")


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if (tracker := _tracker()) is None:
        return
    tracker.stepping = True
    for group in optimizer.param_groups:
        for p in group["params"]:
            tracker.adopt(p)
            tracker.gradient(p)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if (tracker := _tracker()) is None:
        return
    tracker.stepping = False
    for p, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor):
                tracker.account(value, "optimizer", like=p)


def _resize(storage: Any, size: int) -> Any:
    tracker = _tracker()
    if tracker is not None:
        tracker.resizes(storage, size)
    before = storage.nbytes()
    result = TorchHooks.resize(storage, size)
    if not size and before:
        TorchHooks.emptied[storage] = before
    if tracker is not None:
        tracker.resized(storage)
    return result


def _refill() -> None:
    """What ranks left empty gets memory again: a debugger that prints a tensor of it would read address 0."""
    for storage, size in list(TorchHooks.emptied.items()):
        if not storage.nbytes():
            storage.resize_(size)
    TorchHooks.emptied.clear()


def _clone(storage: Any) -> Any:
    """copy.deepcopy of a tensor copies its storage, which no operator tells of."""
    if (tracker := _tracker()) is None:
        return super(torch.UntypedStorage, storage).clone()  # type: ignore[misc]
    fresh = type(storage)(storage.nbytes(), device=storage.device)
    tracker.resized(fresh)
    return fresh.copy_(storage)


def _restore(owner: Any, name: str, own: Any) -> None:
    if own is None:
        delattr(owner, name)  # what it inherits shows again
    else:
        setattr(owner, name, own)


def _host_read(name: str, read: Any) -> Any:
    @functools.wraps(read)
    def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (tracker := _tracker()) is not None:
            tracker.host_reads(self, name.strip("_"))
        return read(self, *args, **kwargs)

    return reading


def _loading(load: Any) -> Any:
    """What a rank loads is its own, though no operator tells of it."""

    @functools.wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        if (tracker := _tracker()) is not None:
            for storage in _storages(loaded):
                if getattr(storage, "_emu", None) is None:
                    tracker.resized(storage)
        return loaded

    return loading


def _storages(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value.untyped_storage()
    elif isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, torch.TypedStorage):
        yield value._untyped_storage
    elif isinstance(value, nn_module.Module):
        yield from _storages([*value.parameters(), *value.buffers()])
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
