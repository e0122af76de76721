"""HolisticTraceAnalysis reads our files, and finds the idle, compute and overlap times that the timeline has."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from hta.trace_analysis import TraceAnalysis

import emu
from emu.cost import price
from emu.cost.timeline import Timeline
from emu.export import chrome_json_by_rank, write_folder
from emu.models import GPT, Config
from emu.parallel import Plan
from emu.simulation import simulate
from emu.trace.events import HostCopy, Kernel
from emu.trace.trace import Trace

from .exported import TOY, covered

SHAPE = Config(layers=1, width=16, heads=2, ffn=32, vocab=11, seq=8)


def train(rank):
    """Two steps, each begun by a mark."""
    import torch

    g = torch.Generator().manual_seed(3)
    batch = emu.Batch(*(torch.randint(0, SHAPE.vocab, (4, SHAPE.seq), generator=g) for _ in "xy"))
    ddp = emu.DataParallel(GPT(SHAPE, seed=0), rank, "dp")
    for step in range(2):
        rank.mark(f"step {step}")
        ddp.backward(batch)


def with_copies() -> Timeline:
    kernels = [Kernel("mm", "", "", 0, 10**8, "float32", (), stream) for stream in ("default", "side", "side")]
    copies = [HostCopy(kind, 1, 10**6, "float32", "d2h", "") for kind in ("to_host", "from_host")]
    return price(Trace({"dp": 1}, {0: [*kernels, *copies, *kernels]}), TOY)


TIMELINES = {
    "data parallel": lambda: emu.launch(train, emu.Mesh(dp=2)).timeline(),
    "tensor parallel": lambda: simulate("gpt-tiny", Plan("dp=2,tp=2", seq=32), "h100-8").timeline(),
    "sharded": lambda: simulate("gpt-tiny", Plan("dp=4", zero=3, seq=32, global_batch=4), "h100-8").timeline(),
    "copies beside kernels": with_copies,
}


def read(timeline: Timeline, folder: Path) -> Any:
    logging.disable(logging.WARNING)
    try:
        write_folder(folder, chrome_json_by_rank(timeline))
        files = {rank: str(folder / f"rank_{rank}.json") for rank in timeline.trace.ranks}
        return TraceAnalysis(trace_files=files)
    finally:
        logging.disable(logging.NOTSET)


def ours(timeline: Timeline, rank: int) -> dict[str, float]:
    """By its definitions: idle and compute are of the time from the first kernel to the last; microseconds."""
    spans = timeline.spans[rank]
    of = {
        kind: [(1e6 * s.start_s, 1e6 * s.end_s) for s in spans if s.kind in kind]
        for kind in ("kernel", "collective transfer")
    }
    everything = [(1e6 * s.start_s, 1e6 * s.end_s) for s in spans]
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    running, talking = covered(of["kernel"]), covered(of["collective transfer"])
    both = running + talking - covered([*of["kernel"], *of["collective transfer"]])
    return {"kernel": whole, "idle": whole - covered(everything), "compute": running, "talking": talking, "both": both}


@pytest.mark.parametrize("name", TIMELINES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_its_idle_compute_and_overlap_times_are_ours_within_rounding(name, tmp_path):
    timeline = TIMELINES[name]()
    analysis = read(timeline, tmp_path / "files")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
        overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    assert list(times.index) == list(overlap.index) == timeline.trace.ranks
    for rank in timeline.trace.ranks:
        true, n = ours(timeline, rank), len(timeline.spans[rank])  # each start and end is rounded to a microsecond
        assert times.loc[rank, "kernel_time(us)"] == pytest.approx(true["kernel"], abs=1)
        assert times.loc[rank, "idle_time(us)"] == pytest.approx(true["idle"], abs=n)
        assert times.loc[rank, "compute_time(us)"] == pytest.approx(true["compute"], abs=n)
        rest = true["kernel"] - true["idle"] - true["compute"]
        assert times.loc[rank, "non_compute_time(us)"] == pytest.approx(rest, abs=2 * n)
        if true["talking"]:
            share, near = true["both"] / true["talking"], 2 * n / true["talking"]
            assert overlap.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(100 * share, abs=100 * near + 0.01)


def test_another_timeline_has_other_times(tmp_path):
    """The negative control: figures that do not depend on the file would agree above, too."""
    found = []
    for name in ("sharded", "copies beside kernels"):
        times = read(TIMELINES[name](), tmp_path / name.replace(" ", "_")).get_temporal_breakdown(visualize=False)
        found.append(times.loc[0, "kernel_time(us)"])
    assert abs(found[0] - found[1]) > 10
