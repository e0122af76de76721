"""A memory picture adds up to what the device holds."""

import numpy as np
import pytest
import torch

import emu
from emu.trace.events import Alloc, Kernel
from emu.view import memory_figure, png_bytes
from emu.view.memory import stacked_steps


def areas(figure, panel=0):
    """label -> (x, bottom, top) of each stacked area, by the corners of its steps."""
    out = {}
    for area in figure.axes[panel].collections:
        out[area.get_label()] = area.get_paths()[0].vertices
    return out


def held(trace, rank):
    """Bytes alive after each event, counted anew and without categories."""
    now, totals = 0, []
    for event in trace.events[rank]:
        kind = type(event).__name__
        now += event.bytes if kind == "Alloc" else -event.bytes if kind == "Free" else 0
        totals.append(now)
    return np.array(totals)


def outline(figure, panel=0):
    line = figure.axes[panel].lines[0]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_areas_add_up_to_the_bytes_held_at_every_event(make):
    trace = make.training_step()
    events, sizes, _ = stacked_steps(make.Memory(trace), 1)
    assert (sizes.sum(axis=0) == held(trace, 1)[events]).all()
    x, y = outline(memory_figure(make.Memory(trace), rank=1))
    assert y[:-1] * 1e9 == pytest.approx(held(trace, 1)[x[:-1].astype(int)])


def test_a_block_that_is_left_out_would_be_noticed(make):
    trace = make.training_step()
    cut = [event for event in trace.events[1] if not (isinstance(event, Alloc) and event.category == "gradients")]
    _, sizes, _ = stacked_steps(make.Memory(make.Trace({"dp": 1}, {1: cut})), 1)
    assert sizes.sum(axis=0).max() != held(trace, 1).max()


def test_the_topmost_area_reaches_the_peak_and_the_lowest_stands_on_zero(make):
    trace = make.training_step()
    drawn = areas(memory_figure(make.Memory(trace), rank=0))
    assert list(drawn) == ["parameters", "optimizer", "gradients", "communication", "activations", "temporary"]
    assert max(vertices[:, 1].max() for vertices in drawn.values()) * 1e9 == pytest.approx(held(trace, 0).max())
    assert drawn["parameters"][:, 1].min() == 0


def test_the_rank_with_the_highest_peak_is_shown_and_its_peak_written(make):
    figure = memory_figure(make.Memory(make.training_step(), 80 * 10**9))
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "memory of rank 1, the highest peak of 8 ranks"
    assert "peak 8.77 GB" in [text.get_text() for text in axes.texts]
    assert axes.get_ylabel() == "memory (GB)"


def test_capacity_is_a_line_in_sight_and_a_note_out_of_sight(make):
    trace = make.training_step()
    near = memory_figure(make.Memory(trace, 10 * 10**9)).axes[0]
    far = memory_figure(make.Memory(trace, 80 * 10**9)).axes[0]
    assert "capacity 10.0 GB" in [text.get_text() for text in near.texts]
    assert [10.0, 10.0] in [list(line.get_ydata()) for line in near.lines]
    assert far.get_title(loc="right") == "capacity 80.0 GB: the peak takes 11.0 % of it"
    assert near.get_ylim()[1] > 10 and far.get_ylim()[1] < 20


def test_over_a_timeline_the_axis_is_the_host_s_time(make):
    timeline = make.priced()
    figure = memory_figure(make.Memory(timeline.trace), rank=0, timeline=timeline)
    assert figure.axes[0].get_xlabel().startswith("time of the host (µs)")
    x, _ = outline(figure)
    events, _ = make.Memory(timeline.trace).series(0)
    assert x[:-1] == pytest.approx(np.asarray(timeline.event_times(0))[events] * 1e6)


def test_several_ranks_are_panels_of_one_scale(make):
    figure = memory_figure(make.Memory(make.training_step()), rank=[0, 1])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["memory of rank 0", "memory of rank 1"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_long_traces_keep_their_peak(make):
    trace = make.training_step(1, layers=3000, tokens=64)
    events, sizes, _ = stacked_steps(make.Memory(trace), 0, steps=300)
    assert len(events) <= 300
    assert sizes.sum(axis=0).max() == held(trace, 0).max()
    png_bytes(memory_figure(make.Memory(trace)))


@pytest.mark.parametrize("events", [{}, {0: []}, {0: [Kernel("mm", "", "", 1, 1, "float32", (), "main")]}])
def test_nothing_allocated_is_drawn_as_nothing(make, events):
    figure = memory_figure(make.Memory(make.Trace({"dp": 1}, events), 80 * 10**9))
    assert "nothing was allocated" in [text.get_text() for text in figure.axes[0].texts]
    png_bytes(figure)


def test_ranks_that_are_not_there_or_too_many_are_refused(make):
    memory = make.Memory(make.training_step(16, layers=1))
    with pytest.raises(ValueError, match="no memory of rank 20"):
        memory_figure(memory, rank=20)
    with pytest.raises(ValueError, match="name at most 8"):
        memory_figure(memory, rank=list(range(9)))


def test_only_some_categories_may_be_drawn():
    def program(rank):
        kept = torch.zeros(1000)
        rank.account(kept, "gradients")
        more = torch.zeros(500)
        rank.account(more, "parameters")
        return kept, more, torch.zeros(2000)

    memory = emu.launch(program, emu.Mesh(dp=1)).memory
    every, some = memory_figure(memory), memory_figure(memory, only=("gradients",))
    names = [[t.get_text() for t in figure.legends[0].get_texts()] for figure in (every, some)]
    assert set(names[0]) > {"parameters", "gradients"} and names[1] == ["gradients"]
    assert "4.00 kB" in " ".join(t.get_text() for t in some.axes[0].texts)
