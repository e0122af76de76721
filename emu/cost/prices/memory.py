"""Kernels that only move bytes: norms, residuals, activations, copies."""

from __future__ import annotations

from emu.hardware import Chip


def memory_s(chip: Chip, bytes_: float, kernels: float = 1) -> float:
    """Seconds of so many kernels that together read and write so many bytes of device memory."""
    return bytes_ / chip.memory_bytes_per_s + kernels * chip.kernel_s
