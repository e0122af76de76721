"""How long a kernel of a trace runs on a chip: what the price list says of it.

An adapter: it reads kind, shape and pass from the record of a kernel (`Kernel.name`, `dims`, `phase`).
"""

from __future__ import annotations

from emu.cost.prices import attention_s, matmul_flops_per_s
from emu.hardware import Chip
from emu.trace.events import Kernel

# Of torch's own backward pass, emu counts four products (twice the forward pass, as formulas do), but five are computed:
# the scores again (arXiv 2307.08691, algorithm 2).
_COMPUTED_BACKWARD = 5 / 4
_LONG, _HEAD = 8192, 128  # of attention whose record has no dims: assumed


def is_attention(kernel: Kernel) -> bool:
    """True for fused attention: its two products run on tensor cores although no one matrix product describes it."""
    return "attention" in kernel.name


def is_model_work(kernel: Kernel) -> bool:
    """True for the kernels whose work counts in MFU: matrix products and fused attention."""
    return bool(kernel.dims) or is_attention(kernel)


def kernel_s(kernel: Kernel, chip: Chip) -> float:
    """Seconds that a kernel runs on the device (what the host spends to launch it not included).

    The slower of its arithmetic and its memory traffic, by the roofline of Williams, Waterman and Patterson 2009 (doi
    10.1145/1498765.1498785), and what every kernel costs.

    * Matrix products (with dims): at the rate that their largest product's shape keeps up on the matrix units.
    * Fused attention: FlashAttention-2, which is what torch runs; cuDNN's where the name says so.
    * All others: at the peak of the ordinary cores, in float64 or float32; 16-bit floats are computed in float32, as
      aten's elementwise kernels do (`at::opmath_type`). Hardly any of them is bound by it.

    Raises:
        HardwareError: the chip cannot compute in the kernel's dtype.
    """
    if is_attention(kernel) and all(kernel.dims):  # over no keys at all it only writes
        return _attention_s(kernel, chip)
    memory_s = kernel.bytes / chip.memory_bytes_per_s
    compute_s = kernel.flops / _flops_per_s(kernel, chip) if kernel.flops else 0.0
    return max(compute_s, memory_s) + chip.kernel_s


def _flops_per_s(kernel: Kernel, chip: Chip) -> float:
    """The rate that the arithmetic of a kernel other than attention reaches if memory keeps up, FLOP/s."""
    if not kernel.dims:
        return chip.peak("float64" if kernel.dtype == "float64" else "float32")
    batch, m, n, k = kernel.dims
    return matmul_flops_per_s(chip, kernel.dtype, m, n, k, batch)


def _attention_s(kernel: Kernel, chip: Chip) -> float:
    """Its scores are the product [queries, head] x [head, keys]; of a backward pass the largest product may be another."""
    batch, queries, *rest = kernel.dims or (1, _LONG, _LONG, _HEAD)
    seq, head_dim = max(rest), min(rest)
    backward = "backward" in kernel.name
    own = "scaled_dot_product" in kernel.name  # torch's, not a program's rank.kernel(...), whose flops are as computed
    counted = (8 if backward else 4) * batch * queries * seq * head_dim
    return attention_s(
        chip,
        "flash3" if "cudnn" in kernel.name else "flash2",
        kernel.flops * (_COMPUTED_BACKWARD if own and backward else 1.0),
        seq,
        head_dim,
        backward=backward or kernel.phase == "backward",
        dtype=kernel.dtype,
        bytes_=kernel.bytes,
        causal=kernel.flops < counted,
    )
