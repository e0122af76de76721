"""Parameter groups of an optimizer as torch's get_state_dict has them: options, and the names of all the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from emu.parallel.options import option_of, plain_option
from emu.parallel.state.consult import consult
from emu.parallel.state.errors import StateError, folder_of, listed
from emu.parallel.state.exporting import Key
from emu.parallel.state.importing import read_item
from emu.parallel.state.scalars import check_scalars
from emu.parallel.state.unpickling import read_metadata
from emu.spmd import EmuError

Names = list[list[str]]  # of every group


def groups_of(dist: Any, optimizer: Any) -> list[dict[str, Any]]:
    """The groups of the whole model's parameters: options, and "params", names. All ranks must call it.

    Raises:
        EmuError: an option that is no plain data.
    """
    given = optimizer.scalars()["groups"]
    whole: Names = consult(dist.rank, lambda: _own(dist, optimizer), lambda heard: [_joined(heard, dist)] * len(heard))
    return [
        {**{key: option_of(value) for key, value in group.items()}, "params": names}
        for group, names in zip(given, whole)
    ]


def saved_groups(path: Any, dist: Any, optimizer: Any, key: Callable[[str, str], Key]) -> list[dict[str, Any]] | None:
    """Options that a checkpoint has for every group of this optimizer, for its `load_scalars`; None if it has none.

    Rank 0 reads them. All ranks must call it.

    Raises:
        StateError: on every rank alike; no one saved group has all the parameters of a group, or an option is no plain data.
    """
    place = key("step", "name")
    root = (*place[:-3], "param_groups") if tuple(place[-3:]) == ("state", "name", "step") else None
    known = [list(group) for group in optimizer.torch.param_groups]

    def decide(heard: list[Names]) -> list[Any]:
        folder = folder_of(path)
        saved = _read(folder, root, {key for group in known for key in group}) if root is not None else None
        fitting = None if saved is None else [_fitting(folder, saved, names) for names in _joined(heard, dist)]
        if fitting is not None:
            check_scalars(folder, {"groups": fitting, "scale": None}, optimizer.torch.param_groups)
        return [fitting] * len(heard)

    return consult(dist.rank, lambda: _own(dist, optimizer), decide)


def _own(dist: Any, optimizer: Any) -> Names:
    """Names of the parameters of which this rank has a part, by group."""
    named = {id(part): shards.flat.names[span.index] for shards in dist.vectors for span, part in shards.stepped()}
    return [[named[id(part)] for part in group["params"]] for group in optimizer.torch.param_groups]


def _joined(heard: Sequence[Names], dist: Any) -> Names:
    """Names by group, of all ranks, in the model's order."""
    sharding = getattr(dist, "sharding", None)
    names = [name for name, _ in dist.model.named_parameters()] if sharding is None else sharding.shapes
    order = {name: i for i, name in enumerate(names)}
    return [sorted({name for names in of_ranks for name in names}, key=order.__getitem__) for of_ranks in zip(*heard)]


def _read(path: Path, root: Key, known: set[str]) -> list[dict[str, Any]] | None:
    """The groups that a checkpoint has, with plain options; other options than those known are left out if not plain."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, item in read_metadata(path).items():
        if item.path[:-2] != root:
            continue
        number, option = item.path[-2:]
        try:
            value = plain_option(read_item(path, item, name), name)
        except StateError:
            if option in known:
                raise
        except EmuError as error:
            if option in known:
                raise StateError(f"{path}: {error.message}", "pass options=False to leave all of them", path) from None
        else:
            groups.setdefault(number, {})[str(option)] = value
    return list(groups.values()) or None


def _fitting(path: Path, saved: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The options of the saved group that has all these parameters."""
    for group in saved if names else ():
        there = group.get("params")
        if isinstance(there, list) and all(name in there for name in names):
            return {option: value for option, value in group.items() if option != "params"}
    if not names:
        return {}
    raise StateError(
        f"{path} has {len(saved)} parameter groups, none of which has all of {listed(names)}",
        "make the optimizer with the groups that were saved, or pass options=False to keep the options that it has",
        path,
    )
