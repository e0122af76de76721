"""The state of an optimizer on one rank, to be saved, loaded and laid out otherwise: moments, counts, options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from emu.parallel.options import option_of, plain_option
from emu.parallel.scaling import LossScale
from emu.parallel.shards import Shards
from emu.parallel.state.piece import Piece
from emu.parallel.summing import Summing
from emu.spmd import EmuError


class States:
    """What an optimizer of torch's holds beside the parameters.

    Attributes:
        torch: that optimizer.
        names: of the parameters of every group.
        vectors: what it steps on.
        begun: whether there was a step.
        made: parameters whose states are there only because somebody asked for them.
    """

    torch: Any
    summing: Summing
    scale: LossScale | None
    names: list[list[str]]
    vectors: list[Shards]
    begun: bool
    made: list[nn.Parameter]

    def pieces(self) -> dict[str, list[Piece]]:
        """This rank's part of the states, by key ("exp_avg", ...). A state that is one number, as "step", is a piece, too.

        States are made if there was no step yet, so that they can be loaded into.
        """
        self.summing.check_settled()
        if not self.begun and not self.torch.state:
            self._make_states()
        out: dict[str, list[Piece]] = {}
        for shards in self.vectors:
            real = None if shards.in_place else shards.spans
            for i, (span, parameter) in enumerate(shards.stepped()):
                if real is not None and i == len(real):
                    break  # padding alone
                span = span if real is None else real[i]
                for key, value in self.torch.state.get(parameter, {}).items():
                    if not isinstance(value, Tensor):
                        continue
                    if shards.in_place and value.numel() != parameter.numel():  # of the parameter's rows, or one number
                        piece = Piece(shards.flat.names[span.index], tuple(value.shape), 0, value.view(-1))
                        out.setdefault(key, []).append(piece)
                    elif value.dim() == 0:
                        out.setdefault(key, []).append(Piece(shards.flat.names[span.index], (), 0, value.view(1)))
                    else:
                        out.setdefault(key, []).append(shards.piece(span, value.view(-1)[: span.length]))
        return out

    def _make_states(self) -> None:
        """A step with gradients of zero at a learning rate of zero: changes nothing, and leaves states to load into."""
        rates = [group["lr"] for group in self.torch.param_groups]
        parameters = [p for group in self.torch.param_groups for p in group["params"]]
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for group in self.torch.param_groups:
            group["lr"] = group["lr"] * 0
        self.torch.step()
        for p, grad in zip(parameters, before):
            p.grad = grad
        for group, rate in zip(self.torch.param_groups, rates):
            group["lr"] = rate
        self.made = list(self.torch.state)
        for value in (value for parameter in self.made for value in self._tensors_of(parameter).values()):
            value.zero_()

    def _tensors_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {key: value for key, value in self.torch.state[parameter].items() if isinstance(value, Tensor)}

    def _forget_made(self) -> None:
        """States that were made to be loaded into, and were not, go: not every optimizer begins with zeros.

        (SGD's first momentum is the gradient, whatever the dampening; NAdam's product begins with 1.) Steps that are counted
        tell which are none; where they are not, some state or other that is not zero does.
        """
        made, self.made = self.made, []
        with torch._C._DisableTorchDispatch():  # the host looks, and the device does not notice
            values = {parameter: self._tensors_of(parameter) for parameter in made}
            loaded = {
                parameter: any(not value.is_meta and bool(value.any()) for value in mine.values())
                for parameter, mine in values.items()
            }
        for parameter, mine in values.items():
            if not (loaded[parameter] if "step" in mine else any(loaded.values())):
                del self.torch.state[parameter]

    def scalars(self) -> dict[str, Any]:
        """What else makes up the state: options of every group, and the loss scale. Data that comes back from JSON.

        Raises:
            EmuError: an option that is no plain data (see `plain_option`).
        """
        self.summing.check_settled()
        groups = [
            {
                key: plain_option(value, f"option {key!r} of parameter group {number}")
                for key, value in group.items()
                if key != "params"
            }
            for number, group in enumerate(self.torch.param_groups)
        ]
        return {"groups": groups, "names": self.names, "scale": None if self.scale is None else self.scale.state()}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Takes over what `scalars` returned. Options that are tensors keep their place, and get the number that was saved.

        Raises:
            EmuError: another number of groups.
        """
        groups = scalars["groups"]
        if len(groups) != len(self.torch.param_groups):
            raise EmuError(
                f"the state has {len(groups)} parameter groups, this optimizer {len(self.torch.param_groups)}",
                "make the optimizer with the groups that it was saved with",
            )
        for group, saved in zip(self.torch.param_groups, groups):
            group.update({key: option_of(value, group.get(key)) for key, value in saved.items()})
        if self.scale is not None and scalars.get("scale") is not None:
            self.scale.load(scalars["scale"])
