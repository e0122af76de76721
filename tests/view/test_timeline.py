"""A timeline picture shows what the trace and its prices say, no more and no less."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.trace.events import Kernel, Mark
from emu.view import png_bytes, timeline_figure
from emu.view.bars import COMMUNICATION, COMPUTE, WAITING, Look, merge, sample_ranks, thin, timeline_rows

spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 3)), min_size=1, max_size=40).map(
    lambda pairs: np.array([(start, start + length) for start, length in pairs])
)


def boxes(figure):
    """label -> [n, 4]: left, right, top and bottom of every bar that was drawn."""
    drawn = {}
    for collection in figure.axes[0].collections:
        label = collection.get_label()
        if not label.startswith("_"):
            corners = np.array([path.vertices[:4] for path in collection.get_paths()])
            drawn[label] = np.column_stack(
                [corners[:, :, 0].min(1), corners[:, :, 0].max(1), corners[:, :, 1].min(1), corners[:, :, 1].max(1)]
            )
    return drawn


def texts(figure):
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    return labels + [text.get_text() for text in axes.texts] + [axes.get_title(loc="left"), axes.get_xlabel()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_rank_and_stream_is_a_row(make):
    figure = timeline_figure(make.priced())
    shown = texts(figure)
    assert [text for text in shown if text.startswith("rank")] == [f"rank {r}" for r in range(8)]
    assert shown.count("main") == shown.count("dp") == 8
    assert "time (ms)" in shown


def test_bars_have_the_extent_of_the_spans(make):
    timeline = make.priced()
    drawn = boxes(timeline_figure(timeline))
    for phase in ("forward", "backward", "recompute", "optimizer"):
        expected = sum(s.end_s - s.start_s for own in timeline.spans.values() for s in own if s.phase == phase)
        assert np.sum(drawn[phase][:, 1] - drawn[phase][:, 0]) / 1e3 == pytest.approx(expected, rel=1e-9)
    reduced = [s for own in timeline.spans.values() for s in own if s.kind == "collective"]
    assert len(drawn["all_reduce"]) == len(reduced) == 6 * 8
    ends = sorted(s.end_s * 1e3 for s in reduced)
    assert np.sort(drawn["all_reduce"][:, 1]) == pytest.approx(ends, rel=1e-12)


def test_a_bar_that_is_missing_would_be_noticed(make):
    whole, less = make.priced(), make.priced(make.training_step().without("dp.*"))
    assert "all_reduce" in boxes(timeline_figure(whole))
    assert "all_reduce" not in boxes(timeline_figure(less))
    assert "all_reduce" not in legend(timeline_figure(less))


def test_a_collective_is_named_by_its_kind_though_the_program_named_it(make):
    timeline = make.priced()
    assert {s.name for s in timeline.spans[0] if s.kind == "collective"} == {"dp.gradients"}
    assert "all_reduce" in legend(timeline_figure(timeline))


def test_waiting_for_a_slow_rank_is_not_drawn_as_moving_data(make):
    (_, slow), (_, fast) = [(row.rank, row.bars) for row in timeline_rows(make.priced(), [1, 0]) if row.stream == "dp"]
    assert Look(WAITING, "") in fast and Look(COMMUNICATION, "all_reduce") in fast
    assert Look(COMMUNICATION, "all_reduce") in slow and Look(WAITING, "") not in slow


def test_bars_of_one_row_do_not_overlap(make):
    for row in timeline_rows(make.priced(), range(8)):
        bars = np.concatenate(list(row.bars.values()))
        bars = bars[np.argsort(bars[:, 0])]
        assert (bars[1:, 0] >= bars[:-1, 1] - 1e-12).all()  # 1e-12 s: sums of starts and durations round


def test_marks_are_drawn_and_named(make):
    figure = timeline_figure(make.priced())
    assert "step 0" in texts(figure)
    assert "mark (when the host passed it)" in legend(figure)
    unmarked = make.training_step(ranks=1)
    bare = make.Trace({"dp": 1}, {0: [e for e in unmarked.events[0] if not isinstance(e, Mark)]})
    assert not any("mark" in text for text in legend(timeline_figure(make.priced(bare))))


def test_a_legend_lists_what_can_be_seen_and_nothing_else(make):
    def step(other):
        long, short = Kernel("mm", "", "forward", 10**13, 10**6, "float32", (), "main"), other
        return make.priced(make.Trace({"dp": 1}, {0: [long, short, long]}))

    tiny = Kernel("add", "", "", 0, 10**3, "float32", (), "main")
    assert legend(timeline_figure(step(tiny))) == ["forward"]  # a microsecond in half a second
    assert "outside any phase" in legend(timeline_figure(step(tiny._replace(flops=10**13))))


def test_a_window_shows_only_what_lies_in_it(make):
    timeline = make.priced()
    drawn = boxes(timeline_figure(timeline, ranks=[1], window=(0.012, 0.020)))
    assert "forward" not in drawn and "backward" in drawn
    assert all(bars[:, 0].min() >= 12 - 1e-9 and bars[:, 1].max() <= 20 + 1e-9 for bars in drawn.values())
    with pytest.raises(ValueError, match="ends before it begins"):
        timeline_figure(timeline, window=(2.0, 1.0))


def test_many_ranks_are_sampled_and_said_to_be(make):
    timeline = make.priced(make.training_step(24, layers=1), nodes=3)
    figure = timeline_figure(timeline)
    assert "16 of 24 ranks shown" in figure.axes[0].get_title(loc="left")
    assert sample_ranks(range(24))[0] == 0 and sample_ranks(range(24))[-1] == 23
    assert len(set(sample_ranks(range(1000)))) == 16
    assert "ranks shown" not in timeline_figure(make.priced()).axes[0].get_title(loc="left")


def test_a_rank_that_is_not_there_is_refused(make):
    with pytest.raises(ValueError, match="no rank 9; it has 8 ranks, 0 to 7"):
        timeline_figure(make.priced(), ranks=[0, 9])


@pytest.mark.parametrize("events", [{}, {0: []}, {0: [Mark("alone")]}])
def test_nothing_to_draw_is_drawn_as_nothing(make, events):
    figure = timeline_figure(make.priced(make.Trace({"dp": 1}, events)))
    assert "nothing ran on any stream" in texts(figure)
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_hostile_names_are_drawn_as_they_are(make):
    name = r"$\frac{<script>"
    events = [Mark(name), Kernel(name, name, "", 10**9, 10**6, "float32", (), name), Mark(name)]
    figure = timeline_figure(make.priced(make.Trace({"dp": 1}, {0: events})))
    assert name in texts(figure)
    png_bytes(figure)  # a formula that cannot be parsed would raise here


@given(spans)
@settings(deadline=None)
def test_joining_keeps_what_is_covered(bars):
    joined = merge(bars[:, 0], bars[:, 1])
    at = np.linspace(0, 13, 997)
    inside = ((bars[:, 0] <= at[:, None]) & (at[:, None] <= bars[:, 1])).any(1)
    again = ((joined[:, 0] <= at[:, None]) & (at[:, None] <= joined[:, 1])).any(1)
    assert (inside == again).all()
    assert (joined[1:, 0] > joined[:-1, 1]).all()


@given(spans, st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_thinning_keeps_the_busy_time_of_every_column(bars, columns):
    joined = merge(bars[:, 0], bars[:, 1])
    edges = np.linspace(0, 13, columns + 1)
    thinned = thin({Look(COMPUTE, "forward"): joined}, edges)[Look(COMPUTE, "forward")]

    def busy(spans):
        overlap = np.minimum(spans[:, 1][:, None], edges[1:]) - np.maximum(spans[:, 0][:, None], edges[:-1])
        return np.clip(overlap, 0, None).sum(0)

    # Sums of at most 40 numbers below 13 in float64.
    assert busy(thinned) == pytest.approx(busy(joined), abs=1e-9)


def test_thinning_does_not_paint_idle_time_as_work():
    starts = np.arange(0, 10, 1e-3)
    fifth = np.column_stack([starts, starts + 2e-4])
    thinned = thin({Look(COMPUTE, ""): fifth}, np.linspace(0, 10, 101))[Look(COMPUTE, "")]
    assert len(thinned) <= 101
    assert np.sum(thinned[:, 1] - thinned[:, 0]) == pytest.approx(2.0)


def test_a_hundred_thousand_spans_draw_fast(make):
    timeline = make.priced(make.training_step(2, layers=6500, tokens=64))
    assert sum(map(len, timeline.spans.values())) > 100_000
    timeline_figure(make.priced())  # imports done
    start = time.process_time()
    png_bytes(timeline_figure(timeline))
    assert time.process_time() - start < 3  # measured 0.4 s; room for a slow machine
