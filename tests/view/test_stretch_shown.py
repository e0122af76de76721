"""A timeline picture shows by how much a bar lasts longer because it shares its device or its links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cost import price
from emu.hardware import cluster
from emu.trace.events import Collective, Wait
from emu.trace.trace import Trace
from emu.view import timeline_figure
from emu.view.bars import COMMUNICATION, COMPUTE, Look, merge, thin, thin_ends, timeline_rows
from emu.view.timeline import STRETCHED


def veiled(figure):
    """Starts and ends of what is drawn as stretched, in the picture's unit, [n, 2]."""
    for collection in figure.axes[0].collections:
        if collection.get_label() == STRETCHED:
            corners = np.array([path.vertices[:4, 0] for path in collection.get_paths()])
            return np.column_stack([corners.min(1), corners.max(1)])
    return np.empty((0, 2))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def sums(*groups, size=10**9):
    """Each rank sums over each of its groups at once, each on a stream of its own."""
    events = {}
    for number, members in enumerate(groups):
        for rank in members:
            call = ("all_reduce", f"g{number}", members, 0, size, (), "float32", "sum", "ring", -1)
            own = events.setdefault(rank, [])
            own.append(Collective(*call, f"g{number}", "main", number, ""))
    return Trace({"x": 3}, {r: [*own, *(Wait(e.work, "main") for e in own)] for r, own in events.items()})


def test_what_is_veiled_is_what_spans_lost(make):
    timeline = make.priced()
    lost_s = sum(span.stretch_s for own in timeline.spans.values() for span in own)
    figure = timeline_figure(timeline)
    bars = veiled(figure)
    assert lost_s > 0 and STRETCHED in legend(figure)
    assert np.sum(bars[:, 1] - bars[:, 0]) / 1e3 == pytest.approx(lost_s, rel=1e-9)


def test_without_contention_nothing_is_veiled(make):
    trace = make.training_step()
    figure = timeline_figure(price(trace, cluster("h100", nodes=1), contention=False))
    assert not len(veiled(figure)) and STRETCHED not in legend(figure)


def test_a_sum_that_shares_a_link_ends_in_a_veil():
    def rows(*groups):
        return timeline_rows(price(sums(*groups), cluster("h100", nodes=1)), [0])

    (alone,), both = rows((0, 1)), rows((0, 1), (0, 2))
    ((start, end),) = alone.bars[Look(COMMUNICATION, "all_reduce")]
    assert not len(alone.stretched)
    for row in both:  # two flows on rank 0's link: each takes about twice as long, the second half of it by sharing
        ((begin, stop),) = row.stretched
        assert row.bars[Look(COMMUNICATION, "all_reduce")][-1, 1] == stop
        assert stop - begin == pytest.approx(end - start, rel=0.1)  # alone it leaves a little of the link


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 3)), min_size=1, max_size=30), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_thinned_ends_keep_their_time_in_every_column_and_lie_in_the_bars(pairs, columns):
    bars = merge([start for start, _ in pairs], [start + length for start, length in pairs])
    ends = np.column_stack([bars.mean(axis=1), bars[:, 1]])
    edges = np.linspace(0, 13, columns + 1)
    look = Look(COMPUTE, "forward")
    thinned, drawn = thin({look: bars}, edges)[look], thin_ends(ends, {look: bars}, edges)

    def busy(spans):
        overlap = np.minimum(spans[:, 1][:, None], edges[1:]) - np.maximum(spans[:, 0][:, None], edges[:-1])
        return np.clip(overlap, 0, None).sum(0)

    assert busy(drawn) == pytest.approx(busy(ends), abs=1e-9)  # sums of at most 30 numbers below 13
    inside = np.minimum(drawn[:, 1][:, None], thinned[:, 1]) - np.maximum(drawn[:, 0][:, None], thinned[:, 0])
    assert np.clip(inside, 0, None).sum() == pytest.approx(np.sum(drawn[:, 1] - drawn[:, 0]), abs=1e-9)


def test_a_row_of_many_kernels_is_veiled_by_their_share(make):
    timeline = make.priced(make.training_step(2, layers=1500, tokens=256))
    rows = timeline_rows(timeline, [0], np.linspace(0, timeline.step_time_s, 301))
    lost_s = sum(span.stretch_s for span in timeline.spans[0] if span.stream == "main")
    (main,) = [row for row in rows if row.stream == "main"]
    assert 0 < len(main.stretched) <= 300
    assert np.sum(main.stretched[:, 1] - main.stretched[:, 0]) == pytest.approx(lost_s, rel=1e-6)
