"""Selective by module: the insides of attention, which are large and cheap, are computed again, and all else is kept.

Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198, section 5: of a layer's 34 + 5 a s / h bytes for each number of its
input, 5 a s / h are those of scores; without them 34 remain, and what is computed again are two products of attention.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from emu.parallel.checkpointing.apply import join
from emu.parallel.checkpointing.chain import Chain
from emu.parallel.checkpointing.keeping import Keep, in_place
from emu.parallel.checkpointing.policy import Policy
from emu.spmd import PlanError

CORES = "*.attention.core"


def checkpointed_modules(model: nn.Module, pattern: str = CORES, keep: Keep = in_place) -> list[str]:
    """Changes modules so that each keeps its arguments alone, and is computed again in backward.

    Args:
        model: a plain one, before Pipeline or DataParallel take it over.
        pattern: their paths, with * for any characters.
        keep: what their arguments pass through.

    Returns:
        Their paths.

    Raises:
        PlanError: no path matches, or one of these modules lies inside another.
    """
    found: list[tuple[str, nn.Module]] = [(p, m) for p, m in model.named_modules() if p and fnmatchcase(p, pattern)]
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no module {pattern!r} to compute again",
            "say the path of what attention does between its maps, with * for any characters: "
            "name its own: checkpointed_modules(model, '*.the_module_that_attends'); or checkpoint whole layers: checkpoint=full",
            field="checkpoint",
        )
    for path, _ in found:
        if around := next((other for other, _ in found if path.startswith(f"{other}.")), None):
            raise PlanError(
                f"{path} lies inside {around}, and both match {pattern!r}", "let modules lie apart", field="checkpoint"
            )
    for path, module in found:
        chain: Any = Chain(Policy.named("full", 1), [path], keep)
        join(chain, [(path, module)])
    return [path for path, _ in found]
