"""How long a step took, from whichever figure a source prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from emu.planner.closed import Workload
from emu.planner.closed.flops import attention_width, step_flops
from emu.planner.closed.params import n_params

from .contradictions import refuse_times
from .rows import RunRow
from .words import meaning

# The published peak that an MFU refers to, where a row does not say which.
_PEAK_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
# Figures that need no count of FLOPs to become seconds.
_CLOCKS = ("iter_time_s", "iter_time_s_derived", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_gpu_s")


class Timed(NamedTuple):
    """Seconds of a step, the printed figure that they come from, and what was assumed to get them."""

    seconds: float
    of: str
    assumed: tuple[str, ...] = ()


def measured_step(row: RunRow, workload: Workload) -> Timed | None:
    """The measured time of a row's step: of the first figure it has, nearest to a clock first; None without any.

    Rates of tokens and samples are by the batch; rates of FLOPs by what the source counts (`flops_convention`).

    Raises:
        Unclear: two of them that count the same thing differ.
    """
    figures = list(_figures(row, workload))
    refuse_times([(timed.of, timed.seconds) for timed in figures if timed.of in _CLOCKS])
    return figures[0] if figures else None


def _figures(row: RunRow, workload: Workload) -> Iterator[Timed]:
    m, sequences = row.measured, workload.global_batch
    devices, tokens = workload.devices, workload.global_batch * workload.seq
    for name in ("iter_time_s", "iter_time_s_derived"):
        if (seconds := getattr(m, name)) is not None:
            yield Timed(seconds, name)
    if m.tokens_per_s is not None:
        yield Timed(tokens / m.tokens_per_s, "tokens_per_s")
    if m.tokens_per_s_per_gpu is not None:
        yield Timed(tokens / devices / m.tokens_per_s_per_gpu, "tokens_per_s_per_gpu")
    if m.samples_per_gpu_s is not None:
        yield Timed(sequences / devices / m.samples_per_gpu_s, "samples_per_gpu_s")
    if m.tflops_per_gpu is not None:
        yield _by_flops(row, workload, m.tflops_per_gpu * 1e12 * devices, "tflops_per_gpu")
    if m.aggregate_pflops is not None:
        yield _by_flops(row, workload, m.aggregate_pflops * 1e15, "aggregate_pflops")
    for name in ("mfu", "hfu"):
        if (share := getattr(m, name)) is not None:
            peak, assumed = _peak(row, workload)
            timed = _by_flops(row, workload, share * peak * devices, name)
            yield timed._replace(assumed=(*timed.assumed, *assumed))


def _by_flops(row: RunRow, workload: Workload, flops_per_s: float, of: str) -> Timed:
    counted = "recomputed" if of == "hfu" else meaning("flops", row.flops_convention)
    assumed = () if counted else ("FLOPs: of the model, every pair of a query and a key counted",)
    return Timed(counted_flops(workload, counted or "full") / flops_per_s, of, assumed)


def counted_flops(workload: Workload, convention: str) -> float:
    """FLOPs of a step on all devices as a source counts them.

    Args:
        convention: "full" (of the model, every pair of a query and a key), "causal" (half of the pairs), "recomputed"
            (full, and what is computed again), "parameters" (6 N a token and full attention, PaLM's,
            https://arxiv.org/abs/2204.02311, appendix B).
    """
    if convention == "parameters":
        tokens = workload.global_batch * workload.seq
        attended = 12 * workload.layers * workload.heads * attention_width(workload) * workload.seq
        return tokens * (6 * n_params(workload) + attended)
    pairs = "causal half" if convention == "causal" else "full"
    return step_flops(workload, pairs, recomputed=convention == "recomputed")


def _peak(row: RunRow, workload: Workload) -> tuple[float, tuple[str, ...]]:
    """FLOP/s of one device that a share refers to."""
    if row.peak_tflops is not None:
        return row.peak_tflops * 1e12, ()
    peak = workload.cluster.chip.peak(_PEAK_DTYPE[workload.precision])
    return peak, (f"peak of {peak / 1e12:.0f} TFLOP/s",)
