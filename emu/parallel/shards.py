"""One flat vector of parameters on one rank: what of it lives here, and its moves between whole and shard.

By stage of ZeRO (arXiv 1910.02054), a rank of N keeps, of P parameters:

    stage   parameters   gradients   optimizer states   elements moved in a step
    0       P            P           P                  all-reduce of gradients: 2P (N-1)/N
    1       P            P           P/N                reduce-scatter of gradients, all-gather of parameters: the same
    2       P            P/N         P/N                the same
    3       P/N          P/N         P/N                and another all-gather, for backward: 3P (N-1)/N
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emu.parallel.absent import Absent, name_absent
from emu.parallel.flat import Flat, Span
from emu.parallel.state.piece import Piece
from emu.spmd import EmuError, Group, Precision, Rank


class Place(NamedTuple):
    """Where a vector's shards lie.

    Fields:
        rank: this one.
        group: the ranks that share the vector; one shard each from stage 1 on.
        replicas: the ranks that hold the same shard in other such groups; None where there are none.
        stage: of ZeRO, 0 to 3.
    """

    rank: Rank
    group: Group
    replicas: Group | None
    stage: int


class Dtypes:
    """The dtype of every role of some parameters; without a Precision all are the parameters' own."""

    def __init__(self, roles: Precision | None, own: torch.dtype) -> None:
        given: Any = roles if roles is not None and own.is_floating_point else None
        self.param: torch.dtype = given.param if given else own
        self.grad: torch.dtype = given.grad if given else own
        self.reduce: torch.dtype = given.reduce if given else own
        self.master: torch.dtype = given.master if given else own


class Shards:
    """One flat vector on one rank.

    Args:
        flat: its layout over the ranks of the place's group.
        parameters: in the layout's order, of one dtype; all trainable, or all frozen.
        name: what its collectives are called.
        counted: runs (start, stop) of the vector that this rank counts where every element of the model is to be counted
            once, as in a norm; None: all.
    """

    def __init__(
        self,
        flat: Flat,
        parameters: Sequence[nn.Parameter],
        place: Place,
        roles: Precision | None,
        name: str,
        counted: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.flat, self.parameters, self.place, self.name = flat, list(parameters), place, name
        self.counted = counted
        self.dtypes = Dtypes(roles, self.parameters[0].dtype)
        self.trainable = self.parameters[0].requires_grad
        part = place.group.rank if place.stage else 0
        self.first = flat.first(part) if place.stage else 0
        self.real = flat.cuts[part] if place.stage else flat.numel  # elements of this rank's part
        self.slots = flat.slots(part) if place.stage else flat.numel  # with padding
        self.sizes = None if len(set(flat.cuts)) == 1 else flat.cuts
        self.spans = flat.spans(part)
        self.here = True  # whether whole parameters are
        self._whole: Tensor | None = None  # [numel]; at stage 3 its storage comes and goes
        self._shard: Tensor | None = None  # stage 3: what stays, [slots]
        self._coming: Any = None  # the gather under way
        self._stepped: list[tuple[Span, nn.Parameter]] | None = None
        self._master = self._copied() if self.trainable and self.dtypes.master != self.dtypes.param else None
        self._take_over()
        self._note()

    def _copied(self) -> Tensor:
        """A copy of this rank's part in the optimizer's dtype, [slots]."""
        master = torch.zeros(self.slots, dtype=self.dtypes.master, device=self.parameters[0].device)
        self.place.rank.account(master, "optimizer", self.name)
        for span in self.spans:
            mine = self.parameters[span.index].data.reshape(-1)[span.start : span.start + span.length]
            master[span.at : span.at + span.length].copy_(mine)
        return master

    def _take_over(self) -> None:
        """Puts the parameters, in their role's dtype, into one vector or, at stage 3, into shards of it."""
        account, stage = self.place.rank.account, self.place.stage
        if not stage:
            for name, p in zip(self.flat.names, self.parameters):
                p.data = p.data.to(self.dtypes.param).contiguous()
                account(p.data, "parameters", name.rpartition(".")[0])
            return
        where = self.parameters[0].device
        self._make_whole()
        assert self._whole is not None
        for p, view in zip(self.parameters, self._views):
            view.copy_(p.data)
            p.data = view
        if stage == 3:
            name_absent(self.parameters, self.flat.names, "" if self.name == "root" else self.name)
            self._bytes = self._whole.untyped_storage().nbytes()
            self._nothing = self._whole.new_empty(0)
            self._shard = torch.zeros(self.slots, dtype=self.dtypes.param, device=where)
            account(self._shard, "parameters", self.name)
            self._shard[: self.real].copy_(self._own_of(self._whole))
            self.free()

    def _make_whole(self) -> None:
        self._whole = torch.empty(self.flat.numel, dtype=self.dtypes.param, device=self.parameters[0].device)
        self.place.rank.account(self._whole, "parameters", self.name)
        self._views = self.cut(self._whole)

    def cut(self, vector: Tensor) -> list[Tensor]:
        """Views of a whole vector, one per parameter, in its shape."""
        pieces = vector.split([end - start for start, end in zip(self.flat.offsets, self.flat.offsets[1:])])
        return [piece.view(shape) for piece, shape in zip(pieces, self.flat.shapes)]

    def _own_of(self, whole: Tensor) -> Tensor:
        return whole[self.first : self.first + self.real]

    # Stage 3: gather, use, free.

    def gather(self) -> None:
        """Starts to gather whole parameters, unless they are here or on their way."""
        if self.here or self._coming is not None:
            return
        assert self._whole is not None and self._shard is not None
        self._whole.untyped_storage().resize_(self._bytes)
        if self.flat.owner is not None and self.real:
            self._whole.copy_(self._shard)
        self._coming = self._spread(first(self._shard, self.real), self._whole)

    def _spread(self, own: Tensor, whole: Tensor) -> Any:
        """Every rank's part to every rank: by all-gather, or from the one rank that has it all."""
        group = self.place.group
        if self.flat.owner is not None:
            return group.broadcast(whole, self.flat.owner, async_op=True, name=self.name)
        return group.all_gather(own, sizes=self.sizes, out=whole, async_op=True, name=self.name)

    def arrive(self) -> None:
        """Whole parameters are here; if they were not, the current stream waits for them."""
        if self.here:
            return
        self.gather()
        self._coming.wait()
        self._coming = None
        self._bring()

    def _bring(self) -> None:
        for p, view in zip(self.parameters, self._views):
            p.__class__ = nn.Parameter
            p.data = view
        self.here = True

    def free(self) -> None:
        """Whole parameters go. What autograd saved of them stays valid: it will see the same storage filled again."""
        if self._coming is not None:  # nobody asked for them; what is under way cannot be called back
            self.arrive()
        if self._shard is not None and self.here:
            self._take_away()
            assert self._whole is not None
            self._whole.untyped_storage().resize_(0)

    def _take_away(self) -> None:
        for p in self.parameters:
            p.data = self._nothing
            p.__class__ = Absent
        self.here = False

    def leave(self) -> None:
        """The same, but what somebody has taken of them stays valid: whole parameters will be in new memory."""
        if self._coming is not None:
            self.arrive()
        if self._shard is not None and self.here:
            self._take_away()
            self._whole, self._views = None, []
            self._make_whole()
            assert self._whole is not None
            self._whole.untyped_storage().resize_(0)

    # The optimizer's part.

    def _own(self) -> Tensor | None:
        """This rank's part in the optimizer's precision; None where parameters are still single tensors."""
        if self._master is not None or self._shard is not None:
            return self._master if self._master is not None else self._shard
        return self._own_of(self._whole) if self._whole is not None else None

    @property
    def is_a_copy(self) -> bool:
        """Whether whole parameters are copies of what the optimizer works on."""
        return self._master is not None or self._shard is not None

    @property
    def in_place(self) -> bool:
        """Whether an optimizer works on the parameters themselves."""
        return self._own() is None

    def pieces(self) -> list[Piece]:
        """This rank's part of the parameters in the optimizer's precision, by name, without padding."""
        own = self._own()
        if own is None:
            whole = zip(self.flat.names, self.flat.shapes, self.parameters)
            return [Piece(name, shape, 0, p.data.view(-1)) for name, shape, p in whole]
        return [self.piece(span, own[span.at : span.at + span.length]) for span in self.spans]

    def piece(self, span: Span, tensor: Tensor) -> Piece:
        return Piece(self.flat.names[span.index], self.flat.shapes[span.index], span.start, tensor)

    def stepped(self) -> list[tuple[Span, nn.Parameter]]:
        """What an optimizer works on: parameters over this rank's part. Padding belongs to the last of them."""
        if self._stepped is None:
            own = self._own()
            if own is None:
                ends = zip(self.flat.offsets, self.flat.offsets[1:])
                spans = [Span(i, 0, start, end - start) for i, (start, end) in enumerate(ends)]
                self._stepped = list(zip(spans, self.parameters))
            else:
                spans = list(self.spans)
                if len(own) > self.real:
                    last = spans.pop() if spans else Span(len(self.parameters) - 1, 0, 0, 0)
                    spans.append(last._replace(length=len(own) - last.at))
                cut = [own[span.at : span.at + span.length] for span in spans]
                self._stepped = [(span, nn.Parameter(piece)) for span, piece in zip(spans, cut)]
        return self._stepped

    def _note(self) -> None:
        """Remembers which of the parameters' values the optimizer knows."""
        self._versions = [p._version for p in self.parameters]

    def prepare(self) -> None:
        """Before a step: whole copies of what will be no more go.

        Raises:
            EmuError: somebody moved parameters, or wrote into them where the optimizer's values are elsewhere.
        """
        if self.place.stage in (1, 2):
            moved = [i for i, p in enumerate(self.parameters) if p.data_ptr() != self._views[i].data_ptr()]
            if moved:
                raise EmuError(
                    f"{self.flat.names[moved[0]]} was given other memory after it was wrapped, by .data = ... or .to()",
                    "convert the model before it is wrapped; for other precisions say precision=",
                )
        if self._master is not None and self.place.stage < 3:
            written = [i for i, p in enumerate(self.parameters) if p._version != self._versions[i]]
            if written:
                raise EmuError(
                    f"{self.flat.names[written[0]]} was written into, but the optimizer steps from a copy in another precision",
                    "write into the model before it is wrapped, or keep all in its own precision: precision=None",
                )
        if self.place.stage == 3:
            self.free()

    def refresh(self) -> Any:
        """After a step: parameters take the values that the optimizer gave its part. Returns work to wait for, or None."""
        work = self._refreshed()
        self._note()
        return work

    def _refreshed(self) -> Any:
        stage, master = self.place.stage, self._master
        if not stage:
            if master is not None:
                for p, view in zip(self.parameters, self.cut(master)):
                    p.data.copy_(view)
            return None
        if stage == 3:
            if master is not None and self._shard is not None:
                self._shard.copy_(master)
            return None
        assert self._whole is not None
        own = self._own_of(self._whole)
        if master is not None:
            own.copy_(master[: self.real])
        return self._spread(own, self._whole)

    def whole(self) -> dict[str, Tensor]:
        """All parameters whole, in the optimizer's precision, as new tensors. Every rank of the group must call it."""
        own = self._own()
        if own is None or not self.place.stage:
            values = self.cut(own) if own is not None else [p.data for p in self.parameters]
            return {name: value.clone() for name, value in zip(self.flat.names, values)}
        return self.assembled(own[: self.real])

    def assembled(self, own: Tensor) -> dict[str, Tensor]:
        """Whole tensors by name, from every rank's part of a vector."""
        whole = self.place.group.all_gather(own, sizes=self.flat.cuts, name=f"whole {self.name}")
        return dict(zip(self.flat.names, self.cut(whole)))


def first(vector: Tensor, length: int) -> Tensor:
    """Its first elements; without a view of all where that is all, since views cost time, too."""
    return vector if len(vector) == length else vector[:length]
