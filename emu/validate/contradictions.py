"""Rows that contradict themselves: two of their numbers cannot both be true, so neither may be priced in silence."""

from __future__ import annotations

from collections.abc import Sequence

from emu.planner.closed import Workload
from emu.planner.closed.params import n_params

from .rows import Measured, RunRow
from .words import Unclear

SAME = 0.02  # figures of one thing that are no further apart differ by what was rounded away
PARAMETERS = 0.15  # names round, and sources count embeddings or not: the most among packaged rows that agree is 10 %
GB, GIB = 1e9, 2**30


def refuse_batch(row: RunRow, dp: int, sequences: int) -> None:
    """A batch that dp ranks cannot share as the row says.

    Args:
        dp: data-parallel ranks.
        sequences: of a step.
    """
    if sequences < dp:
        raise Unclear(f"a batch of {sequences} sequences leaves some of dp {dp} ranks without any")
    if row.micro_batch is None:
        return
    if row.micro_batch * dp > sequences:
        raise Unclear(
            f"micro-batches of {row.micro_batch} on dp {dp} ranks are {row.micro_batch * dp} sequences, "
            f"and the batch has {sequences}"
        )
    each = -(-sequences // (row.micro_batch * dp))
    if row.n_microbatches is not None and row.n_microbatches != each:
        raise Unclear(
            f"{sequences} sequences are {each} micro-batches of {row.micro_batch} on each of dp {dp} ranks, "
            f"and n_microbatches says {row.n_microbatches}"
        )


def refuse_cut(row: RunRow, pp: int, dp: int) -> None:
    """Chunks without a pipeline, and copies of parameters that dp ranks cannot hold."""
    if pp == 1 and (row.vp or 1) > 1:
        raise Unclear(f"vp {row.vp} chunks are of a pipeline's stages, and pp is 1")
    if row.hsdp_group is not None and dp % row.hsdp_group:
        raise Unclear(f"groups of hsdp_group {row.hsdp_group} ranks do not divide dp {dp}")


def refuse_size(row: RunRow, workload: Workload) -> None:
    """Dimensions that do not make as many parameters as the row says; with experts, sources count them in many ways."""
    said = row.model.params_b
    if said is None or workload.moe is not None:
        return
    counted = n_params(workload) / 1e9
    if abs(counted / said - 1) > PARAMETERS:
        raise Unclear(f"the model's dimensions make {counted:.3g} billion parameters, and params_b says {said:.3g}")


def refuse_times(seconds: Sequence[tuple[str, float]]) -> None:
    """Times of one step that differ: of clocks and rates of tokens, which count the same thing.

    Args:
        seconds: each with the figure that it comes from.
    """
    for name, one in seconds[1:]:
        first, other = seconds[0]
        if abs(one - other) > SAME * max(one, other):
            raise Unclear(f"{first} says that a step takes {other:.4g} s, and {name} {one:.4g} s")


def refuse_memory(measured: Measured) -> None:
    """Memory in both units that is not the same."""
    if measured.mem_gb is None or measured.mem_gib is None:
        return
    gb, gib = measured.mem_gb * GB, measured.mem_gib * GIB
    if abs(gb - gib) > SAME * max(gb, gib):
        raise Unclear(f"mem_gb says {measured.mem_gb:g} GB, and mem_gib {measured.mem_gib:g} GiB")
