"""Whose a tensor is, and what it is kept for: the part of a rank's accounting that torch's hooks call, too."""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from emu.spmd.errors import CrossRankAccess, EmuError, FreedMemory
from emu.trace.events import CATEGORIES
from emu.virtual.device import VirtualDevice
from emu.virtual.freed import frees
from emu.virtual.hbm import Block
from emu.virtual.lines import user_line
from emu.virtual.names import Names
from emu.virtual.streams import Use, check_use


class Tensors:
    """What one device knows of its tensors.

    Attributes:
        names: which module an op belongs to.
        category: overrides the category of what is allocated, while it is not None.
        stepping: whether an optimizer's step is under way.
    """

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device
        self.ledger = device.ledger
        self.names = Names()
        self.category: str | None = None
        self.stepping = False

    def no_host_memory(self, error: RuntimeError) -> None:
        """torch found no memory for a tensor: too large for the device, or for the machine that stands in for it."""
        size = int((re.search(r"allocate (\d+) bytes", str(error)) or [0, 0])[1])
        self.ledger.make_room(size, self.names.scope)
        raise EmuError(
            f"rank {self.device.rank}: a tensor of {size:,} bytes fits the virtual device, but not this machine's memory",
            "run the program on shapes alone: backend='shape'; or make it smaller",
        ) from error

    def host_reads(self, t: Tensor, what: str) -> None:
        """The host looks at a tensor's values by a way that is no operator."""
        if t.is_meta or t.layout is not torch.strided:
            return
        block = getattr(t.untyped_storage(), "_emu", None)
        if block is None or block.ledger is not self.ledger:
            self.foreign(t, False, what)
            return
        if self.device.many_streams:
            check_use(self.device, block, self.device.stream_now, t, False, what, user_line())
        self.device.host_wait(self.device.stream_now, what)

    def gone(self, t: Tensor, block: Any, what: str) -> None:
        """An op is about to read or write a tensor whose storage is empty: it would take the process down."""
        if type(block) is Block and t.numel() and not t.untyped_storage().nbytes():
            raise FreedMemory(
                f"rank {self.device.rank}: {what} uses a tensor of shape {tuple(t.shape)} whose memory was freed: it is of "
                f"{block.category}{' of ' + block.scope if block.scope else ''} ({user_line()})",
                "sharded parameters are whole only while their unit computes: read them inside its forward, or within "
                "`with dist.gathered():`; do not keep views of them",
            )

    # Whose tensor is it?

    def foreign(self, t: Tensor, writes: bool, what: str) -> Block | None:
        """A tensor that this device did not make: host data to read, or an error."""
        storage = t.untyped_storage()
        block = getattr(storage, "_emu", None)
        rank = self.device.rank
        if block is not None and block.ledger is self.ledger:
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
            raise _trainable(t, rank, what)
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
        if block is None or block.ledger is not self.ledger or block.watched:
            return
        block.watched = True
        self.ledger.recategorise(block, "parameters", scope)
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
            if type(block) is Block and block.ledger is self.ledger:
                self.ledger.recategorise(block, "parameters", ".".join(filter(None, (name, path))))

    def gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.account(parameter.grad, "gradients")

    def account(self, t: Tensor, category: str, like: Tensor | None = None) -> None:
        """Moves a tensor's storage to a category, and to the place of another tensor's, if this device has it."""
        block = getattr(t.untyped_storage(), "_emu", None)
        if (
            type(block) is Block
            and block.ledger is self.ledger
            and not block.watched
            and block.category != "parameters"
        ):
            model = getattr(like.untyped_storage(), "_emu", None) if isinstance(like, Tensor) else None
            self.ledger.recategorise(block, category, model.scope if type(model) is Block else None)

    def declare(self, t: Tensor, category: str, scope: str) -> None:
        """The program says what a tensor is for; nothing that is found out later changes that.

        Raises:
            EmuError: there is no such category.
        """
        if category not in CATEGORIES:
            raise EmuError(f"there is no category {category!r} of memory", f"use one of {', '.join(CATEGORIES)}")
        block = getattr(t.untyped_storage(), "_emu", None)
        if type(block) is Block and block.ledger is self.ledger:
            block.watched = True
            self.ledger.recategorise(block, category, scope)

    def resizes(self, storage: Any, size: int) -> None:
        """Before a storage changes its size: raises if the new one does not fit beside the old one, or that is still used."""
        block = getattr(storage, "_emu", None)
        if block is None:
            self.ledger.make_room(size, self.names.scope)
        elif type(block) is Block and block.ledger is self.ledger and size != block.bytes:
            if size:
                self.ledger.make_room(size, self.names.scope)
            if block.bytes and self.device.many_streams:
                if size:  # what it holds is copied before it is freed
                    stream = self.device.stream_now
                    stream.tick += 1
                    check_use(self.device, block, stream, (0, min(size, block.bytes)), False, "resize_", user_line())
                frees(self.device, block, f"resize_({size})")

    def resized(self, storage: Any) -> None:
        block = getattr(storage, "_emu", None)
        stream = self.device.stream_now
        size = storage.nbytes()
        if block is None:
            block = self.ledger.alloc(storage, self.category or "temporary", self.names.scope, stream.name)
        elif type(block) is Block and block.ledger is self.ledger and block.bytes != size:
            self.ledger.resized(block, size, stream.name)
        else:
            return
        if self.device.many_streams and block is not None:  # new memory, of this stream
            block.uses = uses = self.device.uses_of(block, stream.name)
            uses.append(Use(stream.name, stream.tick, 0, size, True, "resize_", None))

    def before_resize(self, args: Any) -> None:
        t, count = args[0], 1
        for n in args[1]:
            count *= n
        needed = (t.storage_offset() + count) * t.element_size()
        if needed > t.untyped_storage().nbytes():  # resize_ never shrinks a storage
            self.resizes(t.untyped_storage(), needed)


def _trainable(x: Tensor, rank: int, what: str) -> CrossRankAccess:
    return CrossRankAccess(
        f"rank {rank}: {what} uses a trainable tensor of shape {tuple(x.shape)} that was made outside of the program: "
        f"all ranks would share it, as no cluster can",
        "make the model inside the program, so that every rank has its own (a seed makes them alike)",
        rank=rank,
    )


def _gradient(owner: Tensors | None, parameter: Tensor) -> None:
    if owner is not None:
        owner.gradient(parameter)
