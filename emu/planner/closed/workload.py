"""What is trained, how it is spread, on what and with which software: all that a closed form needs, and nothing measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from emu.hardware import Cluster
from emu.spmd import EmuError

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v"
]
Recompute = Literal["none", "full", "selective", "every-other-layer", "per-op"]
Precision = Literal["bf16", "fp16", "fp8"]


class WorkloadError(EmuError, ValueError):
    """A workload that cannot be. Fields: field, value."""


@dataclass(frozen=True)
class Moe:
    """Experts in place of a layer's MLP.

    Args:
        experts: how many a layer has, on all ranks together.
        topk: how many a token goes to.
        ffn: width of one.
        shared: MLPs of that width that every token passes besides.
        first_dense: layers at the bottom that have an ordinary MLP.
        mla: whether attention is DeepSeek-V3's with low-rank keys and values (https://arxiv.org/abs/2412.19437).
        dropless: False where tokens beyond an expert's capacity are dropped, which makes all experts' products equal.
    """

    experts: int
    topk: int
    ffn: int
    shared: int = 0
    first_dense: int = 0
    mla: bool = False
    dropless: bool = True

    def __post_init__(self) -> None:
        for name in ("experts", "topk", "ffn"):
            _whole(self, f"moe.{name}", getattr(self, name), 1)
        for name in ("shared", "first_dense"):
            _whole(self, f"moe.{name}", getattr(self, name), 0)
        if self.topk > self.experts:
            raise WorkloadError(
                f"a token cannot go to {self.topk} of {self.experts} experts",
                f"give topk from 1 to {self.experts}",
                field="moe.topk",
                value=self.topk,
            )


@dataclass(frozen=True)
class Workload:
    """A training step of a decoder, spread over a cluster.

    Args:
        layers, hidden, heads, kv_heads, head_dim: of the decoder.
        ffn: width of the MLP; 0 where every layer has experts instead.
        gated: whether the MLP has three matrices (SwiGLU) and not two.
        vocab: size of the vocabulary.
        seq: tokens of a sequence.
        global_batch: sequences of a step, of all ranks.
        cluster: what it runs on. It may be larger than the run.
        micro_batch: sequences of a micro-batch on one data-parallel rank. None: not stated, and tuned by those who ran
            it: the fastest of 1, 2, 4 and 8 that fits is taken.
        moe: None for a dense model.
        tp, pp, vp, dp, cp, ep: tensor-, pipeline-, data-, context- and expert-parallel sizes; vp: chunks a stage has.
        sp: whether what lies between tensor-parallel regions is cut along the sequence.
        etp: tensor-parallel size within an expert. None: not stated: 1 where ep > 1, else tp.
        zero: ZeRO's stage: 0 none, 1 states of the optimizer, 2 and gradients, 3 and parameters.
        fsdp: whether parameters are gathered layer by layer, as they are under zero=3.
        hsdp: ranks that share one copy of the parameters where they are gathered. None: all of dp.
        schedule: of the pipeline.
        optimizer_sync: whether all stages wait for one another before the optimizer's step; matters to schedules whose
            stages end at different times.
        recompute: "selective" is attention's core (https://arxiv.org/abs/2205.05198), "per-op" keeps every second
            matrix product as torchtitan does.
        precision: of the products.
        adapters: whether only adapters (LoRA) are trained, so that weights have no gradients.
        power_w: limit of one device. None: not stated: the chip's own.
        stack: the software, by its name in stacks.toml.
        n: devices. None: tp * pp * cp * dp, which it must equal.
        tied: whether the head is the embedding's matrix. None: not stated: as GPT does (True) where the MLP is not
            gated, and as Llama does (False) where it is.

    Raises:
        WorkloadError: names the field, its value and what to do.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    seq: int
    global_batch: int
    cluster: Cluster
    stack: str
    micro_batch: int | None = None
    moe: Moe | None = None
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    zero: int = 0
    fsdp: bool = False
    hsdp: int | None = None
    schedule: ScheduleName = "1f1b"
    optimizer_sync: bool = False
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    adapters: bool = False
    power_w: float | None = None
    n: int | None = None
    tied: bool | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _check_fits(self)
        object.__setattr__(self, "n", self.devices)
        if self.tied is None:
            object.__setattr__(self, "tied", not self.gated)

    @property
    def devices(self) -> int:
        """Devices of the run."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size within an expert."""
        return self.etp if self.etp is not None else 1 if self.ep > 1 else self.tp

    @property
    def gathered(self) -> bool:
        """Whether parameters are cut, too, and gathered layer by layer: FSDP, or ZeRO's third stage by that name."""
        return self.fsdp or self.zero == 3

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.layers if self.moe is None else min(self.layers, self.moe.first_dense)

    def microbatches(self, micro_batch: int) -> int:
        """Micro-batches a step has on each data-parallel rank; the last may be smaller, and counts as whole."""
        return max(1, math.ceil(self.global_batch / (micro_batch * self.dp)))


@dataclass(frozen=True)
class Prediction:
    """What a closed form says of a workload.

    Args:
        step_s: seconds of a step.
        parts: seconds of it by what they go to; they add up to step_s.
        peak_bytes: most memory that a device of each pipeline stage holds at once, first stage first.
        params_per_rank: parameters on a device of the fullest stage, before ZeRO or FSDP cut them.
        flops: of the model in a step on all devices together, forward and backward, attention's pairs all counted
            (full), recomputation not.
        micro_batch: the one stated, or chosen.
        detail: further figures, by name: seconds of kernels and collectives of one layer.
        fits: whether each device holds what is allocated at once beside its context and communicators' buffers: what an
            allocator reserves above that shrinks where memory is short.
    """

    step_s: float
    parts: dict[str, float]
    peak_bytes: tuple[float, ...]
    params_per_rank: float
    flops: float
    micro_batch: int
    detail: dict[str, float]
    fits: bool


def _check_types(w: Workload) -> None:
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq", "global_batch"):
        _whole(w, name, getattr(w, name), 1)
    for name in ("tp", "pp", "vp", "dp", "cp", "ep"):
        _whole(w, name, getattr(w, name), 1)
    _whole(w, "ffn", w.ffn, 0)
    for name in ("micro_batch", "etp", "hsdp", "n"):
        if getattr(w, name) is not None:
            _whole(w, name, getattr(w, name), 1)
    for name in ("gated", "sp", "fsdp", "optimizer_sync", "adapters"):
        if not isinstance(getattr(w, name), bool):
            raise WorkloadError(
                f"{name}={getattr(w, name)!r:.60} is neither True nor False",
                f"say {name}=True or False",
                field=name,
                value=getattr(w, name),
            )
    for name, choices in (
        ("schedule", ScheduleName),
        ("recompute", Recompute),
        ("precision", Precision),
        ("zero", None),
    ):
        allowed = get_args(choices) if choices else (0, 1, 2, 3)
        if getattr(w, name) not in allowed or isinstance(getattr(w, name), bool):
            raise WorkloadError(
                f"{name}={getattr(w, name)!r:.60} is not known",
                f"it can be {', '.join(map(str, allowed))}",
                field=name,
                value=getattr(w, name),
            )
    if not isinstance(w.cluster, Cluster):
        raise WorkloadError(
            f"cluster={w.cluster!r:.60} is no Cluster",
            'give e.g. emu.hardware.cluster("h100-8")',
            field="cluster",
            value=w.cluster,
        )
    if w.power_w is not None and not (isinstance(w.power_w, int | float) and 0 < w.power_w < math.inf):
        raise WorkloadError(
            f"power_w={w.power_w!r} is no power", "give watts above 0", field="power_w", value=w.power_w
        )


def _check_fits(w: Workload) -> None:
    """What would make no sense at all. Sizes that only fail to divide one another are priced as the larger part."""
    if w.n is not None and w.n != w.devices:
        raise WorkloadError(
            f"tp {w.tp} * pp {w.pp} * cp {w.cp} * dp {w.dp} are {w.devices} devices, and n says {w.n}",
            "make the sizes multiply to n, or leave n out",
            field="n",
            value=w.n,
        )
    if w.devices > w.cluster.n_devices:
        raise WorkloadError(
            f"the run has {w.devices} devices, and {w.cluster.name} has {w.cluster.n_devices}",
            f"take a cluster of at least {w.devices} devices",
            field="cluster",
            value=w.cluster.name,
        )
    if w.kv_heads > w.heads:
        raise WorkloadError(
            f"{w.kv_heads} key and value heads are more than {w.heads} query heads",
            f"give kv_heads from 1 to {w.heads}",
            field="kv_heads",
            value=w.kv_heads,
        )
    if w.pp > w.layers:
        raise WorkloadError(
            f"{w.layers} layers cannot be cut into {w.pp} pipeline stages",
            f"give pp from 1 to {w.layers}",
            field="pp",
            value=w.pp,
        )
    if not w.ffn and w.dense_layers:
        raise WorkloadError(
            f"{w.dense_layers} layers have an MLP, and ffn says that it has no width",
            "give ffn, or a moe without first_dense",
            field="ffn",
            value=w.ffn,
        )
    if w.ep > 1 and w.moe is None:
        raise WorkloadError(
            f"ep={w.ep} spreads experts, and there are none", "give moe, or ep=1", field="ep", value=w.ep
        )
    if w.moe is not None and w.ep > w.moe.experts:
        raise WorkloadError(
            f"ep={w.ep} ranks cannot share {w.moe.experts} experts",
            f"give ep from 1 to {w.moe.experts}",
            field="ep",
            value=w.ep,
        )
    if w.ep * w.expert_tp > w.devices // w.pp:
        raise WorkloadError(
            f"ep {w.ep} * etp {w.expert_tp} are more than the {w.devices // w.pp} devices of a pipeline stage",
            "make ep or etp smaller",
            field="ep",
            value=w.ep,
        )


def _whole(owner: object, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WorkloadError(
            f"{name}={value!r:.60} is no whole number of at least {least}",
            f"{type(owner).__name__} counts in whole things: give an int",
            field=name,
            value=value,
        )
