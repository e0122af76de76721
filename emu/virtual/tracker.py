"""What a virtual device notices of the ops a rank runs: kernels, storages, whose tensors, which streams.

One dispatch mode per rank thread, below autograd. This is the hot path: an op costs what this adds to it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from emu.spmd.errors import CrossRankAccess, EmuError, VirtualOutOfMemory
from emu.trace.events import Kernel
from emu.trace.ops import Op, default_work, op_of
from emu.virtual.device import VirtualDevice, refuse_trainable
from emu.virtual.hbm import Block, Ledger
from emu.virtual.lines import user_line
from emu.virtual.names import Names
from emu.virtual.shapes import META, only_moves, without_values
from emu.virtual.streams import Use, check_use

if TYPE_CHECKING:
    from emu.virtual.scheduler import Scheduler

_dtypes: dict[torch.dtype, str] = {}
_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str})
_STATES = ("zeros_like", "zeros", "lift_fresh")
_node = torch._C._current_autograd_node
_grad = torch.is_grad_enabled


class Tracker(TorchDispatchMode):
    """Accounts for everything one rank's program does."""

    def __init__(self, device: VirtualDevice, scheduler: Scheduler) -> None:
        super().__init__()
        self.device = device
        self.names = Names()
        self.category: str | None = None  # overrides the category of what is allocated
        self.stepping = False  # inside an optimizer's step
        self._scheduler = scheduler
        self._ledger = device.ledger
        self._events = device.events
        self._backward = False
        self._meta = device.torch_device.type == "meta"
        self._kernel: _OneKernel | None = None
        device.tracker = self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps the method below, at 5 us an op, and loads its compiler for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scheduler = self._scheduler
        if scheduler.ending or scheduler.hooked:
            scheduler.before_op(self.device.rank)
        op = op_of(func)
        if op.composite:  # seen whole only in inference mode; what it is made of is what runs
            with self:
                return func.decompose(*args, **(kwargs or {}))
        ledger = self._ledger
        if self._meta:
            if only_moves(op, args, kwargs):
                return args[0].to(META)
            args, kwargs = without_values(func, op, args, kwargs, self.device.rank, self.stepping)

        inputs: list[Tensor] = []
        for a in args:
            kind = type(a)
            if kind in _PLAIN:
                continue
            if kind is Tensor or isinstance(a, Tensor):
                inputs.append(a)
            elif kind is list or kind is tuple:
                inputs.extend(t for t in a if isinstance(t, Tensor))
        if kwargs:
            for a in kwargs.values():
                kind = type(a)
                if kind in _PLAIN:
                    continue
                if isinstance(a, Tensor):
                    inputs.append(a)
                elif kind is list or kind is tuple:
                    inputs.extend(t for t in a if isinstance(t, Tensor))
        learns = False
        for t in inputs:
            if t.requires_grad:
                learns = True
            block = getattr(t.untyped_storage(), "_emu", None)
            if block is None or block.ledger is not ledger:
                self.foreign(t, any(t is w for w in _written(op, args, kwargs)), op.name)
            elif type(t) is nn.Parameter and not block.watched:
                self.adopt(t, block)

        if op.resizes:
            self._before_resize(args)
        try:
            out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        except RuntimeError as error:
            if "DefaultCPUAllocator" in str(error):
                self._no_host_memory(error)
            raise
        if op.views and (self._backward or _node() is None):
            return out  # nothing runs, and nothing new lives

        node = _node()
        if node is None:
            if self._backward:
                self._backward = False
                self.names.forget()
            scope = self.names.scope
            grad = _grad()
            phase = "optimizer" if self.stepping else "forward" if learns and grad else ""
        else:
            if not self._backward:
                self._backward = True
                ledger.keep_temporaries()
            grad = _grad()
            if grad:
                phase, scope = "recompute", self.names.scope
            else:
                phase, scope = "backward", self.names.of_node(node)

        if type(out) is Tensor:
            outputs: Any = (out,)
        elif type(out) is tuple or type(out) is list:
            outputs = [t for t in out if isinstance(t, Tensor)]
        else:
            outputs = (out,) if isinstance(out, Tensor) else ()
        device = self.device
        stream = device.stream_now
        kernel = self._kernel
        if op.fresh:
            for t in outputs:
                storage = t.untyped_storage()
                if getattr(storage, "_emu", None) is None:
                    if kernel is not None:
                        storage._emu = _Inner(ledger)
                        kernel.made.append(weakref.ref(storage))
                    else:
                        if self.category is not None:
                            category = self.category
                        elif self.stepping:  # what a step makes full of zeros, it makes to keep
                            category = "optimizer" if op.name in _STATES else "temporary"
                        else:
                            category = "activations" if grad else "temporary"
                        try:
                            ledger.alloc(storage, category, scope, stream.name, node is None)
                        except VirtualOutOfMemory:
                            self.stepping = False  # torch tells nobody that an optimizer's step ended so
                            raise
                        if device.many_streams and not op.launches and (block := getattr(storage, "_emu", None)):
                            block.uses = [
                                Use(stream.name, stream.tick, 0, block.bytes, True, op.name, None)
                            ]  # this stream's memory
        elif op.resizes:
            self.resized(inputs[0].untyped_storage())
        if device.many_streams:
            self._order(op, inputs, outputs, _written(op, args, kwargs), stream)
        if self.stepping and all(not t.dim() for t in inputs):
            return out  # an optimizer counts its steps on the host
        if op.host_reads:
            device.host_wait(stream, op.name)
        if op.launches and (inputs or outputs):
            if kernel is not None:
                kernel.saw(op, args, inputs, outputs)
                return out
            flops, moved, dims = op.count(args, outputs) if op.count is not None else default_work(inputs, outputs)
            dtype = (outputs or inputs)[0].dtype
            dtype_name = _dtypes.get(dtype) or _name(dtype)
            event = tuple.__new__(Kernel, (op.name, scope, phase, flops, moved, dtype_name, dims, stream.name))
            self._events.append(event)
            if device.clock is not None:
                device.clock.kernel(event)
        return out

    def _no_host_memory(self, error: RuntimeError) -> None:
        """torch found no memory for a tensor: too large for the device, or for the machine that stands in for it."""
        size = int((re.search(r"allocate (\d+) bytes", str(error)) or [0, 0])[1])
        self._ledger.make_room(size, self.names.scope)
        raise EmuError(
            f"rank {self.device.rank}: a tensor of {size:,} bytes fits the virtual device, but not this machine's memory",
            "run the program on shapes alone: backend='shape'; or make it smaller",
        ) from error

    def host_reads(self, t: Tensor, what: str) -> None:
        """The host looks at a tensor's values by a way that is no operator."""
        if t.is_meta or t.layout is not torch.strided:
            return
        block = getattr(t.untyped_storage(), "_emu", None)
        if block is None or block.ledger is not self._ledger:
            self.foreign(t, False, what)
            return
        if self.device.many_streams:
            check_use(self.device, block, self.device.stream_now, t, False, what, _Line())
        self.device.host_wait(self.device.stream_now, what)

    # Whose tensor is it?

    def foreign(self, t: Tensor, writes: bool, what: str) -> Block | None:
        """A tensor that this device did not make: host data to read, or an error."""
        storage = t.untyped_storage()
        block = getattr(storage, "_emu", None)
        rank = self.device.rank
        if block is not None and block.ledger is self._ledger:
            return block
        if block is not None and not block.ledger.closed:
            name = f" of {block.scope}" if block.scope else ""
            raise CrossRankAccess(
                f"rank {rank}: {what} uses a tensor of shape {tuple(t.shape)} ({block.category}{name}) that lives on rank "
                f"{block.ledger.rank}",
                "send it with a collective; a list or module made outside of the program is shared by all ranks",
                rank=rank,
                owner=block.ledger.rank,
            )
        if not storage.nbytes():
            return None
        if t.requires_grad:
            raise refuse_trainable(t, rank, what)
        if writes:
            raise CrossRankAccess(
                f"rank {rank}: {what} writes into a tensor of shape {tuple(t.shape)} that was not made on this rank: what is "
                "made outside of the program (or comes from numpy) is host data, which every rank may only read",
                "clone it first, and write into the clone",
                rank=rank,
            )
        return None

    def adopt(self, parameter: Tensor, block: Block | None = None, scope: str | None = None) -> None:
        """A storage turns out to hold a parameter; its gradient will be one, too."""
        block = block or getattr(parameter.untyped_storage(), "_emu", None)
        if block is None or block.ledger is not self._ledger or block.watched:
            return
        block.watched = True
        self._ledger.recategorise(block, "parameters", scope)
        # Its own id, since copies inherit attributes but not hooks.
        if parameter.requires_grad and parameter.is_leaf and getattr(parameter, "_emu_watched", 0) != id(parameter):
            reference = weakref.ref(self)
            parameter._emu_watched = id(parameter)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(lambda p: _gradient(reference(), p))

    def watch(self, module: nn.Module, name: str) -> None:
        """Names a module's parts, and in memory its parameters and buffers."""
        self.names.watch(module, name)
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            block = getattr(tensor.untyped_storage(), "_emu", None)
            if type(block) is Block and block.ledger is self._ledger:
                self._ledger.recategorise(block, "parameters", ".".join(filter(None, (name, path))))

    def gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.account(parameter.grad, "gradients")

    def account(self, t: Tensor, category: str, like: Tensor | None = None) -> None:
        """Moves a tensor's storage to a category, and to the place of another tensor's, if this device has it."""
        block = getattr(t.untyped_storage(), "_emu", None)
        if type(block) is Block and block.ledger is self._ledger and block.category != "parameters":
            model = getattr(like.untyped_storage(), "_emu", None) if isinstance(like, Tensor) else None
            self._ledger.recategorise(block, category, model.scope if type(model) is Block else None)

    def resizes(self, storage: Any, size: int) -> None:
        """Before a storage changes its size: raises if the new one does not fit beside the old one."""
        block = getattr(storage, "_emu", None)
        if block is None or (type(block) is Block and block.ledger is self._ledger and size not in (0, block.bytes)):
            self._ledger.make_room(size, self.names.scope)

    def resized(self, storage: Any) -> None:
        block = getattr(storage, "_emu", None)
        if block is None:
            self._ledger.alloc(storage, self.category or "temporary", self.names.scope, self.device.stream_now.name)
        elif type(block) is Block and block.ledger is self._ledger:
            self._ledger.resized(block, storage.nbytes(), self.device.stream_now.name)

    def _before_resize(self, args: Any) -> None:
        t, count = args[0], 1
        for n in args[1]:
            count *= n
        needed = (t.storage_offset() + count) * t.element_size()
        if needed > t.untyped_storage().nbytes():  # resize_ never shrinks a storage
            self.resizes(t.untyped_storage(), needed)

    def _order(self, op: Op, inputs: list[Tensor], outputs: Any, written: list[Tensor], stream: Any) -> None:
        """Several streams are in use: notes who touches what, and raises on a race."""
        if not op.launches and not op.host_reads:
            return
        stream.tick += 1
        device = self.device
        changed = {id(t) for t in written}
        line = _Line()
        for t in inputs:
            block = getattr(t.untyped_storage(), "_emu", None)
            if block is not None:
                check_use(device, block, stream, t, id(t) in changed, op.name, line)
        for t in outputs:
            block = getattr(t.untyped_storage(), "_emu", None)
            if block is not None and block.uses is None:
                block.uses = [Use(stream.name, stream.tick, 0, block.bytes, True, op.name, line)]

    # One kernel out of many ops.

    @contextmanager
    def one_kernel(self, name: str, flops: int | None, bytes: int | None) -> Iterator[None]:
        if self._kernel is not None:  # a kernel inside a kernel is part of it
            yield
            return
        kernel = self._kernel = _OneKernel()
        try:
            yield
        finally:
            self._kernel = None
        out_bytes = 0
        node = _node()
        for reference in kernel.made:
            storage = reference()
            if storage is not None:
                out_bytes += storage.nbytes()
                category = "activations" if _grad() else "temporary"
                self._ledger.alloc(storage, category, self.names.scope, self.device.stream_now.name)
        phase = ("backward" if node is not None else "forward") if not _grad() or node is None else "recompute"
        event = Kernel(
            name,
            self.names.scope,
            phase,
            kernel.flops if flops is None else flops,
            kernel.bytes + out_bytes if bytes is None else bytes,
            kernel.dtype,
            kernel.dims,
            self.device.stream_now.name,
        )
        self._events.append(event)
        if self.device.clock is not None:
            self.device.clock.kernel(event)


class _Inner:
    """In place of a block: a storage made inside a kernel, which is this device's but takes none of its memory."""

    __slots__ = ("bytes", "category", "ledger", "scope", "uses", "watched")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.watched, self.bytes = ledger, True, 0
        self.category, self.scope = "temporary", ""
        self.uses = None


class _OneKernel:
    """What happens inside rank.kernel(...)."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Any]] = []
        self.flops = self.bytes = 0
        self.dtype = "float32"
        self.dims: tuple[int, ...] = ()  # of the largest product inside: what tensor cores see of it
        self._most = 0
        self._read: set[int] = set()

    def saw(self, op: Op, args: Any, inputs: list[Tensor], outputs: Any) -> None:
        work = op.count(args, outputs) if op.count is not None else default_work(inputs, outputs)
        self.flops += work.flops
        if work.dims and work.flops > self._most:
            self._most, self.dims = work.flops, work.dims
        if outputs:
            self.dtype = _dtypes.get(outputs[0].dtype) or _name(outputs[0].dtype)
        for t in inputs:
            storage = t.untyped_storage()
            block = getattr(storage, "_emu", None)
            if type(block) is Block and id(storage) not in self._read:
                self._read.add(id(storage))
                self.bytes += t.nbytes


class _Line:
    """The user's line, looked up only if a message needs it; until then it is where this op was called."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = user_line()

    def __str__(self) -> str:
        return self._text


def _written(op: Op, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an op writes: in place, as out=, or in a list of either kind."""
    given = [args[i] for i in op.writes if i < len(args)]
    if kwargs:
        given += [kwargs.get(name) for name in op.out_names]
    found: list[Tensor] = []
    for a in given:
        found.extend((a,) if isinstance(a, Tensor) else a or ())
    return found


def _gradient(tracker: Tracker | None, parameter: Tensor) -> None:
    if tracker is not None:
        tracker.gradient(parameter)


def _name(dtype: torch.dtype) -> str:
    _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return _dtypes[dtype]
