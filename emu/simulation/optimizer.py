"""AdamW as one kernel, which is what training frameworks run; torch's own refuses to be fused on tensors without values."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW(fused=True) on any device.

    Its one kernel reads parameters, gradients and both moments, writes all but the gradients, and needs no memory besides.

    Args:
        params: as for any optimizer.
        lr, betas, eps, weight_decay: as of torch's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; gradients are there already, so a closure is not called."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p].update(
                        step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                    )
            of: dict[str, list[Any]] = {
                name: [self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")
            }
            torch.ops.aten._foreach_add_.Scalar(of["step"], 1)
            torch.ops.aten._fused_adamw_.default(
                params,
                [p.grad for p in params],
                of["exp_avg"],
                of["exp_avg_sq"],
                [],
                of["step"],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
