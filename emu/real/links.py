"""Connections between the members of a group, made when a group first talks.

`torch.distributed.new_group` wants every rank of the world, or with local synchronisation names a group by its members
alone; here only members ask for a group, in any order, and two groups of the same ranks are two communicators. So the
backends are made directly, each in a part of the job's store named after the group, where its members find each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its stubs do not export all that it has


@dataclass
class Link:
    """A communicator.

    Attributes:
        data: the backend that moves tensors.
        control: a gloo backend for records on the host (the same one, where data moves by gloo).
        rank: this rank's number in it.
        size: how many ranks it joins.
    """

    data: Any
    control: Any
    rank: int
    size: int
    nccl: bool = False


@dataclass
class Links:
    """The communicators of one rank, by name. Making one waits for its other members.

    Args:
        store: the store of this launch, which every rank shares.
        rank: this rank's global number.
        timeout_s: how long a communication may take.
        nccl: whether data moves by NCCL.
        control: whether NCCL links carry a gloo backend as well, for records that ranks compare.
    """

    store: Any
    rank: int
    timeout_s: float
    nccl: bool = False
    control: bool = True
    _made: dict[str, Link] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def of(self, name: str, members: Sequence[int]) -> Link:
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:  # a store's client serves one caller at a time, so each link has its own
            if name not in self._made:
                self._made[name] = self._make(name, members)
            return self._made[name]

    def _make(self, name: str, members: Sequence[int]) -> Link:
        rank, size = list(members).index(self.rank), len(members)
        timeout = timedelta(seconds=self.timeout_s)
        store = self.store.clone()
        store.set_timeout(timeout)
        control = None
        if not self.nccl or self.control:
            control = dist.ProcessGroupGloo(dist.PrefixStore(f"gloo/{name}", store), rank, size, timeout=timeout)
        if not self.nccl:
            return Link(control, control, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        data = dist.ProcessGroupNCCL(dist.PrefixStore(f"nccl/{name}", store), rank, size, options)
        return Link(data, control, rank, size, nccl=True)

    def close(self) -> None:
        """Gives up every connection."""
        self._made.clear()
