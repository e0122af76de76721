"""What a run's parts print: a few lines in units for people, and errors that name what there is."""

import pytest
import torch

import emu
from emu.trace.events import Alloc, Kernel, Mark
from emu.trace.memory import Memory
from emu.trace.trace import Trace, UnknownRank


def program(rank):
    x = torch.ones(64, 64) @ torch.ones(64, 64)
    rank.mark("step")
    if rank == 1:
        torch.ones(1000, 1000) + 1
    return rank.group("dp").all_reduce(x)


@pytest.fixture(scope="module")
def run():
    return emu.launch(program, emu.Mesh(dp=2))


@pytest.mark.parametrize(
    ("part", "most_lines", "says"),
    [
        ("trace", 1, ("dp=2", "2 ranks", "events", "kernels", "2 collectives")),
        ("timeline", 1, ("µs on h100-8", "launched eager", "2 ranks")),
        ("memory", 1, ("of 80.0 GB on rank 1, the fullest of 2", "MB", "activations")),
        ("metrics", 3, ("step ", "MFU", "in float32", "exposed", "sent: dp 16.4 kB", "peak memory", "MB")),
    ],
)
def test_parts_of_a_run_print_a_few_lines_in_human_units(run, part, most_lines, says):
    text = str(run.timeline() if part == "timeline" else getattr(run, part))
    assert len(text.splitlines()) <= most_lines and max(map(len, text.splitlines())) <= 160, text
    assert all(word in text for word in says), text


def test_what_a_record_prints_does_not_grow_with_it():
    def trace(n):
        return Trace({"dp": 1}, {0: [Kernel("mm", "", "forward", 8, 8, "float32", (), "main")] * n})

    assert str(trace(1)) == "Trace(dp=1, 1 rank, 1 event, among them 1 kernel)"
    assert str(trace(12345)) == "Trace(dp=1, 1 rank, 12,345 events, among them 12,345 kernels)"
    assert str(Trace({}, {})) == "Trace(one device, 0 ranks, 0 events)"
    assert str(Memory(Trace({}, {}))) == "Memory(of no rank)"
    assert "nothing was allocated" in str(Memory(trace(1)))


def test_without_a_rank_the_peak_is_of_the_fullest():
    events = {r: [Alloc(0, size, "parameters", "main")] for r, size in ((3, 10), (5, 30), (6, 30))}
    memory = Memory(Trace({"dp": 8}, events))
    assert memory.fullest_rank == 5 and memory.peak_bytes() == 30 and memory.peak_bytes(3) == 10
    assert memory.at_peak() == memory.at_peak(5) != memory.at_peak(3)


def test_a_rank_that_is_not_there_is_told_with_those_that_are(run):
    for ask in (
        lambda: run.memory.at_peak(9),
        lambda: run.memory.peak_bytes(9),
        lambda: run.trace[9],
        lambda: run.trace.flops(9),
        lambda: run.timeline().event_times(9),
        lambda: run.timeline().marks(9),
    ):
        with pytest.raises(UnknownRank, match=r"^there is no record of rank 9\n  hint: name one of the ranks 0, 1$"):
            ask()
    many = Trace({}, {rank: [Mark("a")] for rank in range(8)})
    with pytest.raises(UnknownRank, match="ranks 0 to 7") as error:
        many[-1]
    assert error.value.ranks == list(range(8)) and error.value.rank == -1
    assert run.memory.at_peak(1) and run.trace.flops(0) and run.timeline().marks(0)  # those that are there


def test_memory_that_nobody_recorded_is_not_zero(run, tmp_path):
    bare = emu.launch(program, emu.Mesh(dp=2), track=False)
    for part in (bare, bare.window("step"), bare.without("dp.*")):
        assert not part.has_memory and part.metrics.peak_hbm_bytes is None
        assert "peak memory was not recorded" in str(part.metrics)
        with pytest.raises(emu.EmuError, match=r"was not tracked.*not recorded\n.*track=True"):
            _ = part.memory
    bare.save(tmp_path / "bare")
    assert not emu.Run.load(tmp_path / "bare").has_memory
    assert "memory over time" not in bare._repr_html_() and "peak memory" not in bare._repr_html_()
    assert bare.timeline().metrics().peak_hbm_bytes is None
    run.save(tmp_path / "run")
    loaded = emu.Run.load(tmp_path / "run")
    assert loaded.has_memory and loaded.metrics.peak_hbm_bytes == run.metrics.peak_hbm_bytes
    assert min(run.metrics.peak_hbm_bytes) > 0 and "memory over time" in run._repr_html_()
