"""What a checkpoint says of an optimizer beside tensors, looked at before anything is taken from it: it may be anybody's."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from emu.parallel.options import option_of
from emu.parallel.state.errors import StateError

PARAMS = "params"  # where torch keeps a group's parameters


def check_scalars(path: object, saved: Any, groups: list[dict[str, Any]], names: list[list[str]] | None = None) -> None:
    """Whether an optimizer can take over the options of its groups and its loss scale.

    Args:
        path: of the checkpoint.
        saved: what it has of them; `scalars()` of an optimizer, if all is well.
        groups: the optimizer's own groups, as torch keeps them.
        names: of the parameters in each; None where what was saved does not say.

    Raises:
        StateError: it cannot; says which part does not fit.
    """

    def refused(what: str, hint: str = "make the optimizer as it was when it was saved, or load another checkpoint"):
        return StateError(f"{path} does not fit this optimizer: {what}", hint, path)

    if (
        not isinstance(saved, dict)
        or saved.keys() - {"names"} != {"groups", "scale"}
        or not isinstance(saved["groups"], list)
    ):
        raise refused(f"its options are no groups and a scale, but {saved!r:.80}")
    if len(saved["groups"]) != len(groups):
        raise refused(
            f"the state has {len(saved['groups'])} parameter groups, this optimizer {len(groups)}",
            "make the optimizer with the groups that it was saved with",
        )
    if names is not None and saved.get("names") != names:
        raise refused(
            "its parameter groups have other members, or another order",
            "make the optimizer with the groups that it was saved with, in the same order",
        )
    for number, (of_saved, group) in enumerate(zip(saved["groups"], groups)):
        if not isinstance(of_saved, dict) or PARAMS in of_saved:
            raise refused(f"parameter group {number} is not a group's options, but {of_saved!r:.80}")
        for key, value in of_saved.items():
            if not _fits(value, group.get(key)):
                raise refused(f"option {key!r} of parameter group {number} is {value!r:.80}")
    if not _is_scale(saved["scale"]):
        raise refused(f"its loss scale is {saved['scale']!r:.80}")


def _fits(saved: Any, now: Any) -> bool:
    """Whether an option can be taken over where there is this one now, None for none."""
    try:
        made = option_of(saved, _copied(now))  # not into the tensor that is there
    except Exception:  # whatever data of another form can lead to
        return False
    return not _holds_dict(made) and (
        now is None or _kind(made) == _kind(now) or (made is None and now in (True, False))
    )


def _copied(option: Any) -> Any:
    if isinstance(option, (list, tuple)):
        return type(option)(map(_copied, option)) if type(option) in (list, tuple) else option
    return option.detach().clone() if isinstance(option, Tensor) else option


def _kind(option: Any) -> Any:
    if isinstance(option, (list, tuple)):
        return [_kind(item) for item in option]
    return "a number" if isinstance(option, (int, float, complex, Tensor)) else type(option)


def _holds_dict(option: Any) -> bool:
    return isinstance(option, dict) or (isinstance(option, (list, tuple)) and any(map(_holds_dict, option)))


def _is_scale(saved: Any) -> bool:
    if saved is None:
        return True
    if not isinstance(saved, dict) or saved.keys() != {"value", "since"}:
        return False
    value, since = saved["value"], saved["since"]
    return type(value) in (int, float) and 0 < value < math.inf and type(since) is int and since >= 0
