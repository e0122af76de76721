"""Tensors that wait in the host's memory: copied there and back over the host link, beside what the device computes.

    copy = rank.to_host(x)     # the copy is under way, on the stream "d2h", after all that the current stream was given
    ...                        # the device computes on
    copy.wait()                # the current stream waits for the copy; x is let go of, and its memory free if nobody has it
    ...
    copy.fetch()               # takes memory on the device; the copy back is under way, on the stream "h2d"
    ...
    x = copy.back()            # the current stream waits for it, and may read x

Memory of the device is taken and given back on the current stream, as everything is that this stream computes: "h2d"
waits for it before it writes (that memory may have served for something else), and it waits for "d2h" before the memory
goes. So peak memory does not depend on how fast the link is, and a link that is too slow delays the streams that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from emu.spmd.errors import EmuError

if TYPE_CHECKING:
    from emu.spmd.rank import Device, Event, Stream

TO_HOST, FROM_HOST = "d2h", "h2d"


class _Batch:
    """Copies that were issued together in one direction, and are waited for together."""

    def __init__(self, device: Device, name: str) -> None:
        """Makes the stream of that name wait for all that the current stream was given."""
        self.stream: Stream = device.stream(name)
        device.event().record().wait(self.stream)
        self._event: Event | None = None
        self._waited: list[str] = []

    def issued(self) -> None:
        self._event = self.stream.record_event()

    def wait(self, device: Device, stream: Stream | None = None) -> None:
        """A stream (default: the current one) waits for them, unless it did so before."""
        name = device.current_stream if stream is None else stream.name
        if self._event is not None and name not in self._waited:
            self._waited.append(name)
            self._event.wait(stream)


class HostCopy:
    """A tensor on its way to host memory, there, or on its way back. Made by `rank.to_host`.

    A copy that is dropped gives its host memory back, but must not be before `wait`: what it reads may still be in use.

    Attributes:
        bytes: of the tensor, in either memory.
    """

    def __init__(self, device: Device, x: Tensor, sent: _Batch, name: str) -> None:
        self._device, self._sent, self._name = device, sent, name
        self.bytes = x.nbytes
        self._tensor: Tensor | None = x  # while it is on the device: before it was let go of, and from `fetch` on
        self._coming: _Batch | None = None
        self._memory: Any = device.copy_to_host(x, name)

    @property
    def here(self) -> bool:
        """Whether the tensor has memory on the device: it did not leave, or is coming back."""
        return self._tensor is not None

    @property
    def here_all_along(self) -> bool:
        """Whether it never left: what `back` returns is what was copied."""
        return self._tensor is not None and self._coming is None

    def wait(self) -> None:
        """The current stream waits until the copy is in host memory, and the tensor on the device is let go of."""
        if self._coming is None and self._tensor is not None:
            self._sent.wait(self._device)
            self._tensor = None

    def fetch(self) -> None:
        """Starts to bring the tensor back, unless it never left or is coming; see `rank.fetch` for many at once."""
        fetch(self._device, [self])

    def back(self) -> Tensor:
        """The tensor, on the device. The current stream waits for it; the host's copy is given back. Once only.

        It is the very tensor that was copied if `wait` was never called. Else it is a new one of the same shape, strides
        (if the old one had no gaps), dtype and values.

        Raises:
            EmuError: it came back before.
        """
        if self._memory is None:
            raise EmuError(
                "this copy came back before, and its host memory was given back",
                "keep the tensor that back() returned, or copy it to the host again",
            )
        self.fetch()
        (self._sent if self._coming is None else self._coming).wait(self._device)
        x, self._tensor, self._memory = self._tensor, None, None
        assert x is not None
        return x

    def __repr__(self) -> str:
        where = "came back" if self._memory is None else "on the device, too" if self.here else "in host memory"
        return f"HostCopy({self.bytes:,} bytes{': ' + self._name if self._name else ''}, {where})"


@overload
def to_host(device: Device, x: Tensor, name: str) -> HostCopy: ...


@overload
def to_host(device: Device, x: Sequence[Tensor], name: str) -> list[HostCopy]: ...


def to_host(device: Device, x: Tensor | Sequence[Tensor], name: str) -> HostCopy | list[HostCopy]:
    """See `Rank.to_host`."""
    given = [x] if isinstance(x, Tensor) else list(x)
    for t in given:
        if not isinstance(t, Tensor) or t.layout is not torch.strided:
            raise EmuError(f"to_host copies dense tensors, not {_kind(t)}", "pass a dense tensor, or a list of such")
        if t.requires_grad:
            raise EmuError(
                f"to_host copies the bytes of a tensor of shape {tuple(t.shape)} that requires grad: "
                "no gradient would find its way back",
                "pass x.detach(); to keep what autograd saved in host memory, use emu.parallel.checkpointing.offloaded",
            )
    batch = _Batch(device, TO_HOST)
    with batch.stream:
        copies = [HostCopy(device, t, batch, name) for t in given]
    batch.issued()
    return copies[0] if isinstance(x, Tensor) else copies


def fetch(device: Device, copies: Sequence[HostCopy]) -> None:
    """See `Rank.fetch`."""
    gone = [copy for copy in copies if copy._tensor is None and copy._memory is not None]
    if not gone:
        return
    for copy in gone:
        copy._tensor = device.device_memory(copy._memory)
    batch = _Batch(device, FROM_HOST)
    for sent in dict.fromkeys(copy._sent for copy in gone):
        sent.wait(device, batch.stream)
    with batch.stream:
        for copy in gone:
            copy._coming = batch
            assert copy._tensor is not None
            device.copy_from_host(copy._memory, copy._tensor, copy._name)
    batch.issued()


def _kind(x: Any) -> str:
    return f"a {x.layout} tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
