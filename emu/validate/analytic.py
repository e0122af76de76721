"""Rows that hold a formula's value, not a measurement: model states by ZeRO's stages, computed again."""

from __future__ import annotations

from collections.abc import Iterable

from .cases import GB
from .reading import Line
from .rows import RunRow
from .score import Pair

PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes a parameter: fp16, fp16, and Adam's fp32 master copy and two moments


def model_state_bytes(parameters: float, dp: int, stage: int) -> float:
    """Bytes of parameters, gradients and optimizer states on one device.

    Args:
        parameters: of the model.
        dp: devices that ZeRO shards over.
        stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too.

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5 and table 1: K = 12.
    """
    whole = (PARAMETER if stage < 3 else 0) + (GRADIENT if stage < 2 else 0) + (OPTIMIZER if stage < 1 else 0)
    return parameters * (whole + (PARAMETER + GRADIENT + OPTIMIZER - whole) / dp)


def analytic_pairs(lines: Iterable[Line]) -> tuple[list[Pair], list[tuple[Line, str]]]:
    """Printed and computed model states of the analytic rows; and the rows that cannot be computed, with why."""
    found, unusable = [], []
    for line in lines:
        row = line.row
        if not isinstance(row, RunRow) or row.kind != "analytic":
            continue
        printed, billions, stage = row.measured.model_state_mem_gb, row.model.params_b, row.zero_stage
        if printed is None:
            unusable.append((line, "it holds no model_state_mem_gb, which is all that emu computes of analytic rows"))
        elif billions is None or stage is None or row.dp is None:
            unusable.append((line, "params_b, zero_stage and dp are needed, and one of them is not stated"))
        else:
            computed = model_state_bytes(billions * 1e9, row.dp, stage)
            found.append(Pair(row.id, printed * GB, computed, row.source.title))
    return found, unusable
