"""Fused attention: shares of the peak that published kernels reach, by kernel, direction, length and head size.

The scores never leave the cores, so neither tiles of a product nor bytes of scores say how long it takes: curves of
the papers do. FlashAttention-2: arXiv 2307.08691; FlashAttention-3 (cuDNN is as fast): arXiv 2407.08608.
"""

from __future__ import annotations

from emu.hardware import Chip, HardwareError
from emu.hardware.assumed import attention_over_product

KINDS = ("flash1", "flash2", "flash3")

# Share of a head of 128's rate: with smaller heads, softmax's exponentials weigh more against the products.
# 64 against 128 in figures 5 and 6 of arXiv 2407.08608 and figure 4 of 2307.08691; others assumed.
_SMALL_HEAD = 0.8
_ODD_HEAD = 0.9
_BLOCK = 128  # keys of a block: assumed, as of FlashAttention's kernels for heads of 128


def attention_s(
    chip: Chip,
    kind: str,
    flops: float,
    seq: float,
    head_dim: float,
    *,
    backward: bool = False,
    dtype: str = "bfloat16",
    bytes_: float = 0.0,
    causal: bool = True,
) -> float:
    """Seconds of a fused attention kernel.

    Args:
        chip: that it runs on.
        kind: "flash1", "flash2" or "flash3" (which cuDNN's counts as); on a chip that has no such kernel, the newest
            older one that it has, else the oldest.
        flops: of the products that it computes: two forward, five backward (scores are computed again); half of each if
            causal.
        seq: tokens of keys.
        head_dim: of one head.
        backward, dtype: which pass, in which dtype.
        bytes_: that it must read and write at least.
        causal: whether a query sees earlier keys only, half of them in the mean.

    Raises:
        HardwareError: there is no such kind, or the chip cannot compute in the dtype.
    """
    rate = attention_flops_per_s(chip, kind, seq, head_dim, backward=backward, dtype=dtype, causal=causal)
    return max(flops / rate, bytes_ / chip.memory_bytes_per_s) + chip.kernel_s


def attention_flops_per_s(
    chip: Chip,
    kind: str,
    seq: float,
    head_dim: float,
    *,
    backward: bool = False,
    dtype: str = "bfloat16",
    causal: bool = True,
) -> float:
    """FLOP/s that fused attention reaches; arguments as of `attention_s`.

    A block of queries passes over its keys, and its start and end take a time of their own: as long as
    `chip.attention_seq` more keys would at the peak. A causal mask halves the keys, and half of the block on the
    diagonal is computed for nothing.
    """
    share = _share(chip, kind, backward)
    of_length = 1.0
    if chip.attention_seq:
        keys = seq / 2 if causal else seq
        ends = chip.attention_seq * share + (_BLOCK / 2 if causal else 0)
        of_length = keys / (keys + ends)
    return chip.peak(dtype) * share * _of_head(chip, head_dim) * of_length * chip.power_share


def _share(chip: Chip, kind: str, backward: bool) -> float:
    if kind not in KINDS:
        raise HardwareError(
            f'"{kind}" is not a kind of fused attention.', f"Known: {', '.join(KINDS)}.", field="kind", value=kind
        )
    of_pass = ".backward" if backward else ""
    older_first = KINDS[: KINDS.index(kind) + 1][::-1] + KINDS
    name = next((k + of_pass for k in older_first if k + of_pass in chip.attention), None)
    if name is None:  # a chip that nobody says more of
        return chip.flops_per_s("bfloat16") / chip.peak("bfloat16") * attention_over_product(backward)
    return chip.attention[name]


def _of_head(chip: Chip, head_dim: float) -> float:
    if chip.array_side or head_dim in (128, 256):
        return 1.0
    return _ODD_HEAD if head_dim > 64 else _SMALL_HEAD
