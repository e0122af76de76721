"""A chip on which a toy model behaves as a real model does on the real chip.

A toy on a real H100 is all launch time, and nothing of a large run can be learned from it. So shrink the chip with the
model.

The law. Both models are described by n_params N, width h and tokens T (what one device computes on at once: sequence
length times micro-batch). Their work is matrix products [T, h] x [h, h]; small letters (n, h', t) are the toy's:

    flops of one product     2 T h^2                       k_flops = t h'^2 / (T h^2)
    HBM bytes of one         e (2 T h + h^2)               k_bytes = (2 t h' + h'^2) / (2 T h + h^2)
    gradients of one         e h^2                         k_link  = h'^2 / h^2      communication="gradients"
    activations of one       e T h                         k_link  = t h' / (T h)    communication="activations"
    parameters of all        N                             k_hbm   = n / N

Scale FLOP/s by k_flops, HBM bandwidth by k_bytes, link bandwidth by k_link, HBM capacity by k_hbm, the host link as
links that carry activations, and leave every time
alone (launch, shortest kernel, latency of a step). Then one product lasts, from either side of the roofline, exactly as
long as the real one does on the real chip: k_flops cancels in flops / rate and k_bytes in bytes / bandwidth. As all
durations are the real ones, so are all ratios:

    arithmetic intensity   (flops / bytes) / (FLOP/s / bytes/s)  is the same, so is the regime: compute or memory bound
    link to compute        (bytes sent / link bandwidth) / (flops / FLOP/s)  is the same
    launch to kernel       launch_s / kernel duration  is the same, since both are
    capacity               16 n / hbm_bytes  is the same

What no scaling can keep. Gradients grow with h^2 and activations with T h, so data and tensor parallelism both keep
their ratio only if t / T = h' / h; then elementwise kernels (bytes in T h) and activation memory (T h a layer) keep
theirs too. Otherwise choose by `communication`, and expect elementwise kernels to be off by (t h' / T h) / k_bytes,
which is `Scale.elementwise`. Tiles and waves do not scale: a toy's product would fill a small part of one core. So a
similar chip knows none, nor attention's ends: its products lose nothing where the real ones lose some. Nor does
attention's T^2 scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .chips import Chip
from .errors import HardwareError
from .links import HostLink, Link

if TYPE_CHECKING:
    from .clusters import Cluster

_SCALED_IN_LINKS = ("bandwidth_bytes_per_s", "calibrated_bytes_per_s", "cap_bytes_per_s", "fill_bytes")
COMMUNICATION = ("gradients", "activations")


@dataclass(frozen=True)
class Workload:
    """A model as the law sees it. Any object with these three attributes will do in its place.

    Args:
        n_params: parameters in all.
        width: hidden size.
        tokens: tokens that one device computes on at once (sequence length times micro-batch).
    """

    n_params: float
    width: float
    tokens: float


@dataclass(frozen=True)
class Scale:
    """Factors from the real chip to the similar one, by the law above, and how true elementwise kernels stay.

    activations: of the bytes of one activation, with which the host link scales.
    elementwise: duration of an elementwise kernel of the toy over the real one's; 1 if the toy keeps tokens over width.
    """

    flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    hbm_bytes: float
    activations: float
    elementwise: float


def scale_between(model: Any, to: Any, communication: str = "gradients") -> Scale:
    """The factors that take the real chip of `to` to the similar chip for `model`.

    Raises HardwareError if either lacks n_params, width or tokens, or has one that is not a positive number.
    """
    if communication not in COMMUNICATION:
        raise HardwareError(
            f'communication="{communication}" is not a kind of traffic.',
            'Say "gradients" (data parallelism keeps its ratio) or "activations" (tensor parallelism does).',
            field="communication",
            value=communication,
        )
    n, h, t = (_positive(model, "model", name) for name in ("n_params", "width", "tokens"))
    n_real, h_real, t_real = (_positive(to, "to", name) for name in ("n_params", "width", "tokens"))
    activations = t * h / (t_real * h_real)
    hbm_bytes_per_s = (2 * t * h + h * h) / (2 * t_real * h_real + h_real * h_real)
    return Scale(
        flops=t * h * h / (t_real * h_real * h_real),
        hbm_bytes_per_s=hbm_bytes_per_s,
        link_bytes_per_s=(h / h_real) ** 2 if communication == "gradients" else activations,
        hbm_bytes=n / n_real,
        activations=activations,
        elementwise=activations / hbm_bytes_per_s,
    )


def scaled_chip(chip: Chip, scale: Scale) -> Chip:
    """The chip with its rates and capacity scaled, its times, cores and power left alone, and no tiles."""
    if chip.hbm_bytes * scale.hbm_bytes < 1:
        raise HardwareError(
            f"Scaled by {scale.hbm_bytes:.3g}, {chip.name} has less than one byte of memory.",
            "Take a larger toy or a smaller real model.",
            field="hbm_bytes",
            value=chip.hbm_bytes * scale.hbm_bytes,
        )
    factors = {
        "peak_flops": scale.flops,
        "achievable_flops": scale.flops,
        "calibrated_flops": scale.flops,
        "vector_flops": scale.flops,
        "hbm_bytes": scale.hbm_bytes,
        "hbm_bytes_per_s": scale.hbm_bytes_per_s,
        "calibrated_hbm_bytes_per_s": scale.hbm_bytes_per_s,
        "l2_bytes": scale.hbm_bytes_per_s,  # the same share of a kernel's bytes stays in the cache
    }
    calibrated = chip.calibrated_hbm_bytes_per_s
    same = scale.flops == scale.activations == 1
    return replace(
        chip,
        name=f"{chip.name} (similar)",
        peak_flops={d: rate * scale.flops for d, rate in chip.peak_flops.items()},
        achievable_flops={d: rate * scale.flops for d, rate in chip.achievable_flops.items()},
        calibrated_flops={d: rate * scale.flops for d, rate in chip.calibrated_flops.items()},
        vector_flops={d: rate * scale.flops for d, rate in chip.vector_flops.items()},
        hbm_bytes=round(chip.hbm_bytes * scale.hbm_bytes),
        hbm_bytes_per_s=chip.hbm_bytes_per_s * scale.hbm_bytes_per_s,
        calibrated_hbm_bytes_per_s=None if calibrated is None else calibrated * scale.hbm_bytes_per_s,
        l2_bytes=None if chip.l2_bytes is None else max(1, round(chip.l2_bytes * scale.hbm_bytes_per_s)),
        tiled=chip.tiled and same,
        matmul_ends=chip.matmul_ends if same else 0.0,
        array_side=chip.array_side if same else None,
        attention_seq=chip.attention_seq if same else 0.0,
        sources=_scaled_sources(chip.sources, factors),
    )


def scaled_link(link: Link, scale: Scale) -> Link:
    """The link with its bandwidth scaled and its latencies left alone."""
    k = scale.link_bytes_per_s
    calibrated = link.calibrated_bytes_per_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * k,
        calibrated_bytes_per_s=None if calibrated is None else calibrated * k,
        fill_bytes=None if link.fill_bytes is None else link.fill_bytes * k,
        protocols=tuple(
            p if p.cap_bytes_per_s is None else replace(p, cap_bytes_per_s=p.cap_bytes_per_s * k)
            for p in link.protocols
        ),
        sources=_scaled_sources(link.sources, dict.fromkeys(_SCALED_IN_LINKS, k)),
    )


def scaled_host_link(link: HostLink, scale: Scale) -> HostLink:
    """The same for a host link: what travels over it are activations, whatever the links between devices carry."""
    k, calibrated = scale.activations, link.calibrated_bytes_per_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * k,
        calibrated_bytes_per_s=None if calibrated is None else calibrated * k,
        sources=_scaled_sources(link.sources, dict.fromkeys(_SCALED_IN_LINKS, k)),
    )


def scaled_cluster(cluster: Cluster, scale: Scale) -> Cluster:
    """The cluster with chip and links scaled. The host stays as it is, as kernels last as long as the real ones."""
    return replace(
        cluster,
        name=f"{cluster.name} (similar)",
        chip=scaled_chip(cluster.chip, scale),
        node=replace(
            cluster.node,
            scale_up=scaled_link(cluster.node.scale_up, scale),
            host_link=cluster.node.host_link and scaled_host_link(cluster.node.host_link, scale),
        ),
        scale_out=scaled_link(cluster.scale_out, scale),
    )


def _scaled_sources(sources, factors: dict[str, float]) -> dict[str, str]:
    def scaled(name: str, source: str) -> str:
        factor = factors.get(name.split(".")[0], factors.get(name.split(".")[-1]))
        return source if factor is None else f"{source}; times {factor:.3g} for a similar chip"

    return {name: scaled(name, source) for name, source in sources.items()}


def _positive(workload: Any, role: str, name: str) -> float:
    value: Any = getattr(workload, name, None)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not good:
        what = "is missing" if value is None else f"is {value!r}"
        raise HardwareError(
            f"similar(model, to=real) needs {role}.{name}, a positive number: it {what}.",
            "Describe both models, e.g. emu.hardware.Workload(n_params=8.03e9, width=4096, tokens=8192).",
            field=f"{role}.{name}",
            value=value,
        )
    return float(value)
