"""What a step of torch's optimizer changes, kept so that the step can be taken back to the bit.

It costs a copy of the parameters and of every state, as the optimizer holds them: of float32, 4 bytes an element with plain
SGD, 8 with momentum, 12 with Adam, 16 with amsgrad, on this rank's part of them. Computing backwards would cost nothing
(p + lr * update, m = (m' - (1 - b) g) / b, as in the published implementation of arXiv 2401.10241, which copies parameters
where it is to match numerically), but is not exact: a sum that was rounded does not tell what it was a sum of, nor a maximum
what it was a maximum of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emu.parallel.optimizer import Optimizer


class Options:
    """The options of every parameter group of an optimizer of torch's, as they are now: learning rates and the like."""

    def __init__(self, optimizer: Any) -> None:
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self.values = [{key: _own(value) for key, value in group.items() if key != "params"} for group in self._groups]

    def restore(self, besides: Options | None = None) -> None:
        """Puts them back.

        Args:
            besides: options at another time: only those that are not the same in both are put back.
        """
        for number, (group, values) in enumerate(zip(self._groups, self.values)):
            then = {} if besides is None else besides.values[number]
            for key, value in values.items():
                if key in then and _same(then[key], value):
                    continue
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = _own(value)


class Snapshot:
    """An optimizer's parameters, states and options on this rank.

    Args:
        optimizer: whose next step changes them.

    Attributes:
        options: of its parameter groups.
        nbytes: of the copies.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.options = optimizer, Options(optimizer.torch)
        self._begun, self._made = optimizer.begun, list(optimizer.made)
        self._tensors: list[Tensor] = []
        for group in optimizer.torch.param_groups:
            self._tensors += group["params"]
        state = optimizer.torch.state
        # Entries are rebuilt around their own tensors, which get their values back: a step may write into a tensor, or put
        # another in its place.
        self._entries = {key: (entry, self._taken(entry)) for key, entry in state.items()}
        self._copies = [torch.empty_like(t, requires_grad=False) for t in self._tensors]
        for kept in self._copies:
            optimizer.summing.rank.account(kept, "optimizer", "rollback")
        _copy(self._copies, self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._copies)

    def _taken(self, value: Any) -> Callable[[], Any]:
        """Notes the tensors in a value. Returns what makes the value anew, around those tensors."""
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return lambda: value
        if isinstance(value, dict):
            parts = {key: self._taken(item) for key, item in value.items()}
            return lambda: {key: part() for key, part in parts.items()}
        if type(value) in (list, tuple):
            items = [self._taken(item) for item in value]
            return lambda: type(value)(item() for item in items)
        kept = copy.deepcopy(value)
        return lambda: copy.deepcopy(kept)

    def restore(self) -> None:
        """Everything is as it was, to the bit; only whole parameters that are copies are not, until a refresh."""
        _copy(self._tensors, self._copies)
        state = self._optimizer.torch.state
        state.clear()
        for key, (entry, values) in self._entries.items():
            if isinstance(entry, dict):
                entry.clear()
                entry.update(values())
                state[key] = entry
            else:
                state[key] = values()
        self.options.restore()
        self._optimizer.begun, self._optimizer.made = self._begun, list(self._made)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies lists of tensors, with one kernel for each device and dtype, and counters, which are the host's, apart."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources):
        some = kinds.setdefault((target.device, target.dtype, bool(target.dim())), ([], []))
        some[0].append(target)
        some[1].append(source)
    torchs: Any = torch  # whose types do not say all that it has
    with torch.no_grad():
        for some_targets, some_sources in kinds.values():
            torchs._foreach_copy_(some_targets, some_sources)


def _own(value: Any) -> Any:
    """A copy that does not change when the original does."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.is_meta or bool(torch.equal(a, b))
    return type(a) is type(b) and a == b
