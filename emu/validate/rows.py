"""One line of a file of cases: a measured run, an analytic row, or a measured collective.

The form is that of the packaged files (data/*.jsonl): one JSON object a line, sizes in bytes, times in seconds,
fractions in 0-1. A field that is missing or null was not stated. A number of the wrong kind is refused, never repaired:
a text that holds a number is a text, and true is not 1. A field that nobody knows is kept aside and reported, because
sources print more than anybody reads; so a slip in a field's name shows in the report. Nothing is evaluated.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

UNKNOWN_SOURCE = "source not stated"
MOST = 2**40  # no count of anything in a run is larger, and sums of products of counts stay exact and finite


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    if isinstance(value, str):
        raise ValueError("a text is not a number: write it without quotes")
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float) and math.isfinite(value):
        if value != int(value):
            raise ValueError(f"{value} is not a whole number")
        return int(value)
    return value


def _printable(value: Any) -> Any:
    if isinstance(value, str) and (control := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", value)):
        raise ValueError(f"a text has no control characters such as {control[0]!r}, which terminals obey")
    return value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MOST, strict=True)]
CountOrNone = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST, strict=True)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Text = Annotated[str, BeforeValidator(_printable), Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class _Said(BaseModel):
    """A JSON object: known fields by their kind, all others kept aside as they are."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


def _or_unknown(value: Any) -> Any:
    return UNKNOWN_SOURCE if value is None or value == "" else value


def _nothing_said(value: Any) -> Any:
    return {} if value is None else value


class Source(_Said):
    """Where a row was read."""

    title: Annotated[Text, BeforeValidator(_or_unknown)] = UNKNOWN_SOURCE
    section: Text | None = None
    url: Text | None = None


def _source(value: Any) -> Any:
    return {"title": value} if isinstance(value, str) else _nothing_said(value)


class Experts(_Said):
    """A mixture of experts: how many, how many a token takes, how wide, how many are shared, how many layers have none."""

    experts: Count
    topk: Count
    moe_ffn: Count
    shared: CountOrNone | None = None
    first_dense: CountOrNone | None = None
    active_b: Positive | None = None
    attn: Text | None = None

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> Experts:
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk} experts a token, of {self.experts}")
        return self


class Model(_Said):
    """What was trained. Sizes in elements."""

    name: Text | None = None
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    vocab: Count | None = None
    params_b: Positive | None = None
    mlp: Text | None = None
    moe: Experts | None = None
    dims_from: Text | None = None


class Measured(_Said):
    """What a source printed of a run."""

    iter_time_s: Positive | None = None
    iter_time_s_derived: Positive | None = None
    tokens_per_s: Positive | None = None
    tokens_per_s_per_gpu: Positive | None = None
    samples_per_gpu_s: Positive | None = None
    samples_per_gpu_s_post_validation: Positive | None = None
    tflops_per_gpu: Positive | None = None
    tflops_per_gpu_best_without_cp: Positive | None = None
    aggregate_pflops: Positive | None = None
    days_for_300B_tokens: Positive | None = None
    mfu: Fraction | None = None
    hfu: Fraction | None = None
    mem_gb: Positive | None = None
    mem_gib: Positive | None = None
    oom: Flag | None = None
    bubble_theory: NotNegative | None = None
    layer_fwd_ms: Positive | None = None
    layer_bwd_ms: Positive | None = None
    layer_total_ms: Positive | None = None
    model_state_mem_gb: Positive | None = None


class RunRow(_Said):
    """A training run: what was trained, how it was cut, on what, and what was measured. "analytic" is a formula's value."""

    id: Text = ""
    kind: Literal["measured", "analytic"] = "measured"
    source: Annotated[Source, BeforeValidator(_source)] = Source()
    hardware: Text | None = None
    peak_tflops: Positive | None = None
    n_gpus: Count | None = None
    model: Annotated[Model, BeforeValidator(_nothing_said)] = Model()
    seq: Count | None = None
    precision: Text | None = None
    tp: Count | None = None
    sp: Flag | None = None
    cp: Count | None = None
    pp: Count | None = None
    vp: Count | None = None
    ep: Count | None = None
    etp: Count | None = None
    dp: Count | None = None
    zero_stage: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=3, strict=True)] | None = None
    fsdp: Flag | None = None
    hsdp_group: Count | None = None
    schedule: Text | None = None
    micro_batch: Count | None = None
    global_batch_seqs: Count | None = None
    global_batch_tokens: Count | None = None
    n_microbatches: Count | None = None
    recompute: Text | None = None
    measured: Annotated[Measured, BeforeValidator(_nothing_said)] = Measured()
    flops_convention: Text | None = None
    verification: Text | None = None
    notes: Text | None = None


class CollectiveRow(_Said):
    """A collective that somebody timed: bytes as nccl-tests counts them, bandwidth as bus bandwidth in 1e9 bytes/s."""

    id: Text = ""
    source: Text | None = None
    url: Text | None = None
    hardware: Text | None = None
    nodes: Count | None = None
    gpus: Count | None = None
    op: Text
    algo: Text | None = None
    bytes_: Count | None = Field(None, validation_alias=AliasChoices("bytes"))
    time_us: Positive | None = None
    busbw_GBps: Positive | None = None
    busbw_check: Positive | None = None
    avg_busbw_GBps: Positive | None = None
    gbps_1chunk: Positive | None = None
    gbps_1000chunks: Positive | None = None
    p2p_GBps: Positive | None = None
    dp_allreduce_TBps: Positive | None = None
    note: Text | None = None
    verification: Text | None = None


Row = RunRow | CollectiveRow


def unknown_fields(row: BaseModel, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of the fields of a row that nobody reads."""
    found = [f"{prefix}{name}" for name in row.model_extra or {}]
    for name in type(row).model_fields:
        value = getattr(row, name)
        if isinstance(value, BaseModel):
            found += unknown_fields(value, f"{prefix}{name}.")
    return tuple(found)
