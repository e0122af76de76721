"""What a program sees of its rank: where it is, whom it can talk to, and the device it runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from emu.spmd.calls import Channel
from emu.spmd.errors import MeshError
from emu.spmd.group import Group
from emu.spmd.host import HostCopy, fetch, to_host
from emu.spmd.mesh import Mesh


class Event(Protocol):
    """A point on a stream that other streams and the host can wait for, as a CUDA event."""

    def record(self, stream: Stream | None = None) -> Event:
        """Stands from now on for all that the stream (default: the current one) has been given so far."""
        ...

    def wait(self, stream: Stream | None = None) -> None:
        """Makes the stream (default: the current one) wait for it. The host goes on."""
        ...

    def synchronize(self) -> None:
        """Makes the host wait for it."""
        ...


class Stream(Protocol):
    """A queue of kernels. Streams are ordered only by events and waits. `with stream:` makes it the current one."""

    name: str

    def __enter__(self) -> Stream: ...

    def __exit__(self, *exc: object) -> None: ...

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, other: Stream) -> None:
        """Makes this stream wait for all that the other has been given so far."""
        ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """What a rank needs of the device beneath it, virtual or real."""

    torch_device: torch.device

    @property
    def channel(self) -> Channel: ...

    def stream(self, name: str) -> Stream: ...

    def event(self) -> Event: ...

    def kernel(
        self, name: str, flops: int | None, bytes: int | None, dtype: torch.dtype | None
    ) -> AbstractContextManager[None]: ...

    def watch(self, module: nn.Module, name: str) -> None: ...

    def account(self, tensor: Tensor, category: str, scope: str) -> None: ...

    def mark(self, name: str) -> None: ...

    def synchronize(self) -> None: ...

    @property
    def current_stream(self) -> str:
        """The name of the stream that is given what is launched now."""
        ...

    def copy_to_host(self, x: Tensor, name: str) -> Any:
        """Gives the current stream a copy of a tensor into new host memory, which lives as long as what is returned."""
        ...

    def device_memory(self, memory: Any) -> Tensor:
        """A new tensor on the device, like the one that was copied into this host memory."""
        ...

    def copy_from_host(self, memory: Any, x: Tensor, name: str) -> None:
        """Gives the current stream a copy of host memory into a tensor."""
        ...


class Rank(int):
    """One rank of a run. It is its number, too: `if rank == 0`, `pieces[rank]`.

    Attributes:
        id: its global number.
        mesh: the mesh it belongs to.
        coords: its index along every axis.
        device: the torch device its tensors live on (virtual ranks compute on the CPU; a shape run on "meta").
    """

    def __new__(cls, id: int, mesh: Mesh, device: Device) -> Rank:
        return super().__new__(cls, id)

    def __init__(self, id: int, mesh: Mesh, device: Device) -> None:
        self.id = id
        self.mesh = mesh
        self.coords: Mapping[str, int] = mesh.coords(id)
        self.device = device.torch_device
        self._device = device
        self._groups: dict[Any, Group] = {}

    def __copy__(self) -> Rank:
        return self

    def __deepcopy__(self, memo: Any) -> Rank:
        return self  # a copied module stays on its rank

    @property
    def world_size(self) -> int:
        return self.mesh.size

    def group(self, *axes: str, members: Sequence[int] | None = None, label: str | None = None) -> Group:
        """The group this rank forms along the given axes, or of listed global ranks; without either, all ranks.

        Args:
            axes: mesh axes; several span a plane, in mesh order.
            members: global ranks, in group order; this rank must be among them.
            label: what to call listed members in traces and messages; their ranks where not given. Groups that do
                their part in the same communication pattern share one, as the groups along an axis do.

        Raises:
            MeshError: an unknown axis; members that are not distinct ranks of the mesh, or leave this rank out.
        """
        if not all(isinstance(axis, str) for axis in axes) or not isinstance(members, (Sequence, type(None))):
            raise MeshError(
                f"group({', '.join(map(repr, axes))}) with members={members!r} names no group",
                'name axes one by one, group("dp", "cp"), or list global ranks, group(members=[0, 3])',
            )
        if label is not None and (members is None or not isinstance(label, str)):
            raise MeshError(f"label={label!r} names no listed members", "give a text, beside members=[...]")
        key: Any = axes if members is None else tuple(members)
        kind = (members is None, key, label)
        if kind not in self._groups:
            if members is None:
                ranks = self.mesh.members(self.id, *axes) if axes else tuple(range(self.mesh.size))
                label = "+".join(axes) or "world"
            else:
                ranks = self._listed(axes, key)
                label = label or str(list(ranks)).replace(" ", "")
            self._groups[kind] = Group(label, ranks, ranks.index(self.id), self._device.channel)
        return self._groups[kind]

    def _listed(self, axes: tuple[str, ...], members: tuple[int, ...]) -> tuple[int, ...]:
        if axes:
            raise MeshError("a group is given by axes or by members, not by both", "leave one of them out")
        wrong = [m for m in members if isinstance(m, bool) or not isinstance(m, int) or not 0 <= m < self.mesh.size]
        if wrong or len(set(members)) != len(members):
            raise MeshError(
                f"members {list(members)} are not distinct ranks of a mesh of {self.mesh.size}",
                f"list global ranks, 0 to {self.mesh.size - 1}, each once",
            )
        if self.id not in members:
            raise MeshError(
                f"rank {self.id} asks for the group {list(members)}, of which it is no member",
                "let only its members ask for a group",
            )
        return tuple(map(int, members))  # a program may list itself by its Rank

    def stream(self, name: str) -> Stream:
        """The stream of that name, made on first use; `with rank.stream("comm"):` launches on it."""
        return self._device.stream(name)

    def event(self) -> Event:
        """A new event, which orders streams as CUDA's do."""
        return self._device.event()

    def kernel(
        self, name: str, flops: int | None = None, bytes: int | None = None, dtype: torch.dtype | None = None
    ) -> AbstractContextManager[None]:
        """Makes the ops inside one kernel: one launch, and no device memory for its inner temporaries.

        Args:
            name: what to call it.
            flops, bytes: work and memory traffic; None adds up the ops' flops, and counts what goes in and comes out.
            dtype: in which its products are computed, which decides how fast; None: that of its last result.
        """
        return self._device.kernel(name, flops, bytes, dtype)

    @overload
    def to_host(self, x: Tensor, name: str = "") -> HostCopy: ...

    @overload
    def to_host(self, x: Sequence[Tensor], name: str = "") -> list[HostCopy]: ...

    def to_host(self, x: Any, name: str = "") -> Any:
        """Starts to copy a tensor, or several, to the host's memory, on the stream "d2h"; see emu.spmd.host.

        The copy comes after all that the current stream was given so far. The tensor keeps its memory on the device until
        `HostCopy.wait`; whoever writes into it before that must wait, too.

        Args:
            x: a tensor, or a list of tensors that are waited for together.
            name: what to call the copies in traces.

        Raises:
            EmuError: a tensor that requires grad, is not dense, or is none.
        """
        return to_host(self._device, x, name)

    def fetch(self, copies: Sequence[HostCopy]) -> None:
        """Starts to bring several copies back from the host's memory together; see `HostCopy.fetch`."""
        fetch(self._device, copies)

    def watch(self, module: nn.Module, name: str = "") -> None:
        """Gives the module's tensors and submodules their names in every view and message."""
        self._device.watch(module, name)

    def account(self, tensor: Tensor, category: str, scope: str = "") -> None:
        """Says what a tensor's memory is for, where that does not show by itself: a bucket of gradients, a master copy.

        Args:
            category: "parameters", "gradients", "optimizer", "activations", "communication" or "temporary".
            scope: the part of the model that it belongs to.
        """
        self._device.account(tensor, category, scope)

    def mark(self, name: str) -> None:
        """Names this point of the program, e.g. "step 3", in the trace and its pictures."""
        self._device.mark(name)

    def synchronize(self) -> None:
        """Makes the host wait for every stream."""
        self._device.synchronize()

    def __repr__(self) -> str:
        at = " ".join(f"{axis}={i}" for axis, i in self.coords.items())
        return f"Rank({self.id} of {self.mesh.size}{': ' + at if at else ''})"

    def __str__(self) -> str:
        return str(self.id)


class Grads(dict[str, Tensor]):
    """Named tensors, with the layout of those that are not replicated."""

    def __init__(self, values: Mapping[str, Tensor], layouts: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.layouts = dict(layouts)


def grads(model: nn.Module, layouts: Mapping[str, Any] | None = None) -> Grads:
    """The gradients of a model by parameter name, each with its Layout (replicated where none is known).

    A parameter without a gradient is left out; a shared one appears once.

    Args:
        layouts: parameter name -> Layout.
    """
    values = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Grads(values, layouts or {})
