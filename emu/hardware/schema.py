"""What a cluster file may say, field by field. See emu.hardware.loading for the form of the file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if re.search(r"[KMGTP]i?b(?!i)", value):
        raise ValueError("a small b means bits, and this is in bytes (B)")
    if not re.search("[a-zA-Z]", value):
        raise ValueError("a size in quotes needs a unit")
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        raise ValueError("cannot be read as a size") from None


def _one_line(value: Any) -> Any:
    if isinstance(value, str) and not (value.strip() and value.isprintable()):
        raise ValueError("a name is one line of text and not empty")
    return value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
UpToTwo = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=2, allow_inf_nan=False, strict=True)]
Name = Annotated[str, BeforeValidator(_one_line)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, strict=True)]
Bytes = Annotated[
    float, BeforeValidator(_no_bool), BeforeValidator(_bytes), Field(ge=1, allow_inf_nan=False, strict=True)
]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sources: dict[str, str] = Field(default_factory=dict)


class _Rates(BaseModel):
    model_config = ConfigDict(extra="forbid")
    float64: Positive | None = None
    float32: Positive | None = None
    tf32: Positive | None = None
    float16: Positive | None = None
    bfloat16: Positive | None = None
    float8: Positive | None = None


class _Shares(BaseModel):
    model_config = ConfigDict(extra="forbid")
    float64: Fraction | None = None
    float32: Fraction | None = None
    tf32: Fraction | None = None
    float16: Fraction | None = None
    bfloat16: Fraction | None = None
    float8: Fraction | None = None


class _Attention(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    flash1: Fraction | None = None
    flash1_backward: Fraction | None = Field(default=None, alias="flash1.backward")
    flash2: Fraction | None = None
    flash2_backward: Fraction | None = Field(default=None, alias="flash2.backward")
    flash3: Fraction | None = None
    flash3_backward: Fraction | None = Field(default=None, alias="flash3.backward")


class ChipTable(_Table):
    name: Name
    peak_flops: _Rates
    hbm_bytes: Bytes
    hbm_bytes_per_s: Positive
    hbm_fraction: Fraction
    kernel_s: Positive
    achievable_flops: _Rates = _Rates()
    calibrated_flops: _Rates = _Rates()
    calibrated_hbm_bytes_per_s: Positive | None = None
    l2_bytes: Bytes | None = None
    sm_count: Count | None = None
    sm_bytes: Bytes | None = None
    register_bytes: Bytes | None = None
    vector_flops: _Rates = _Rates()
    year: Annotated[int, BeforeValidator(_no_bool), Field(ge=1950, le=2100, strict=True)] | None = None
    tdp_w: Positive | None = None
    sustained: _Shares = _Shares()
    tiled: Annotated[bool, Field(strict=True)] = False
    matmul_ends: NotNegative = 0.0
    array_side: Count | None = None
    attention: _Attention = _Attention()
    attention_seq: NotNegative = 0.0
    softmax_fraction: Fraction = 1.0
    overlap_loss: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1, allow_inf_nan=False, strict=True)] = 0.0
    power_limit_w: Positive | None = None
    power_exponent: NotNegative = 0.0
    fitted: list[str] = []


class ProtocolTable(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Name
    base_s: NotNegative
    latency_s: NotNegative
    tree_latency_s: NotNegative
    fraction: Fraction = 1.0
    cap_bytes_per_s: Positive | None = None


class LinkTable(_Table):
    name: Name = "link"
    bandwidth_bytes_per_s: Positive
    achievable_fraction: Fraction
    latency_s: NotNegative
    base_s: NotNegative = 0.0
    tree_latency_s: NotNegative | None = None
    protocols: list[ProtocolTable] = []
    in_switch_fraction: UpToTwo | None = None
    in_switch_latency_s: NotNegative | None = None
    launch_s: NotNegative | None = None
    fill_s: NotNegative | None = None
    fill_bytes: Bytes | None = None
    fitted: list[str] = []
    calibrated_bytes_per_s: Positive | None = None

    @model_validator(mode="after")
    def _tree_steps_like_ring(self):
        if self.tree_latency_s is None:
            self.tree_latency_s = self.latency_s
        return self


class HostLinkTable(_Table):
    name: Name = "host link"
    bandwidth_bytes_per_s: Positive
    achievable_fraction: Fraction
    latency_s: NotNegative
    calibrated_bytes_per_s: Positive | None = None


class ShapeTable(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: str
    sizes: list[Count]
    lanes: list[Count] = []


class NodeTable(_Table):
    devices_per_node: Count
    topology: str = ""
    scale_up: LinkTable
    host_link: HostLinkTable | None = None
    shape: ShapeTable | None = None
    ports: Count | None = None
    host_bytes: Bytes | None = None
    racks: Positive | None = None
    power_w: Positive | None = None


class HostTable(_Table):
    launch_s: Positive
    compiled_launch_s: Positive | None = None
    graph_launch_s: Positive | None = None

    @model_validator(mode="after")
    def _launch_alike(self):
        if self.compiled_launch_s is None:
            self.compiled_launch_s = self.launch_s
        if self.graph_launch_s is None:
            self.graph_launch_s = self.launch_s
        return self


class FabricTable(_Table):
    rack_devices: Count
    pod_devices: Count
    oversubscription: Annotated[float, BeforeValidator(_no_bool), Field(ge=1, allow_inf_nan=False, strict=True)]
    kind: Literal["fat tree", "rails"] = "fat tree"


class StorageTable(_Table):
    name: Name = "storage"
    capacity_bytes: Bytes
    bytes_per_s: Positive
    peak_bytes_per_s: Positive | None = None


class ClusterTable(_Table):
    name: Name
    chip: ChipTable
    nodes: Count = 1
    n_devices: Count | None = None
    node: NodeTable
    scale_out: LinkTable
    host: HostTable
    fabric: FabricTable | None = None
    storage: StorageTable | None = None
