"""Cutting a plain model inside its layers, in place, as a sharding map says."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from emu.parallel.batch import checked_plain, checked_rank
from emu.parallel.tensor import styles as s
from emu.parallel.tensor.held import Sharding
from emu.parallel.tensor.maps import map_of
from emu.parallel.tensor.surgery import Surgery
from emu.spmd import PlanError, Rank


def shard_model(
    model: nn.Module,
    rank: Rank,
    sharding_map: Mapping[str, s.Style] | None = None,
    sp: bool = False,
) -> Sharding:
    """Cuts a plain model over the axes tp, ep and etp of the rank's mesh, in place. Every rank must call it.

    Modules keep their names; those that the map names change class, and their parameters become this rank's pieces. The
    values of the first rank count on every rank.

    Args:
        sharding_map: module names, with * for any characters, to styles (emu.parallel.tensor.styles); the first that fits a
            module counts. None takes the map of a model that emu knows: its own, and transformers' LlamaForCausalLM.
        sp: sequence parallel: norms, dropout and residuals work on this rank's tokens alone (arXiv 2205.05198).

    Returns:
        What this rank holds. Gradients of parameters of kind "tokens" are still to be summed over tp, as are those of all
        over the data axes: `DataParallel(model, rank, "dp", sharding=...)` does both.

    Raises:
        PlanError: the map does not fit the model, the model cannot be cut so, or sp without tp.
    """
    checked_plain(model, "shard_model(model, rank)")
    checked_rank(rank, "shard_model(model, rank)")
    tp = rank.group("tp") if "tp" in rank.mesh.axes else rank.group(members=[rank.id], label="tp")
    if sp and tp.size == 1:
        raise PlanError(
            "sp=True, but the mesh has no axis tp of more than one rank to cut the sequence over",
            "add tp to the mesh, e.g. tp=2, or leave sp out",
            field="sp",
            nearest=False,
        )
    found = styles_of(model, sharding_map if sharding_map is not None else map_of(model))
    done: Any = Surgery(model, rank, tp, sp, found).done
    model.cut_inside = done  # so that nobody takes it for a plain one
    return done


def styles_of(model: nn.Module, sharding_map: Mapping[str, s.Style]) -> dict[str, s.Style]:
    """Module path -> style.

    Raises:
        PlanError: a name in the map that is no module's, or a value that is no style.
    """
    if not isinstance(sharding_map, Mapping):
        raise PlanError(
            f"the sharding map is a {type(sharding_map).__name__}, not a dict",
            'write {"mlp.up": Column(), "mlp.down": Row()}',
            field="sharding_map",
        )
    paths = [path for path, _ in model.named_modules()]
    for pattern, style in sharding_map.items():
        if not isinstance(style, s.Style):
            raise PlanError(
                f"the sharding map says {style!r} of {pattern!r}, which is no style",
                "use Column(), Row(), Region(), ... of emu.parallel.tensor",
                field="sharding_map",
            )
        if not any(_fits(path, pattern) for path in paths):
            some = ", ".join(path for path in paths if path)
            raise PlanError(
                f"the sharding map names {pattern!r}, but {type(model).__name__} has no such module",
                f"its modules are {some[:200]}{' ...' if len(some) > 200 else ''}",
                field="sharding_map",
            )
    out: dict[str, s.Style] = {}
    unused = dict.fromkeys(sharding_map)
    for path in paths:
        pattern = next((pattern for pattern in sharding_map if _fits(path, pattern)), None)
        if pattern is not None:
            out[path] = sharding_map[pattern]
            unused.pop(pattern, None)
    for pattern in unused:
        raise PlanError(
            f"the sharding map's {pattern!r} is never used: all its modules are named by patterns before it",
            "the first pattern that fits a module counts: put the narrower one first",
            field="sharding_map",
        )
    return out


def _fits(path: str, pattern: str) -> bool:
    """Whether a pattern names a module; the model itself only by its own name, which is empty."""
    return fnmatchcase(path, pattern) if path else not pattern
