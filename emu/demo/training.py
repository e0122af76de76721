"""What the demo runs: an ordinary training loop under every form of parallelism, and plain torch beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from emu.models import Config, Decoder
from emu.parallel import Batch, DataParallel, Pipeline, shard_model
from emu.parallel.checkpointing import checkpointed, offloaded
from emu.parallel.expert import keep_routing, routing_of
from emu.spmd import Mesh, Rank, grads

RANKS = 8
MICROBATCHES = 4  # of a pipeline
BUCKET_BYTES = (
    200_000  # the usual 25 MiB would hold all of so small a model: then nothing could be sent before backward ends
)


@dataclass(frozen=True)
class Strategy:
    """One way to share a training out.

    Attributes:
        meaning: what it is, in a few words.
        axes: of its mesh, ep included.
        options: of DataParallel.
        sp: whether the sequence is cut over tp.
        model: what it trains, by name.
        schedule: of its pipeline, by name; "" where it has none.
        context: how attention crosses the ranks along cp, by name; "" where sequences are whole.
        checkpoint: what backward computes again, by name.
        offload: whether what layers keep waits in the host's memory.
    """

    meaning: str
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": RANKS})
    options: Mapping[str, Any] = field(default_factory=lambda: {"bucket_bytes": BUCKET_BYTES})
    sp: bool = False
    model: str = "gpt-tiny"
    schedule: str = ""
    context: str = ""
    checkpoint: str = "none"
    offload: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh(**self.axes)

    @property
    def inside(self) -> bool:
        """Whether it cuts the model inside its layers."""
        return "tp" in self.axes or "ep" in self.axes


ALONE = Strategy("one device", {"dp": 1}, {})
STRATEGIES = {
    "dp": Strategy("everything everywhere (DDP)"),
    "zero1": Strategy("optimizer states sharded", options={"zero": 1, "bucket_bytes": BUCKET_BYTES}),
    "zero2": Strategy("gradients sharded, too", options={"zero": 2, "bucket_bytes": BUCKET_BYTES}),
    "zero3": Strategy("parameters sharded, too (FSDP)", options={"zero": 3}),
    "hsdp": Strategy("as zero3, in 2 groups", options={"zero": 3, "replicate": 2}),
    "tp": Strategy("layers cut over 4, in 2 groups", {"dp": 2, "tp": 4}),
    "sp": Strategy("as tp, norms cut by tokens, too", {"dp": 2, "tp": 4}, sp=True),
    "pp": Strategy("layers shared out over 4 (1F1B), in 2 groups", {"dp": 2, "pp": 4}, schedule="1f1b"),
    "zb": Strategy("as pp, weights' gradients fill bubbles", {"dp": 2, "pp": 4}, schedule="zb-h1"),
    "cp": Strategy("sequences cut over 4 (zigzag), in 2 groups", {"dp": 2, "cp": 4}, context="zigzag"),
    "checkpoint": Strategy("as dp, layers computed again from inputs on the host", checkpoint="full", offload=True),
    "ep": Strategy("of moe-tiny: experts shared out", {"dp": RANKS, "ep": RANKS}, model="moe-tiny"),
}


class Trained(NamedTuple):
    """Losses [steps]; and, where experts are shared out, sent[i][j]: the copies of tokens that rank i sent to rank j
    in the first layer."""

    losses: torch.Tensor
    sent: tuple[tuple[int, ...], ...] | None


def distributed(rank: Rank, model_config: Config, strategy: Strategy) -> DataParallel:
    """The model as the strategy has it on this rank."""
    model = Decoder(model_config, seed=0)
    if strategy.checkpoint != "none":
        checkpointed(model, strategy.checkpoint, rank)
    if strategy.offload:
        offloaded(model, rank, least_bytes=0)  # the toy's layers keep less than what is usually worth a copy
    if strategy.schedule:
        options = {"schedule": strategy.schedule, "microbatches": MICROBATCHES, **strategy.options}
        return Pipeline(model, rank, "dp", **options)
    sharding = shard_model(model, rank, sp=strategy.sp) if strategy.inside else None
    if strategy.context:
        return DataParallel(model, rank, "dp", "cp", context=strategy.context, **strategy.options)
    return DataParallel(model, rank, "dp", sharding=sharding, **strategy.options)


def train(
    rank: Rank,
    model_config: Config,
    data: Sequence[Batch],
    strategy: Strategy,
    tick: Callable[[int], None],
) -> Trained:
    """An ordinary training loop; every rank runs it."""
    dist = distributed(rank, model_config, strategy)
    if "ep" in strategy.axes:
        keep_routing(dist.model)
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
    if "ep" not in strategy.axes:
        return Trained(torch.stack(losses), None)
    first = routing_of(dist.model, rank.group("ep"))["blocks.0.moe.experts"]
    return Trained(torch.stack(losses), first.sent)


def one_step(rank: Rank, model_config: Config, batch: Batch, strategy: Strategy) -> Any:
    """The loss and gradients of one distributed step, and the loss after it."""
    dist = distributed(rank, model_config, strategy)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1)
    loss, gradients = dist.backward(batch), dist.gather_gradients()
    optimizer.step()
    if isinstance(dist, Pipeline):
        return {"loss": loss, "loss after": dist.evaluate(batch), "parameters": gradients}
    with torch.no_grad():
        after = dist.loss_sum(*batch.shard(rank, "dp")).clone()
    dist.group.all_reduce(after, name="loss after")
    return {"loss": loss, "loss after": after / batch.tokens, "parameters": gradients}


def alone(model_config: Config, batch: Batch, strategy: Strategy) -> Any:
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
