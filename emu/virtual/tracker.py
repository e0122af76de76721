"""What a virtual device notices of the ops a rank runs: kernels, storages, whose tensors, which streams.

One dispatch mode per rank thread, below autograd. This is the hot path: an op costs what this adds to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from emu.spmd.errors import VirtualOutOfMemory
from emu.trace.events import Kernel
from emu.trace.ops import Op, default_work, op_of
from emu.virtual.device import VirtualDevice
from emu.virtual.kernel import Inner, OneKernel, name_of
from emu.virtual.lines import user_line
from emu.virtual.recalled import recalled
from emu.virtual.shapes import META, NORMS, only_moves, statistics_as_on_cpu, without_values
from emu.virtual.streams import Use, check_use, extent
from emu.virtual.tensors import Tensors
from emu.virtual.thread import Stop

if TYPE_CHECKING:
    from emu.virtual.scheduler import Scheduler

_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str})
_STATES = ("zeros_like", "zeros", "lift_fresh")
_node = torch._C._current_autograd_node
_grad = torch.is_grad_enabled
_task = torch._C._current_graph_task_id
_new = tuple.__new__  # a named tuple's own constructor takes twice as long


class Tracker(Tensors, TorchDispatchMode):
    """Accounts for everything one rank's program does."""

    def __init__(self, device: VirtualDevice, scheduler: Scheduler) -> None:
        super().__init__(device)
        self._scheduler = scheduler
        self._events = device.events
        self._backward = False
        self._backward_task, self._backward_line = -1, ""
        self._meta = device.torch_device.type == "meta"
        self._kernel: OneKernel | None = None
        device.tracker = self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps the method below, at 5 us an op, and loads its compiler for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scheduler = self._scheduler
        if scheduler.ending or scheduler.hooked:
            scheduler.before_op(self.device.rank, Stop("op", func, args))
        op = op_of(func)
        if op.composite:  # seen whole only in inference mode; what it is made of is what runs
            with self:
                return func.decompose(*args, **(kwargs or {}))
        ledger = self.ledger
        if op.views and not kwargs and not self._meta:  # more than half of all ops: nothing runs, and nothing new lives
            t = args[0]
            if (self._backward or _node() is None) and isinstance(t, Tensor):
                block = getattr(t.untyped_storage(), "_emu", None)
                if block is not None and block.ledger is ledger and (type(t) is Tensor or block.watched):
                    return op.call(*args)
        if self._meta:
            if only_moves(op, args, kwargs):
                return args[0].to(META)
            args, kwargs = without_values(func, op, args, kwargs, self.device.rank, self.stepping)

        inputs: list[Tensor] = []
        for a in args:
            kind = type(a)
            if kind is Tensor:
                inputs.append(a)
            elif kind in _PLAIN:
                continue
            elif isinstance(a, Tensor):
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
            elif not block.bytes:
                if not op.views and not op.resizes:
                    self.gone(t, block, op.name)
            elif type(t) is nn.Parameter and not block.watched:
                self.adopt(t, block)

        if op.resizes:
            self.before_resize(args)
        try:
            if self._meta:
                out = recalled(op, args, kwargs)
            else:
                out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        except RuntimeError as error:
            if "DefaultCPUAllocator" in str(error):
                self.no_host_memory(error)
            raise
        if self._meta and op.name in NORMS:
            out = statistics_as_on_cpu(out, inputs)
        if op.views and (self._backward or _node() is None):
            return out  # nothing runs, and nothing new lives

        node = _node()
        if node is None:
            if self._backward:
                self._backward = False
                self.names.forget()
            scope = self.names.scope
            grad = _grad()
            # A module that is called is a forward, also where gradients are not recorded: within an autograd Function.
            phase = "optimizer" if self.stepping else "forward" if scope or (learns and grad) else ""
        else:
            if not self._backward:
                self._backward = True
                ledger.keep_temporaries()
            grad = _grad()
            # So is a module that is called in a backward, also where its autograd Functions run, without gradients.
            if grad or self.names.again:
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
                    if self.stepping and not t.dim() and not any(i.dim() for i in inputs):
                        storage._emu = Inner(ledger)  # an optimizer counts its steps in the host's memory
                    elif kernel is not None:
                        storage._emu = Inner(ledger)
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
                            self._made(block, op.name, None)
        elif op.resizes:
            self.resized(inputs[0].untyped_storage())
        if device.many_streams and (op.launches or op.host_reads):
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
            dtype_name = name_of(dtype)
            event = _new(Kernel, (op.name, scope, phase, flops, moved, dtype_name, dims, stream.name))
            self._events.append(event)
            if device.clock is not None:
                device.clock.kernel(event)
        return out

    def _order(self, op: Op, inputs: list[Tensor], outputs: Any, written: Sequence[Tensor], stream: Any) -> None:
        """Several streams are in use: notes who touches what, and raises on a race."""
        stream.tick = tick = stream.tick + 1
        device, name, own = self.device, op.name, stream.name
        line = self._line()
        for t in inputs:
            block = getattr(t.untyped_storage(), "_emu", None)
            if block is None:
                continue
            writes = any(t is w for w in written) if written else False
            uses = block.uses
            if (
                uses is not None and uses.alone and uses.owner == own and len(uses) < uses.most
            ):  # as check_use, in short
                size = t.nbytes
                start, end = (0, size) if size == block.bytes and t.is_contiguous() else extent(t)
                uses.append(_new(Use, (own, tick, start, end, writes, name, line, 0)))
            else:
                check_use(device, block, stream, t, writes, name, line)
        for t in outputs:
            block = getattr(t.untyped_storage(), "_emu", None)
            if block is not None and block.uses is None:
                self._made(block, name, line)

    def _line(self) -> str:
        """The line of the program. Of torch's own backward it is the one that called it, far up: looked for once."""
        node = _node()
        if node is None or _grad() or isinstance(node, BackwardCFunction):
            return user_line(above=4)
        task = _task()
        if task != self._backward_task:
            self._backward_task, self._backward_line = task, user_line(above=4)
        return self._backward_line

    def _made(self, block: Any, what: str, line: str | None) -> None:
        """The current stream's memory, which it may write from its latest kernel on."""
        stream = self.device.stream_now
        block.uses = uses = self.device.uses_of(block, stream.name)
        uses.append(_new(Use, (stream.name, stream.tick, 0, block.bytes, True, what, line, 0)))

    # One kernel out of many ops.

    @contextmanager
    def one_kernel(self, name: str, flops: int | None, bytes: int | None, dtype: torch.dtype | None) -> Iterator[None]:
        if self._kernel is not None:  # a kernel inside a kernel is part of it
            yield
            return
        kernel = self._kernel = OneKernel()
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
                block = self.ledger.alloc(storage, category, self.names.scope, self.device.stream_now.name)
                if block is not None and self.device.many_streams:
                    self._made(block, name, None)
        phase = "forward" if node is None else "recompute" if _grad() or self.names.again else "backward"
        event = Kernel(
            name,
            self.names.scope,
            phase,
            kernel.flops if flops is None else flops,
            kernel.bytes + out_bytes if bytes is None else bytes,
            kernel.dtype if dtype is None else name_of(dtype),
            kernel.dims,
            self.device.stream_now.name,
        )
        self._events.append(event)
        if self.device.clock is not None:
            self.device.clock.kernel(event)


def _written(op: Op, args: Any, kwargs: Any) -> Sequence[Tensor]:
    """The tensors that an op writes: in place, as out=, or in a list of either kind."""
    if not op.writes and not op.out_names:
        return ()
    given = [args[i] for i in op.writes if i < len(args)]
    if kwargs:
        given += [kwargs.get(name) for name in op.out_names]
    found: list[Tensor] = []
    for a in given:
        found.extend((a,) if isinstance(a, Tensor) else a or ())
    return found
