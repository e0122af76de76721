"""Notices the kernels that a rank's program launches, through the same account of operators as virtual devices.

One dispatch mode below autograd. It records names, phases, flops, bytes, dtypes and streams; module scopes and memory
are what virtual devices add. Phases: what reads a tensor that requires grad is forward; inside an autograd node
backward, or recompute where grad is enabled there; an optimizer's step is told apart by torch's hooks on optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from emu.real.records import dtype_name
from emu.trace.events import HostWait, Kernel
from emu.trace.ops import Op, Work, default_work, op_of

if TYPE_CHECKING:
    from emu.real.device import RealDevice


class Kernels(TorchDispatchMode):
    """Records the kernels of one rank."""

    def __init__(self, device: RealDevice) -> None:
        super().__init__()
        self._device = device
        self._inside: _OneKernel | None = None
        self._stepping = False
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        self._device.kernels = self
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._step(True)),
            register_optimizer_step_post_hook(lambda *_: self._step(False)),
        ]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for hook in self._hooks:
            hook.remove()
        self._device.kernels = None

    def _step(self, on: bool) -> None:
        self._stepping = on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        inputs = _tensors(values)
        learns = any(t.requires_grad for t in inputs)
        out = func(*args, **(kwargs or {}))
        op, device = op_of(func), self._device
        if self._stepping and all(not t.dim() for t in inputs):
            return out  # an optimizer counts its steps on the host
        if op.host_reads:
            device.events.append(HostWait(device.current, op.name))
        if op.launches:
            outputs = _tensors((out,))
            if self._inside is not None:
                self._inside.saw(op, args, inputs, outputs)
            elif typed := outputs or inputs:
                work = _work(op, args, inputs, outputs)
                dtype, phase = dtype_name(typed[0]), self._phase(learns)
                device.events.append(Kernel(op.name, "", phase, *work[:2], dtype, work.dims, device.current))
        return out

    def _phase(self, learns: bool) -> str:
        if torch._C._current_autograd_node() is not None:
            return "recompute" if torch.is_grad_enabled() else "backward"
        return "optimizer" if self._stepping else "forward" if learns and torch.is_grad_enabled() else ""

    @contextmanager
    def one_kernel(self, name: str, flops: int | None, bytes: int | None, dtype: torch.dtype | None) -> Iterator[None]:
        if self._inside is not None:  # a kernel inside a kernel is part of it
            yield
            return
        inside = self._inside = _OneKernel()
        try:
            yield
        finally:
            self._inside = None
        node = torch._C._current_autograd_node()
        phase = "forward" if node is None else "recompute" if torch.is_grad_enabled() else "backward"
        self._device.events.append(
            Kernel(
                name,
                "",
                phase,
                inside.flops if flops is None else flops,
                inside.bytes if bytes is None else bytes,
                inside.dtype if dtype is None else str(dtype).removeprefix("torch."),
                (),
                self._device.current,
            )
        )


class _OneKernel:
    """What happens inside rank.kernel(...): flops of all, bytes of what came from outside and of the last result."""

    def __init__(self) -> None:
        self.flops = 0
        self.dtype = "float32"
        self._made: set[int] = set()
        self._keep: list[Any] = []  # storages stay alive, so that their addresses stay theirs
        self._read: dict[int, int] = {}
        self._last = 0

    @property
    def bytes(self) -> int:
        return sum(self._read.values()) + self._last

    def saw(self, op: Op, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.flops += _work(op, args, inputs, outputs).flops
        if outputs:
            self.dtype = dtype_name(outputs[0])
        for t in inputs:
            if t.untyped_storage()._cdata not in self._made:
                self._read.setdefault(t.untyped_storage()._cdata, t.nbytes)
        self._made |= {t.untyped_storage()._cdata for t in outputs}
        self._keep += [t.untyped_storage() for t in (*inputs, *outputs)]
        self._last = sum(t.nbytes for t in outputs)


def _work(op: Op, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Work:
    return op.count(args, outputs) if op.count is not None else default_work(inputs, outputs)


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(t for t in value if isinstance(t, Tensor))
    return found
