"""Groups of ranks and their collectives.

These are the raw collectives: they have no autograd, so they refuse tensors that require grad and name the
differentiable twin in `emu.spmd` that does what is meant. Everything that one rank can check alone is checked
once, in arguments.py, for virtual and real devices alike; what ranks must agree on is checked where they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from emu.spmd.arguments import at, fits, peer_of, readable, reduction, sizes_of, whole, writable
from emu.spmd.calls import ALGORITHMS, Call, Channel, Finished, Message, OneMessage, Together
from emu.spmd.errors import CollectiveError


class _Key(tuple[str, tuple[int, ...]]):
    """Label and members of a group, one object for all its ranks: compared by identity, hashed without looking at members."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


_KEYS: dict[tuple[str, tuple[int, ...]], _Key] = {}


def _key(label: str, members: tuple[int, ...]) -> _Key:
    return _KEYS.setdefault((label, members), _Key((label, members)))


class Group:
    """Some ranks that talk to each other.

    Attributes:
        label: the axes it spans, e.g. "dp" or "dp+cp"; for listed members, their ranks.
        members: global ranks in group order.
        rank: this rank's index among them.
        size: how many they are.
    """

    def __init__(self, label: str, members: Sequence[int], rank: int, channel: Channel) -> None:
        self.label = label
        self.key = _key(label, tuple(members))
        self.members = self.key[1]
        self.rank = rank
        self.size = len(self.members)
        self._channel = channel

    def __repr__(self) -> str:
        return f"Group({self.label}, members={list(self.members)}, rank={self.rank})"

    def __deepcopy__(self, memo: Any) -> Group:
        return self  # a copied module talks to the same ranks

    # In place: the result is the tensor that was given.

    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Combines x over the group, in place, on every rank. Returns x, or Work whose wait() returns it."""
        writable(self, "all_reduce", x)
        reduction(self, "all_reduce", x, op)
        return self._run(Call("all_reduce", x, x, op=op), async_op, algorithm, name)

    def reduce(
        self,
        x: Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Combines x over the group into the root's x, in place. Off the root x keeps its value. Returns x."""
        writable(self, "reduce", x)
        reduction(self, "reduce", x, op)
        return self._run(Call("reduce", x, x, op=op, root=peer_of(self, "root", root)), async_op, algorithm, name)

    def broadcast(
        self, x: Tensor, root: int = 0, *, async_op: bool = False, algorithm: str | None = None, name: str | None = None
    ) -> Any:
        """Copies the root's x into everyone's x. Returns x."""
        writable(self, "broadcast", x)
        return self._run(Call("broadcast", x, x, root=peer_of(self, "root", root)), async_op, algorithm, name)

    # Out of place: the result is a new tensor.

    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Everyone's x, concatenated along dim in group order.

        Args:
            sizes: length of every rank's x along dim, where they are not all equal.
            out: a buffer to gather into; x may be this rank's own part of it.
        """
        dim = readable(self, "all_gather", x, dim)
        cut = sizes_of(self, "all_gather", sizes, x, dim, own=True)
        shape = self._joined(x, dim, cut)
        if out is None:
            out = self._channel.empty(x, shape)
        else:
            fits(self, "all_gather", out, x, shape)
        return self._run(Call("all_gather", x, out, dim, cut), async_op, algorithm, name)

    def gather(
        self,
        x: Tensor,
        root: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Everyone's x, concatenated along dim in group order, on the root; None elsewhere."""
        dim = readable(self, "gather", x, dim)
        cut = sizes_of(self, "gather", sizes, x, dim, own=True)
        root = peer_of(self, "root", root)
        out = self._channel.empty(x, self._joined(x, dim, cut)) if root == self.rank else None
        return self._run(Call("gather", x, out, dim, cut, root=root), async_op, algorithm, name)

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """This rank's piece, along dim, of the combination of everyone's x.

        Args:
            sizes: lengths of the pieces along dim, in group order, where they are not all equal.
        """
        dim = readable(self, "reduce_scatter", x, dim)
        reduction(self, "reduce_scatter", x, op)
        cut = sizes_of(self, "reduce_scatter", sizes, x, dim)
        out = self._channel.empty(x, self._piece(x, dim, cut))
        return self._run(Call("reduce_scatter", x, out, dim, cut, op=op), async_op, algorithm, name)

    def scatter(
        self,
        x: Tensor,
        root: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """This rank's piece, along dim, of the root's x. Elsewhere x states shape and dtype; its values are not read."""
        dim = readable(self, "scatter", x, dim)
        cut = sizes_of(self, "scatter", sizes, x, dim)
        root = peer_of(self, "root", root)
        out = self._channel.empty(x, self._piece(x, dim, cut))
        return self._run(Call("scatter", x, out, dim, cut, root=root), async_op, algorithm, name)

    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        dim: int = 0,
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Sends the i-th piece of x along dim to rank i. Returns what the others sent, in group order.

        Args:
            send_sizes, recv_sizes: lengths along dim to and from every rank, in group order; both or neither.
        """
        dim = readable(self, "all_to_all", x, dim)
        if (send_sizes is None) != (recv_sizes is None):
            given, missing = ("send_sizes", "recv_sizes") if recv_sizes is None else ("recv_sizes", "send_sizes")
            raise CollectiveError(
                f"{at(self, 'all_to_all')}: {given} without {missing}",
                "state both: what a rank receives is what the others send it (exchange the sizes first)",
            )
        send = sizes_of(self, "all_to_all", send_sizes, x, dim)
        recv = sizes_of(self, "all_to_all", recv_sizes, None, dim) if recv_sizes is not None else None
        length = sum(recv) if recv is not None else x.shape[dim]
        out = self._channel.empty(x, (*x.shape[:dim], length, *x.shape[dim + 1 :]))
        return self._run(Call("all_to_all", x, out, dim, send, recv), async_op, algorithm, name)

    def ring_shift(
        self,
        tensors: Tensor | Sequence[Tensor],
        by: int = 1,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Sends tensors to the rank `by` places on, around the ring. Returns those of the rank `by` places back.

        Args:
            tensors: one tensor or several; the result has the same form.
            sizes: length of every rank's tensors along dim, in group order, where they are not all equal.
        """
        many = not isinstance(tensors, Tensor)
        places = whole(by)
        if places is None or not isinstance(tensors, (Tensor, list, tuple)):
            raise CollectiveError(
                f"{at(self, 'ring_shift')}: cannot shift a {type(tensors).__name__} by {by!r}",
                "shift a tensor, or a list of tensors, by a whole number of places",
            )
        done = []
        for x in tensors if many else (tensors,):
            along = readable(self, "ring_shift", x, dim)
            if sizes is not None and not x.dim():
                raise CollectiveError(f"{at(self, 'ring_shift')}: a number has no sizes", "leave sizes out")
            cut = sizes_of(self, "ring_shift", sizes, x, along, own=True)
            shape = list(x.shape)
            if cut is not None:
                shape[along] = cut[(self.rank - places) % self.size]
            out = self._channel.empty(x, tuple(shape))
            done.append(
                self._run(Call("ring_shift", x, out, along, cut, by=places % self.size), async_op, algorithm, name)
            )
        if many and async_op:
            return Together(done)
        return done if many else done[0]

    def barrier(self, *, async_op: bool = False, name: str | None = None) -> Any:
        """Waits until every member has come here."""
        return self._run(Call("barrier", None, None), async_op, None, name)

    # Point to point: a rendezvous of two; a synchronous send waits for its receiver.

    def send(self, x: Tensor, dst: int, *, async_op: bool = False, name: str | None = None) -> Any:
        """Sends x to group rank dst, and waits until it is received. Returns x."""
        return self.exchange([("send", x, dst)], async_op=async_op, name=name, _single=True)

    def recv(self, out: Tensor, src: int, *, async_op: bool = False, name: str | None = None) -> Any:
        """Receives into out from group rank src. Returns out."""
        return self.exchange([("recv", out, src)], async_op=async_op, name=name, _single=True)

    def exchange(
        self,
        messages: Sequence[tuple[str, Tensor, int]],
        *,
        async_op: bool = False,
        name: str | None = None,
        _single: bool = False,
    ) -> Any:
        """Posts several messages at once, so that none waits for another.

        Args:
            messages: ("send", tensor, to) and ("recv", out, from), with group ranks. Returns their tensors in order.
        """
        posted = []
        for message in messages if isinstance(messages, (list, tuple)) else [messages]:
            try:
                kind, tensor, peer = message
            except (TypeError, ValueError):
                kind = tensor = peer = None
            if kind not in ("send", "recv") or not isinstance(tensor, Tensor):
                raise CollectiveError(
                    f"{at(self, 'exchange')}: {message!r:.80} is not a message",
                    'write each as ("send", tensor, to) or ("recv", out, from)',
                )
            readable(self, kind, tensor, None) if kind == "send" else writable(self, kind, tensor)
            peer = peer_of(self, "dst" if kind == "send" else "src", peer)
            if peer == self.rank:
                raise CollectiveError(f"{at(self, kind)}: rank {peer} cannot talk to itself", "name another group rank")
            posted.append(Message(kind, tensor, peer, name or ""))
        result = [m.tensor for m in posted]
        if async_op:
            work = self._channel.messages(self, posted)
        else:
            with self._channel.synchronous():
                work = Finished(self._channel.messages(self, posted).wait())
        if _single:
            return OneMessage(work, result[0]) if async_op else result[0]
        return work if async_op else result

    def _run(self, call: Call, async_op: bool, algorithm: str | None, name: str | None) -> Any:
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise CollectiveError(
                f"{at(self, call.kind)}: there is no algorithm {algorithm!r}",
                f"use one of {', '.join(ALGORITHMS)}, or None",
            )
        call.algorithm, call.name = algorithm or "", name or ""
        if async_op:
            return self._channel.collective(self, call)
        with self._channel.synchronous():
            return self._channel.collective(self, call).wait()

    def _joined(self, x: Tensor, dim: int, cut: tuple[int, ...] | None) -> tuple[int, ...]:
        return (*x.shape[:dim], sum(cut) if cut is not None else x.shape[dim] * self.size, *x.shape[dim + 1 :])

    def _piece(self, x: Tensor, dim: int, cut: tuple[int, ...] | None) -> tuple[int, ...]:
        return (*x.shape[:dim], cut[self.rank] if cut is not None else x.shape[dim] // self.size, *x.shape[dim + 1 :])
