"""Saving and loading a whole training: model, optimizer, random generators, and where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from emu.parallel.state.errors import StateError
from emu.parallel.state.exporting import BUFFERS, PARAMETERS, Key, dcp_key, export_dcp
from emu.parallel.state.groups import groups_of, saved_groups
from emu.parallel.state.importing import import_dcp
from emu.parallel.state.loading import load_state
from emu.parallel.state.piece import Piece
from emu.parallel.state.rng import restore_rng
from emu.parallel.state.saving import save_state
from emu.parallel.state.scalars import check_scalars
from emu.spmd import Rank


class Distributed(Protocol):
    """What is asked of a model under a strategy, as emu.DataParallel is."""

    model: Any
    rank: Rank
    vectors: Any

    def pieces(self) -> Sequence[Piece]: ...

    def zero_grad(self) -> None: ...


class Stepping(Protocol):
    """What is asked of its optimizer."""

    names: list[list[str]]
    torch: Any

    def pieces(self) -> dict[str, list[Piece]]: ...

    def scalars(self) -> dict[str, Any]: ...

    def load_scalars(self, scalars: Any) -> None: ...


def save(path: str | os.PathLike[str], dist: Distributed, optimizer: Stepping | None = None, extra: Any = None) -> None:
    """Saves a training to a folder, whole or not at all; `load` goes on from it in any other layout. All ranks must call it.

    Parameters are saved as the optimizer sees them: where there is a master copy, that. Buffers, the optimizer's states and
    options, and every rank's random generators go with them. Gradients do not.

    Args:
        path: a folder. The checkpoint that is already there is replaced once the new one is whole.
        dist: the model under its strategy.
        optimizer: made by `dist.optimizer(...)`.
        extra: JSON-able data to keep along, e.g. how many steps were taken; rank 0's counts.

    Raises:
        StateError: on every rank alike; what was at the path is still there.
    """
    _check(dist, optimizer)
    scalars = None if optimizer is None else optimizer.scalars()
    save_state(path, dist.rank, _tensors(dist, optimizer), {"extra": extra, "optimizer": scalars})


def load(
    path: str | os.PathLike[str],
    dist: Distributed,
    optimizer: Stepping | None = None,
    *,
    convert: bool = False,
    rng: bool = True,
) -> Any:
    """Goes on from a checkpoint that `save` wrote, whatever layout and number of ranks it had. All ranks must call it.

    Args:
        path: the folder.
        dist: the same model, under any strategy of its kind.
        optimizer: of the same kind, made with the same groups; None leaves the saved states in the file.
        convert: whether tensors of another dtype are converted; otherwise they are an error.
        rng: whether this rank's random generators go on, too. Ranks that the saved run did not have get seeds derived from it;
            where tp was or is more than 1 and the mesh is another, all ranks do.

    Returns:
        The extra data that was saved along.

    Raises:
        StateError: on every rank alike; it says what the checkpoint and the model differ in, or which file is damaged.
    """
    _check(dist, optimizer)

    def accept(plain: Any) -> None:
        if not isinstance(plain, dict) or plain.keys() != {"extra", "optimizer"}:
            raise StateError(
                f"{path} was not written by save(path, dist, ...), but by save_state",
                "load it with load_state",
                path,
            )
        if optimizer is not None and plain["optimizer"] is not None:
            check_scalars(path, plain["optimizer"], optimizer.torch.param_groups, optimizer.names)

    with _filling(dist):
        tensors = _tensors(dist, optimizer)
        states = tensors.keys() - {PARAMETERS, BUFFERS}
        loaded = load_state(path, dist.rank, tensors, convert, optimizer is None, states, accept)
    plain = loaded.extra
    if optimizer is not None and plain["optimizer"] is not None:
        optimizer.load_scalars(plain["optimizer"])
    if rng and loaded.rng is not None:
        restore_rng(loaded.rng)
        _share_draws(dist.rank, loaded.mesh)
    return plain["extra"]


def save_dcp(
    path: str | os.PathLike[str], dist: Distributed, optimizer: Stepping | None = None, extra: Any = None
) -> None:
    """Saves model and optimizer for stock torch, whose ordinary recipe reads them:

        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    There the optimizer is of the same kind, with the same groups. Names and places are those of torch's get_state_dict; a
    shared parameter stands under all its names. All ranks must call it.

    Args:
        path: a folder that does not exist yet, or is empty.
        extra: JSON-able data, which stands under "extra"; rank 0's counts.

    Raises:
        StateError: on every rank alike.
    """
    _check(dist, optimizer)
    tensors = _tensors(dist, optimizer)
    first: dict[int, str] = {}
    for name, parameter in dist.model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            again = [piece._replace(name=name) for piece in tensors[PARAMETERS] if piece.name == known]
            tensors[PARAMETERS] = [*tensors[PARAMETERS], *again]
    groups = None if optimizer is None else groups_of(dist, optimizer)
    export_dcp(path, dist.rank, tensors, extra, groups=groups)


def load_dcp(
    path: str | os.PathLike[str],
    dist: Distributed,
    optimizer: Stepping | None = None,
    *,
    key: Callable[[str, str], Key] = dcp_key,
    convert: bool = False,
    options: bool = True,
) -> Any:
    """Takes over model and optimizer that stock `dcp.save` wrote, of any sharding. All ranks must call it.

    Random generators are not taken over.

    Args:
        path: the folder.
        optimizer: None leaves its states in the file.
        key: kind ("parameters", "buffers", or a state of the optimizer) and name -> where the tensor stands in the nested
            state dict that was saved.
        convert: whether tensors of another dtype are converted; otherwise they are an error.
        options: whether options of parameter groups (learning rates, betas, ...) are taken over, too, where they stand as
            torch's get_state_dict has them: in "param_groups" beside "state". A group takes those of the saved group that
            has all its parameters.

    Returns:
        What the state dict had under "extra", None if nothing.

    Raises:
        StateError: on every rank alike.
    """
    _check(dist, optimizer)
    groups = saved_groups(path, dist, optimizer, key) if optimizer is not None and options else None
    with _filling(dist):
        extra = import_dcp(path, dist.rank, _tensors(dist, optimizer), key=key, convert=convert)
    if optimizer is not None and groups is not None:
        optimizer.load_scalars({"groups": groups, "scale": None})
    return extra


def _check(dist: Any, optimizer: Any) -> None:
    if not all(hasattr(dist, name) for name in ("pieces", "vectors", "rank")):
        raise StateError(
            f"a {type(dist).__name__} does not know how it is spread over ranks",
            "pass the model under its strategy: dist = emu.DataParallel(model, rank, ...)",
        )
    if optimizer is not None and not hasattr(optimizer, "load_scalars"):
        raise StateError(
            f"a {type(optimizer).__name__} does not know which part of the parameters it has",
            "pass the optimizer that dist.optimizer(torch.optim.AdamW, ...) made, or none",
        )


@contextmanager
def _filling(dist: Distributed) -> Iterator[None]:
    """Within it this rank's pieces get new values; after it, the model has them everywhere, and no gradients of the past."""
    for shards in dist.vectors:
        shards.free()  # whole copies of shards
    yield
    for work in [shards.refresh() for shards in dist.vectors]:
        if work is not None:
            work.wait()
    dist.zero_grad()


def _share_draws(rank: Rank, saved: Mapping[str, Any]) -> None:
    """Ranks along tp draw alike, and others do not: where the states came from ranks of another mesh, they are made so.

    Args:
        saved: the mesh that saved them.
    """
    before, now = saved.get("axes"), rank.mesh.axes
    if before == now or (now.get("tp", 1) == 1 and (not isinstance(before, dict) or before.get("tp", 1) == 1)):
        return
    from emu.parallel.tensor.randomness import share_generators

    share_generators(rank, rank.group("tp") if "tp" in now else rank.group(members=[rank.id], label="alone"))


def _tensors(dist: Distributed, optimizer: Stepping | None) -> dict[str, Sequence[Piece]]:
    """All that makes up the state of a training, as this rank holds it: pieces of whole tensors, however layers are cut."""
    kept = dist.model.state_dict(keep_vars=True).keys()  # without buffers that the module makes anew
    buffers = [
        Piece(name, tuple(buffer.shape), 0, buffer.detach().view(-1))
        for name, buffer in dist.model.named_buffers()
        if name in kept
    ]
    states: dict[str, Sequence[Piece]] = {} if optimizer is None else {**optimizer.pieces()}
    tensors = {PARAMETERS: dist.pieces(), **states}
    if (sharding := getattr(dist, "sharding", None)) is not None:
        from emu.parallel.tensor.pieces import pieces_of_wholes

        tensors = {kind: pieces_of_wholes(pieces, sharding) for kind, pieces in tensors.items()}
    return {**tensors, BUFFERS: buffers}
