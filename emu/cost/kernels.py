"""How long a kernel runs on a chip: the roofline.

A first honest pricing. A kernel lasts as long as the slower of its arithmetic and its memory traffic, and never
less than the shortest kernel of the chip. What is left out, and makes small or oddly shaped products look faster
than they are: tile and wave quantisation (`Kernel.dims` holds what that needs).
"""

from __future__ import annotations

from emu.hardware import Chip
from emu.trace.events import Kernel

# Share of the peak that fused attention reaches. FlashAttention-2 is what torch runs: 0.72 of the peak on A100
# (arXiv 2307.08691), but only 0.37 on H100 (arXiv 2407.08608, figure 5: head dimension 128, no mask).
# Other chips are taken to be like H100, which is an assumption.
ATTENTION_FRACTION = {"A100": 0.72, "H100": 0.37}
ATTENTION_FRACTION_ELSEWHERE = 0.37


def is_attention(kernel: Kernel) -> bool:
    """True for fused attention: its two products run on tensor cores although no one matrix product describes it."""
    return "attention" in kernel.name


def is_model_work(kernel: Kernel) -> bool:
    """True for the kernels whose work counts in MFU: matrix products and fused attention."""
    return bool(kernel.dims) or is_attention(kernel)


def flops_per_s(kernel: Kernel, chip: Chip) -> float:
    """The rate that a kernel's arithmetic reaches if memory keeps up, FLOP/s.

    * Matrix products (with dims): what a large one reaches in that dtype (measured, MAMF, or a share of the peak: see
      `Chip.flops_per_s`), on tensor cores where the dtype has them.
    * Fused attention: a share of the same peak; see ATTENTION_FRACTION.
    * All others: the ordinary cores, in float64 or float32; 16-bit floats are computed in float32, as aten's
      elementwise kernels do (`at::opmath_type`). Their peak, unmeasured; hardly any of them is bound by it.

    Raises:
        HardwareError: the chip cannot compute in the dtype.
    """
    if is_attention(kernel):
        fraction = next((f for name, f in ATTENTION_FRACTION.items() if name in chip.name.upper()), None)
        return chip.peak(kernel.dtype) * (fraction or ATTENTION_FRACTION_ELSEWHERE)
    if kernel.dims:
        return chip.flops_per_s(kernel.dtype)
    return chip.peak("float64" if kernel.dtype == "float64" else "float32")


def kernel_s(kernel: Kernel, chip: Chip) -> float:
    """Seconds that a kernel runs on the device (what the host spends to launch it not included).

    Source: the roofline of Williams, Waterman and Patterson 2009 (doi 10.1145/1498765.1498785).

    Raises:
        HardwareError: the chip cannot compute in the kernel's dtype.
    """
    memory_s = kernel.bytes / chip.memory_bytes_per_s
    compute_s = kernel.flops / flops_per_s(kernel, chip) if kernel.flops else 0.0
    return max(compute_s, memory_s, chip.kernel_s)
