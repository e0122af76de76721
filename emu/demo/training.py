"""What the demo runs: an ordinary training loop under every form of data parallelism, and plain torch beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from emu.models import Config, Decoder
from emu.parallel import Batch, DataParallel
from emu.spmd import Rank, grads

BUCKET_BYTES = (
    200_000  # the usual 25 MiB would hold all of so small a model: then nothing could be sent before backward ends
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "dp": {"bucket_bytes": BUCKET_BYTES},
    "zero1": {"zero": 1, "bucket_bytes": BUCKET_BYTES},
    "zero2": {"zero": 2, "bucket_bytes": BUCKET_BYTES},
    "zero3": {"zero": 3},
    "hsdp": {"zero": 3, "replicate": 2},
}
MEANING = {
    "dp": "everything everywhere (DDP)",
    "zero1": "optimizer states sharded",
    "zero2": "gradients sharded, too",
    "zero3": "parameters sharded, too (FSDP)",
    "hsdp": "as zero3, in 2 groups",
}


def train(
    rank: Rank,
    model_config: Config,
    data: Sequence[Batch],
    options: Mapping[str, Any],
    tick: Callable[[int], None],
) -> torch.Tensor:
    """An ordinary training loop; every rank runs it. Returns the loss of every step."""
    dist = DataParallel(Decoder(model_config, seed=0), rank, "dp", **options)
    optimizer = dist.optimizer(torch.optim.AdamW, lr=3e-3, foreach=True)
    losses = []
    for step, batch in enumerate(data):
        rank.mark(f"step {step}")
        losses.append(dist.backward(batch))
        rank.mark(f"gradients {step}")
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            tick(step)
    rank.mark("end")
    return torch.stack(losses)


def one_step(rank: Rank, model_config: Config, batch: Batch, options: Mapping[str, Any]) -> Any:
    """The loss and gradients of one distributed step, and the loss after it."""
    dist = DataParallel(Decoder(model_config, seed=0), rank, "dp", **options)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    loss, gradients = dist.backward(batch), dist.gather_gradients()
    optimizer.step()
    with torch.no_grad():
        after = dist.loss_sum(*batch.shard(rank, "dp")).clone()
    dist.group.all_reduce(after, name="loss after")
    return {"loss": loss, "loss after": after / batch.tokens, "parameters": gradients}


def alone(model_config: Config, batch: Batch, options: Mapping[str, Any]) -> Any:
    """The same by plain torch, on one device: nothing of emu's is in it but the names it returns."""
    model = Decoder(model_config, seed=0)
    loss = model.loss_sum(batch.x, batch.y)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(batch.tokens)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        after = model.loss_sum(batch.x, batch.y)
    return {"loss": loss.detach() / batch.tokens, "loss after": after / batch.tokens, "parameters": grads(model)}
