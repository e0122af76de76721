"""A real device: a CPU process or a GPU, its streams, and the record of what it did."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from emu.real.board import Board
from emu.real.channel import RealChannel, RealWork
from emu.real.kernels import Kernels
from emu.real.links import Links
from emu.real.records import dtype_name
from emu.spmd.calls import Channel
from emu.trace.events import Event, EventRecord, EventWait, HostCopy, HostWait, Mark

DEFAULT = "default"


class RealDevice:
    """The Device of a rank under torch.distributed.

    On CUDA, streams and events are torch's. On a CPU there is one thread of computation, so a kernel on any stream runs
    at once; only communication is under way while the program goes on. Waiting for a stream, or for an event recorded
    on it, waits on the host for what communication it was given.

    Memory is not recorded: the record of a real run has kernels, communication, waits and marks.

    Args:
        torch_device: where tensors live.
        links, board: how it reaches the other ranks.
        checked: see RealChannel.
    """

    def __init__(self, torch_device: torch.device, links: Links, board: Board, checked: bool) -> None:
        self.torch_device = torch_device
        self.events: list[Event] = []
        self.current = DEFAULT
        self.kernels: Kernels | None = None
        self._streams: dict[str, RealStream] = {}
        self._event_count = self._host_copies = 0
        self._under_way: dict[str, list[RealWork]] = {}
        self.channel: Channel = (channel := RealChannel(self, links, board, checked))
        self.close = channel.close
        self.stream(DEFAULT)

    def stream(self, name: str) -> RealStream:
        if name not in self._streams:
            self._streams[name] = RealStream(name, self)
        return self._streams[name]

    def event(self) -> RealEvent:
        return RealEvent(self)

    def kernel(
        self, name: str, flops: int | None, bytes: int | None, dtype: torch.dtype | None
    ) -> AbstractContextManager[None]:
        """Only names what runs inside it: on a real device the ops launch as they always do."""
        return nullcontext() if self.kernels is None else self.kernels.one_kernel(name, flops, bytes, dtype)

    def watch(self, module: nn.Module, name: str) -> None:
        """Nothing: the record of a real run has no module scopes."""

    def account(self, tensor: Any, category: str, scope: str) -> None:
        """Nothing: memory is not recorded."""

    def mark(self, name: str) -> None:
        self.events.append(Mark(name))

    @property
    def current_stream(self) -> str:
        return self.current

    def copy_to_host(self, x: Tensor, name: str) -> HostMemory:
        self._host_copies += 1
        memory = HostMemory(self._host_copies, x)
        self._host_copy("to_host", memory, x, name)
        return memory

    def device_memory(self, memory: HostMemory) -> Tensor:
        values = memory.values
        with torch._C._DisableTorchDispatch():
            return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=self.torch_device)

    def copy_from_host(self, memory: HostMemory, x: Tensor, name: str) -> None:
        self._host_copy("from_host", memory, x, name)

    def _host_copy(self, kind: str, memory: HostMemory, x: Tensor, name: str) -> None:
        to, source = (memory.values, x) if kind == "to_host" else (x, memory.values)
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # no kernel of the program
            to.copy_(source, non_blocking=True)
        self.events.append(HostCopy(kind, memory.number, x.nbytes, dtype_name(x), self.current, name))

    def synchronize(self) -> None:
        self.settle_all()
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        self.events.append(HostWait("", "synchronize"))

    def next_event(self) -> int:
        self._event_count += 1
        return self._event_count

    def occupy(self, stream: str, work: RealWork) -> None:
        """Notes communication under way on a stream."""
        self._under_way[stream] = [*self.under_way(stream), work]

    def release(self, stream: str, work: RealWork) -> None:
        """Forgets communication that is over: autograd takes a result for its own only if nobody else holds it."""
        if work in (works := self._under_way.get(stream, ())):
            self._under_way[stream] = [w for w in works if w is not work]

    def under_way(self, stream: str) -> list[RealWork]:
        """Communication that the stream was given and that is not over yet."""
        return [work for work in self._under_way.get(stream, ()) if not work.done()]

    def settle_all(self) -> None:
        """The host waits for all communication."""
        for name in list(self._under_way):
            self.settle(name)

    def settle(self, stream: str) -> None:
        """The host waits for a stream's communication."""
        for work in self._under_way.pop(stream, ()):
            work.settle()


class HostMemory:
    """A tensor's values in the host's memory: pinned, so that a GPU copies while its streams and the host go on.

    torch gives pinned memory out again only when copies that were under way with it are done.
    """

    def __init__(self, number: int, x: Tensor) -> None:
        self.number = number
        with torch._C._DisableTorchDispatch():
            self.values = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


class RealStream:
    """A named stream: a CUDA stream, or on CPUs a name under which communication is under way."""

    def __init__(self, name: str, device: RealDevice) -> None:
        self.name = name
        self.cuda: Any = None
        if device.torch_device.type == "cuda":
            where = device.torch_device
            self.cuda = torch.cuda.current_stream(where) if name == DEFAULT else torch.cuda.Stream(where)
        self._device = device
        self._outer: list[tuple[str, Any]] = []

    def __enter__(self) -> RealStream:
        inner = nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)
        inner.__enter__()
        self._outer.append((self._device.current, inner))
        self._device.current = self.name
        return self

    def __exit__(self, *exc: Any) -> None:
        self._device.current, inner = self._outer.pop()
        inner.__exit__(*exc)

    def record_event(self) -> RealEvent:
        return RealEvent(self._device).record(self)

    def wait_event(self, event: RealEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: RealStream) -> None:
        other.record_event().wait(self)

    def synchronize(self) -> None:
        if self.cuda is None:
            self._device.settle(self.name)
        else:
            self.cuda.synchronize()
        self._device.events.append(HostWait(self.name, "synchronize"))

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"


class RealEvent:
    """A point on a stream. Waiting for one that was never recorded waits for nothing, as in CUDA."""

    def __init__(self, device: RealDevice) -> None:
        self._device = device
        self._cuda: Any = None
        self._works: list[RealWork] = []
        self._stream = ""
        self.number = 0

    def record(self, stream: RealStream | None = None) -> RealEvent:
        stream = stream or self._device.stream(self._device.current)
        self.number, self._stream = self._device.next_event(), stream.name
        if stream.cuda is None:
            self._works = self._device.under_way(stream.name)
        else:
            self._cuda = stream.cuda.record_event()
        self._device.events.append(EventRecord(self.number, stream.name))
        return self

    def wait(self, stream: RealStream | None = None) -> None:
        if not self.number:
            return
        stream = stream or self._device.stream(self._device.current)
        for work in self._works:
            work.settle()
        if self._cuda is not None:
            stream.cuda.wait_event(self._cuda)
        self._device.events.append(EventWait(self.number, stream.name))

    def synchronize(self) -> None:
        if not self.number:
            return
        for work in self._works:
            work.settle()
        if self._cuda is not None:
            self._cuda.synchronize()
        self._device.events.append(HostWait(self._stream, f"event {self.number}"))
