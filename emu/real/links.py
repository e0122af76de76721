"""Connections between the members of a group, made when a group first talks.

`torch.distributed.new_group` wants every rank of the world, or with local synchronisation names a group by its members
alone; here only members ask for a group, in any order, and two groups of the same ranks are two communicators. So the
backends are made directly, each in a part of the job's store named after the group, where its members find each other.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its stubs do not export all that it has
LONGEST_PAUSE_S = 0.02
STEP_S = 0.25


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
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def on_host(self) -> Link:
        """The same ranks, joined by the control backend."""
        return Link(self.control, self.control, self.rank, self.size, ended=self.ended)

    def finish(self, work: Any) -> None:
        """Waits for what a backend has begun: on the host over gloo, until the run is given up; on the stream over NCCL."""
        if self.nccl:
            work.wait()
            return
        while not work.is_completed() and not self.ended.is_set():
            try:
                work.wait(timeout=timedelta(seconds=STEP_S))
            except RuntimeError:  # a step is over, or something is wrong, which the last wait tells
                continue
        if self.ended.is_set():
            raise RuntimeError("the run has ended")
        work.wait()


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
    _ended: threading.Event = field(default_factory=threading.Event)
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
        self._meet(store, name, members)
        control = None
        if not self.nccl or self.control:
            control = dist.ProcessGroupGloo(dist.PrefixStore(f"gloo/{name}", store), rank, size, timeout=timeout)
        if not self.nccl:
            return Link(control, control, rank, size, ended=self._ended)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        data = dist.ProcessGroupNCCL(dist.PrefixStore(f"nccl/{name}", store), rank, size, options)
        return Link(data, control, rank, size, nccl=True, ended=self._ended)

    def _meet(self, store: Any, name: str, members: Sequence[int]) -> None:
        """Waits until every member wants this link, looking again and again, so that giving up is possible."""
        store.set(f"here/{name}/{self.rank}", "")
        self._look_for(store, [f"here/{name}/{member}" for member in members])

    def _look_for(self, store: Any, keys: list[str]) -> None:
        pause_s = 0.0005
        while not self._ended.is_set():  # store.wait would print a warning at the end of every step
            if store.check(keys):
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise RuntimeError("the run has ended")

    def tell(self, key: str, words: Sequence[int]) -> None:
        """Writes down some numbers, for the one who will look for them under this key."""
        with self._guard:
            self.store.set(f"words/{key}", json.dumps(list(words)))

    def told(self, key: str) -> list[int]:
        """Waits for what is written down under a key."""
        store = self.store.clone()
        self._look_for(store, [f"words/{key}"])
        return json.loads(store.get(f"words/{key}"))

    def close(self) -> None:
        """Gives up every connection; what still waits on one ends with an error."""
        self._ended.set()
        self._made.clear()
