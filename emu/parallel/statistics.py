"""Batch normalisation over the rows of all ranks, however unevenly they are cut.

Plain batch normalisation under data parallelism normalises every rank's rows by that rank's own statistics: another
function than on one device, and one that depends on how the batch is cut.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from emu.spmd import EmuError, Group, gather_shards

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation (arXiv 1502.03167) of [rows, channels, ...] by the statistics of a group's rows together.

    Every rank computes count, mean and variance of its own values, and one all-gather of 2 * channels + 1 numbers makes
    them known to all: `gather_shards`, whose backward is one reduce-scatter, because each rank normalises other rows
    with what it gathers, so that every rank's statistics have gradients from all. (`gather_from` would be the twin for
    a value that all use alike.) Then

        mean = sum(n m) / sum(n)        var = sum(n (v + (m - mean)^2)) / sum(n)

    (Chan, Golub and LeVeque, 1979), in which nothing large is subtracted from something large. An all-reduce of sums
    and sums of squares would move less on many ranks, but var = E[x^2] - mean^2 loses as many digits as the square of
    mean / deviation has, in forward and backward: at a ratio of 4000 in float32 nothing is left. An empty rank takes
    part with count 0.

    Counts, running statistics, evaluation and state_dict are torch's: the running variance is the unbiased one of all
    rows. bfloat16 and float16 are normalised in float32. Every rank must call it equally often, and run backward.

    Args:
        group: whose ranks' rows belong together.
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in torch.nn.BatchNorm2d.
    """

    def __init__(
        self,
        group: Group,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise EmuError(
                f"batch normalisation of {self.num_features} channels got a tensor of shape {list(input.shape)}",
                "give it [rows, channels, ...], an empty rank [0, channels, ...]",
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalises [rows, channels, ...], channel by channel. Returns the same shape and dtype.

        Raises:
            EmuError: a shape that does not fit; in training, fewer than two values a channel on all ranks together.
        """
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        along = [1, -1] + [1] * (x.dim() - 2)  # one number a channel, against [rows, channels, ...]
        if self.training or self.running_mean is None:
            mean, var, count = self._statistics(x, along)
            if self.training and self.track_running_stats:
                self._track(mean.detach(), var.detach(), count)
        else:
            mean, var = self.running_mean, cast(Tensor, self.running_var)
        scale = (var.to(x.dtype) + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight
        y = (x - mean.to(x.dtype).view(along)) * scale.view(along)
        if self.affine:
            y = y + self.bias.view(along)
        return y.to(input.dtype)

    def _statistics(self, x: Tensor, along: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of every channel over all ranks' values, and how many those are."""
        dims = [0, *range(2, x.dim())]
        n = x.numel() // self.num_features
        m = x.sum(dims) / max(n, 1)  # [channels]
        v = (x - m.view(along)).square().sum(dims) / max(n, 1)
        mine = torch.cat([x.new_full((1,), n), m, v])[None]  # [1, 1 + 2 channels]
        counts, means, variances = gather_shards(mine, self.group, name="statistics").split(
            [1, self.num_features, self.num_features], dim=1
        )  # [ranks, 1], [ranks, channels], [ranks, channels]
        count = counts.detach().sum()
        if n < 2 and not x.is_meta:  # a rank with two knows that there are two
            self._enough(int(count))
        share = counts.detach() / count
        mean = (share * means).sum(0)
        return mean, (share * (variances + (means - mean).square())).sum(0), count

    def _enough(self, count: int) -> None:
        if count < 2:
            raise EmuError(
                f"expected more than 1 value per channel when training, but the {self.group.size} ranks of "
                f"{self.group.label!r} have {count} together",
                "a batch needs two rows, or one with more than one position; or call model.eval()",
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """The same on every rank, bit for bit, as all compute it from the same gathered numbers."""
        batches, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
        assert batches is not None and running_mean is not None and running_var is not None
        batches.add_(1)
        weight = 1 / batches.to(running_mean.dtype) if self.momentum is None else self.momentum
        for running, new in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
            running.add_((new.to(running.dtype) - running) * weight)


def synchronize_statistics(model: nn.Module, group: Group) -> nn.Module:
    """Makes every batch normalisation of a plain model one over all ranks' rows. Returns the model.

    The model keeps its parameters and buffers (an optimizer that has them stays valid) and its names; a model that is
    itself a batch normalisation cannot change in place, so use what is returned. Hooks on replaced modules are lost.

    Args:
        model: a plain module; nn.BatchNorm1d, 2d and 3d in it are replaced, one that is used twice by one.
        group: whose ranks cut the batch, e.g. rank.group("dp").

    Raises:
        EmuError: no module or group; a batch normalisation of another class, which would stay local unnoticed.
    """
    if not isinstance(model, nn.Module) or not isinstance(group, Group):
        what = (
            f"model is a {type(model).__name__}" if isinstance(group, Group) else f"group is a {type(group).__name__}"
        )
        raise EmuError(f"the {what}", 'call synchronize_statistics(model, rank.group("dp"))')
    return _replaced(model, "", group, {})


def _replaced(module: nn.Module, name: str, group: Group, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    done[module] = module
    if type(module) in PLAIN:
        done[module] = _synchronized(cast(_BatchNorm, module), group)
    elif isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        raise EmuError(
            f"{name or 'the model'} is a {type(module).__name__}, which is no plain batch normalisation",
            "use torch.nn.BatchNorm1d, 2d or 3d, or put a SyncBatchNorm(group, ...) there yourself",
        )
    else:
        for key, child in module._modules.items():  # named_children leaves out second names
            module._modules[key] = child and _replaced(child, f"{name}.{key}".lstrip("."), group, done)
    return done[module]


def _synchronized(plain: _BatchNorm, group: Group) -> SyncBatchNorm:
    out = SyncBatchNorm(group, plain.num_features, plain.eps, plain.momentum, False, False)
    out.affine, out.track_running_stats, out.training = plain.affine, plain.track_running_stats, plain.training
    out._parameters.update(plain._parameters)
    out._buffers.update(plain._buffers)
    return out
