"""What the host takes to launch a layer, and how that and the device's time join."""

from __future__ import annotations

from .prices import Prices
from .workload import Workload

# Kernels that eager PyTorch launches for a layer, forward: fused blocks; more where elementwise kernels are apart; more
# where attention is spelled out. Counted in traces of GPT layers of Megatron and torchtitan, from memory.
FUSED, APART, SPELLED_OUT = 14, 10, 8
BACKWARD = 1.7  # kernels of backward over forward's: assumed
WEIGHTS = 0.2  # of backward's kernels, those for gradients of weights: one a product, of 24 fused ones; assumed
CASTS = 2  # fp8: conversions for each of a rank's experts, assumed
# What a direction launches again, and recomputation's share of it. All and nothing by definition, others assumed.
AGAIN = {"none": 0.0, "full": 1.0, "every-other-layer": 0.5, "selective": 0.3, "per-op": 0.5}


def launches(w: Workload, prices: Prices, expert: bool) -> float:
    """Kernels of a layer, forward."""
    stack = prices.stack
    n = FUSED + (0 if stack.fused else APART) + (SPELLED_OUT if stack.attention == "unfused" else 0)
    if expert and w.moe is not None:
        casts = CASTS if w.precision == "fp8" else 1
        n += prices.software["software.expert_launches"] + 2 * w.moe.experts / w.ep * casts
    return n


def launch_s(w: Workload, prices: Prices) -> float:
    """Host seconds a kernel."""
    name = prices.stack.launch
    if name == "host":
        return prices.cluster.host.launch_s
    return prices.software[name] if name else 0.0


def host_s(w: Workload, prices: Prices, expert: bool) -> tuple[float, float]:
    """Host seconds of a layer, forward and backward."""
    forward = launches(w, prices, expert) * launch_s(w, prices)
    waiting = 2 * prices.software["software.wait_s"] * (w.tp - 1) if prices.stack.hosts_wait else 0.0
    return forward + waiting, BACKWARD * forward + waiting


def joined_s(device_s: float, host_s: float, power: float) -> float:
    """Time of work that host and device share: the longer of both if neither ever waited for the other."""
    if host_s <= 0 or device_s <= 0:
        return max(host_s, device_s)
    longer, shorter = max(device_s, host_s), min(device_s, host_s)
    return longer * (1 + (shorter / longer) ** power) ** (1 / power)
