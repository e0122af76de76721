"""Matrix products: the roofline with what tiles, waves and short k waste."""

from __future__ import annotations

from emu.cost.prices.tiles import padded_share, tiled_share
from emu.hardware import Chip

# Bytes of an element of an operand and of the result, by definition; float8 products write bfloat16.
_BYTES = {"float64": (8, 8), "float32": (4, 4), "tf32": (4, 4), "float8": (1, 2)}
_BYTES_OF_16_BITS = (2, 2)


def matmul_s(chip: Chip, dtype: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """Seconds of a product [m, k] x [k, n], batch times in one kernel.

    The slower of its arithmetic, at the rate that this shape keeps up, and its least memory traffic (every operand read
    and the result written once); and what every kernel costs. Nothing if a size is 0.

    Raises:
        HardwareError: the chip cannot compute in the dtype.
    """
    if m <= 0 or n <= 0 or k <= 0 or batch <= 0:
        return 0.0
    operand, result = _BYTES.get(dtype, _BYTES_OF_16_BITS)
    moved = batch * (operand * (m * k + k * n) + result * m * n)
    compute_s = 2.0 * batch * m * n * k / matmul_flops_per_s(chip, dtype, m, n, k, batch)
    return max(compute_s, moved / chip.memory_bytes_per_s) + chip.kernel_s


def matmul_flops_per_s(chip: Chip, dtype: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """FLOP/s that the arithmetic of a product of this shape reaches if memory keeps up; never above the chip's best.

    A wave of tiles is started, computed and written; the next does not hide all of that, so short k is slow: as if k
    were longer by what the cores could have computed while `chip.matmul_ends` of the wave was written to memory.

    Raises:
        HardwareError: the chip cannot compute in the dtype.
    """
    rate = chip.flops_per_s(dtype)
    if chip.tiled and chip.sm_count:
        result = _BYTES.get(dtype, _BYTES_OF_16_BITS)[1]
        ends_k = chip.matmul_ends * result / chip.memory_bytes_per_s * rate / 2
        return rate * tiled_share(batch, m, n, k, chip.sm_count, ends_k)
    if chip.array_side:
        return rate * padded_share(m, n, k, chip.array_side)
    return rate
