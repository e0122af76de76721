"""The bubbles of a simulated step are those of the closed forms, where stages are alike and messages free."""

from __future__ import annotations

from dataclasses import replace

import pytest

import emu
from emu.models import Config
from emu.parallel import Plan
from emu.parallel.pipeline.schedules import make
from emu.simulation import simulate
from emu.view.pipeline_bars import measured_times, timed_run

# So large that embedding and head are little beside two layers, and attention so much that weights' gradients are least.
LARGE = Config(layers=8, width=2048, heads=16, vocab=64, seq=8192)
RANKS, MICROBATCHES = 4, 8


def free_messages() -> emu.Cluster:
    """A node in which messages take no time, and nothing from those who compute."""
    node = emu.cluster("h100-8")
    link = replace(node.node.scale_up, bandwidth_bytes_per_s=1e18, latency_s=0.0, base_s=0.0)
    return replace(node, node=replace(node.node, scale_up=link), chip=replace(node.chip, overlap_loss=0.0))


@pytest.mark.parametrize(
    ("schedule", "chunks", "within"),
    [("1f1b", 1, 0.03), ("gpipe", 1, 0.03), ("interleaved", 2, 0.08), ("zb-h1", 1, 0.03)],
)
def test_the_bubble_is_the_closed_form(schedule: str, chunks: int, within: float) -> None:
    """(p - 1) (t_f + t_b), over v with chunks (arXiv 2104.04473), and (p - 1) (T_F + T_B - T_W) (arXiv 2401.10241): idle time
    of a stage, as a share of the m (t_f + t_b) that it works. Embedding and head make the outer stages a little longer."""
    plan = Plan(
        f"pp={RANKS}", seq=LARGE.seq, global_batch=MICROBATCHES, microbatches=MICROBATCHES, schedule=schedule,
        chunks=chunks, launch_mode="graph",
    )  # fmt: skip
    run = simulate(LARGE, plan, free_messages())
    times = measured_times(timed_run(run.timeline()), make(schedule, RANKS, MICROBATCHES, chunks))
    middle = [each[len(each) // 2] * chunks for each in (times.forward, times.backward_input, times.weight)]  # type: ignore[index]
    forward, backward, weight = middle
    work = forward + backward + weight
    idle = (forward + backward - weight if schedule == "zb-h1" else work / chunks) * (RANKS - 1)
    ratio = idle / (MICROBATCHES * work)
    assert run.metrics.bubble_ratio == pytest.approx(ratio, rel=within)
    assert run.metrics.bubble_fraction == pytest.approx(ratio / (1 + ratio), rel=within)


def test_without_a_pipeline_there_is_no_bubble() -> None:
    run = simulate("gpt-tiny", Plan("dp=2"), "h100-8")
    assert (run.metrics.bubble_fraction, run.metrics.bubble_ratio) == (0.0, 0.0)
