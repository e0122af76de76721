"""Pictures of pipelines show what schedules and runs are: every action at its time, every rank's activations."""

import math
import re
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.models.config import Config
from emu.models.decoder import Decoder
from emu.parallel import Pipeline
from emu.parallel.pipeline import Schedule, Timed, Times, grid, peak_activations, timed
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.spmd import PlanError, ScheduleError
from emu.view import activations_figure, png_bytes, run_schedule_figure, schedule_figure, side_by_side
from emu.view.notebook import attach
from emu.view.pipeline import BAR_HEIGHT, SHADES
from emu.view.pipeline_bars import measured_times, pipeline_ranks, timed_run
from emu.view.style import luminance


@st.composite
def schedules(draw, most_microbatches=8):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, most_microbatches))
    try:
        return make(name, ranks, microbatches, 2 if name == "interleaved" else 1)
    except PlanError:  # an odd number of ranks
        return make(name, 2, microbatches)


def drawn(axes):
    """(row, kind, start, stop) of every bar."""
    bars = []
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
            bars.append(
                (round((low + high) / 2), collection.get_label()[0], round(float(left), 6), round(float(right), 6))
            )
    return sorted(bars)


def said(one: Timed):
    return sorted(
        (rank, part.kind, round(float(start), 6), round(float(stop), 6))
        for rank, row in enumerate(one.rows)
        for start, stop, action in row
        for part in action.each()
    )


TIMES = st.builds(Times, *[st.sampled_from([0.5, 1.0, 1.75, 3.0])] * 3)


@settings(max_examples=30)
@given(schedules(), TIMES)
def test_every_action_is_a_bar_at_its_time(schedule, times):
    one = timed(schedule, times)
    (axes,) = schedule_figure(schedule, times).axes
    assert drawn(axes) == said(one)
    if one.makespan > 3:  # the control: other times are other bars
        assert drawn(axes) != said(timed(schedule, Times(4, 4, 4)))


@given(st.integers(1, 6), st.integers(1, 12))
def test_the_title_says_makespan_and_bubble(ranks, microbatches):
    (axes,) = schedule_figure(make("1f1b", ranks, microbatches)).axes
    title = axes.get_title(loc="left")
    length, share = re.fullmatch(r"1f1b: makespan (\S+), bubble (\S+) %", title).groups()
    assert float(length) == 3 * (microbatches + ranks - 1)
    assert float(share) == pytest.approx(100 * (ranks - 1) / (microbatches + ranks - 1), rel=5e-3)  # three digits


@settings(max_examples=20)
@given(schedules())
def test_numbers_are_the_microbatches_or_absent(schedule):
    (axes,) = schedule_figure(schedule, width=30).axes
    want = sorted(str(part.microbatch) for row in schedule.rows for action in row for part in action.each())
    assert sorted(text.get_text() for text in axes.texts) == want
    (narrow,) = schedule_figure(make("1f1b", 2, 300)).axes
    assert not narrow.texts


def test_what_runs_as_a_pair_lies_one_above_the_other():
    schedule = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    (axes,) = schedule_figure(schedule).axes
    boxes = {
        (c.get_label()[0], float(p.vertices[:, 0].min())): (p.vertices[:, 1].min(), p.vertices[:, 1].max())
        for c in axes.collections
        for p in c.get_paths()
    }
    assert boxes["F", 1.0][1] == pytest.approx(boxes["B", 1.0][0]) and boxes["F", 1.0][0] < 0 < boxes["B", 1.0][1]
    assert boxes["F", 0.0] == boxes["B", 4.0] == pytest.approx((-BAR_HEIGHT / 2, BAR_HEIGHT / 2))  # alone: whole


def test_kinds_and_a_ranks_stages_differ_in_black_and_white():
    shades = [colour for pair in SHADES.values() for colour in pair]
    assert min(abs(luminance(a) - luminance(b)) for a, b in combinations(shades, 2)) >= 8
    assert abs(luminance("#d1495b") - luminance("#1b8a5a")) < 8  # the control: a red and a green


@pytest.mark.parametrize("draw", [schedule_figure, activations_figure])
@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_large_schedules_are_drawn(draw, name):
    assert png_bytes(draw(make(name, 16, 128))).startswith(b"\x89PNG")


# As text.


def read(text):
    """grid's text with unit slots -> per rank [(start, stop, word)]."""
    rows, length = {}, {}
    for block in text.split("\n\n"):
        header, *lines = block.splitlines()
        ticks = header.split()[1:]
        label = header.index(ticks[0])
        wide = header.index(" " + ticks[1], label) + 1 - label if len(ticks) > 1 else None
        for rank, line in enumerate(lines):
            rows[rank] = rows.get(rank, "") + line[label:].ljust((len(ticks) * wide) if wide else 0)
        length["wide"] = wide or length.get("wide", 3)
    wide = length["wide"]
    found = []
    for rank in sorted(rows):
        line, row = rows[rank], []
        for at in range(0, len(line), wide):
            cell = line[at : at + wide].strip()
            if cell and cell[0] not in ".-":
                row.append((at // wide, cell.strip("-")))
        found.append(row)
    return found


@given(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]), st.integers(2, 4), st.integers(2, 8), st.integers(60, 140))
def test_a_grid_is_read_back_as_it_is_timed(name, ranks, microbatches, width):
    schedule = make(name, ranks, microbatches)
    text = grid(schedule, width=width)
    assert max(map(len, text.splitlines())) <= width
    want = [[(start, f"{a.kind}{a.microbatch}") for start, _, a in row] for row in timed(schedule).rows]
    assert read(text) == want
    assert read(grid(schedule, Times(2, 1, 1))) != want


def test_a_grid_as_one_sees_it():
    assert grid(make("1f1b", 2, 2)) == (
        "time    0  1  2  3  4  5  6  7  8\nrank 0  F0 F1 .  .  B0--- .  B1---\nrank 1  .  F0 B0--- F1 B1--- .  ."
    )
    assert " 1F1+0B4---- " in grid(make("dualpipe", 2, 8))  # a pair; ranks hold two stages, so these are named, too
    odd = grid(make("gpipe", 1, 1), Times(1 / 3, 0.142857, 0.1))  # without a common measure: rounded
    assert 100 < len(re.sub(r"[^-]", "", odd)) < 1000 and "B0--" in odd


def test_the_readme_says_what_schedules_cost():
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \|.*?\| (\S+) % \| (\S+) \|", text, re.M)
    assert len(rows) == len(SCHEDULES) and {name for name, *_ in rows} == set(SCHEDULES)
    for name, bubble, held in rows:
        schedule = make(name, 4, 16, 2 if name == "interleaved" else 1)
        share = 4 / schedule.stages  # of a quarter of the model
        what = timed(schedule, Times(share, share, share))
        assert f"{100 * what.bubble_fraction:.1f}" == bubble, name
        assert max(peak_activations(schedule)) * share == float(held), name


# Of a run.

CONFIG = Config(layers=4, width=128, heads=4, vocab=64, seq=128)


def program(rank, name, microbatches):
    with torch.device(rank.device):
        x = torch.zeros(2 * microbatches, 128, dtype=torch.long)
        model = Decoder(CONFIG)
    pipe = Pipeline(model, rank, "dp", schedule=name, microbatches=microbatches)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    rank.mark("step")
    pipe.backward(emu.Batch(x, x, tokens=x.numel()))
    rank.mark("gradients")
    optimizer.step()
    rank.mark("end")


@lru_cache
def whole(name="zb-h1", microbatches=3, pp_first=False):
    mesh = emu.Mesh(pp=2, dp=2) if pp_first else emu.Mesh(dp=2, pp=2)
    return emu.launch(program, mesh, backend="shape", launch_mode="graph", args=(name, microbatches))


@lru_cache
def ran(*args, **kwargs):
    return whole(*args, **kwargs).window("step", "end")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_runs_picture_has_every_action_of_the_schedule_in_its_order(name):
    run, schedule = ran(name), make(name, 2, 3)
    one = timed_run(run.timeline())
    assert [tuple(action for *_, action in row) for row in one.rows] == list(schedule.rows)
    (axes,) = run_schedule_figure(run.timeline()).axes
    assert len(drawn(axes)) == sum(map(len, schedule.rows))
    assert {row: tuple(a for *_, a in r) for row, r in enumerate(one.rows)} != dict(enumerate(make("gpipe", 2, 3).rows))


def test_nothing_of_a_run_starts_before_what_it_needs():
    one = timed_run(ran().timeline())
    when = {str(action): (start, stop) for row in one.rows for start, stop, action in row}
    for m in range(3):
        assert when[f"0F{m}"][1] <= when[f"1F{m}"][0] and when[f"1I{m}"][1] <= when[f"0I{m}"][0]
    for row in one.rows:
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(row))
    assert min(start for start, _ in when.values()) == 0
    assert one.makespan < ran().timeline().step_time_s  # sums of gradients and the optimizer's step are no actions


def test_ranks_are_those_of_one_pipeline():
    assert pipeline_ranks(ran().timeline()) == [0, 1]
    assert pipeline_ranks(ran(pp_first=True).timeline()) == [0, 2]
    (axes,) = run_schedule_figure(ran().timeline(), ranks=[2, 3]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 2", "rank 3"]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_with_a_runs_own_times_a_schedule_takes_as_long_but_for_transfers(name):
    run, schedule = ran(name), make(name, 2, 3)
    one = timed_run(run.timeline())
    free = timed(schedule, measured_times(one, schedule)).makespan
    # Microbatches are alike, but the first of a stage's also begins its gradients, which the others add to.
    assert 0.8 * one.makespan < free <= 1.05 * one.makespan
    above, below = side_by_side(schedule, run.timeline()).axes
    assert above.get_xlim() == below.get_xlim() and len(drawn(above)) == len(drawn(below))
    assert timed(schedule, Times()).makespan > 100 * free  # the control: other times


def test_a_schedule_that_was_not_run_is_not_drawn_above_a_run():
    timeline = ran("zb-h1").timeline()
    assert side_by_side(make("zb-h1", 2, 3), timeline).axes  # the control
    with pytest.raises(ValueError, match=r"no run of 1f1b: as action 2.* rank 0 did 0I0, and the schedule says 0B0"):
        side_by_side(make("1f1b", 2, 3), timeline)
    with pytest.raises(ValueError, match="rank 0 did 0I2, and the schedule says 0F3"):
        side_by_side(make("zb-h1", 2, 4), timeline)
    with pytest.raises(ValueError, match="1f1b has 4 ranks, and the timeline's pipeline 2"):
        side_by_side(make("1f1b", 4, 3), timeline)
    with pytest.raises(ValueError, match=r"'zb-h1' is no Schedule: .*make\('zb-h1', 2, 3\)"):
        side_by_side("zb-h1", timeline)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Timed is no Schedule"):
        side_by_side(timed(make("zb-h1", 2, 3)), timeline)  # type: ignore[arg-type]


def test_a_picture_is_of_one_step():
    def steps(rank):
        with torch.device(rank.device):
            model, x = Decoder(CONFIG), torch.zeros(2, 128, dtype=torch.long)
        pipe = Pipeline(model, rank, schedule="1f1b", microbatches=2)
        for _ in range(2):
            pipe.backward(emu.Batch(x, x, tokens=x.numel()))
            pipe.zero_grad()

    run = emu.launch(steps, emu.Mesh(pp=2), backend="shape")
    with pytest.raises(ValueError, match="has 2 steps of 1f1b, and a picture is of one"):
        side_by_side(make("1f1b", 2, 2), run)
    assert run_schedule_figure(run).axes


def test_pairs_of_a_schedule_are_found_in_its_run():
    def step(rank):
        with torch.device(rank.device):
            model, x = Decoder(CONFIG), torch.zeros(8, 128, dtype=torch.long)
        Pipeline(model, rank, schedule="dualpipe", microbatches=8).backward(emu.Batch(x, x, tokens=x.numel()))

    run, schedule = emu.launch(step, emu.Mesh(pp=2), backend="shape"), make("dualpipe", 2, 8)
    assert any(action.parts for row in schedule.rows for action in row)
    above, below = side_by_side(schedule, run).axes
    assert len(drawn(above)) == len(drawn(below))


def test_a_run_is_taken_for_its_timeline():
    run = ran()
    assert drawn(run_schedule_figure(run).axes[0]) == drawn(run_schedule_figure(run.timeline()).axes[0])
    for draw in (run_schedule_figure, lambda it: side_by_side(make("zb-h1", 2, 3), it)):
        with pytest.raises(ValueError, match="str is no timeline"):
            draw("1f1b")


def test_a_timeline_without_a_pipeline_says_so(make):
    with pytest.raises(ValueError, match="no action of a pipeline is marked"):
        run_schedule_figure(make.priced())
    with pytest.raises(ValueError, match="no action of a pipeline is marked"):
        activations_figure(whole().window("gradients", "end"))
    with pytest.raises(ValueError, match="the timeline has no rank 9"):
        run_schedule_figure(ran().timeline(), ranks=[9])


def test_what_is_no_schedule_is_refused():
    for draw in (schedule_figure, activations_figure):
        with pytest.raises(ValueError, match="is no schedule"):
            draw("1f1b")
    with pytest.raises(ValueError, match="has its times"):
        schedule_figure(timed(make("1f1b", 2, 2)), Times())
    for it in (timed(make("1f1b", 2, 2)), ran()):
        with pytest.raises(ValueError, match="has its times"):
            activations_figure(it, times=Times())
    with pytest.raises(ScheduleError):
        schedule_figure(Schedule.parse("0B0 0F0"))


# Activations.


def peaks(figure):
    return [float(text.get_text().removeprefix("peak ")) for axes in figure.axes for text in axes.texts]


@settings(max_examples=20)
@given(schedules(), st.sampled_from([0.0, 0.5, 1.0]))
def test_activations_of_a_schedule_peak_as_they_are_counted(schedule, share):
    want = peak_activations(schedule, share)
    figure = activations_figure(schedule, share)
    assert peaks(figure) == want
    assert [float(axes.lines[0].get_ydata().max()) for axes in figure.axes] == want
    assert all(axes.lines[0].get_ydata()[-1] == 0 for axes in figure.axes)  # all is freed at the end
    assert peaks(activations_figure(make_more(schedule), share)) != want


@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.sampled_from([Times(2, 1, 1), Times(1, 3, 0.5)]))
def test_activations_lie_where_the_times_say(name, times):
    schedule = make(name, 3, 5)
    figure, plain = activations_figure(schedule, times=times), activations_figure(schedule)
    assert peaks(figure) == peaks(plain)
    assert figure.axes[0].get_xlim()[1] == timed(schedule, times).makespan != plain.axes[0].get_xlim()[1]
    assert "the given times" in figure.axes[-1].get_xlabel() and "given" not in plain.axes[-1].get_xlabel()


def make_more(schedule):
    """The control: one more forward first, which is never freed."""
    row = schedule.rows[0]
    first = next(a for action in row for a in action.each() if a.kind == "F")
    return Timed((((0, 1, first), *timed(schedule).rows[0]), *timed(schedule).rows[1:]))


def test_activations_of_a_run_are_the_bytes_of_its_memory():
    run = ran()
    figure = activations_figure(run)
    for rank, axes in enumerate(figure.axes):
        line = run.memory.series(rank)[1]["activations"]
        shown = axes.lines[0].get_ydata()
        scale = max(line) / max(shown)
        assert scale == pytest.approx(10 ** round(math.log10(scale)))  # a unit: kB, MB
        assert max(run.memory.series(rank)[1]["temporary"]) != max(line)  # the control
        at = axes.lines[0].get_xdata()
        assert (at[1:] >= at[:-1]).all() and at[0] >= 0
    # The first stage holds the activations of both microbatches that are under way, the last of one at a time.
    first, last = (max(run.memory.series(rank)[1]["activations"]) for rank in (0, 1))
    assert first > last


def test_a_run_without_memory_says_so():
    class Real:
        has_memory, timeline = False, None

    with pytest.raises(ValueError, match="real devices do not record their memory"):
        activations_figure(Real())


# Notebooks.


def test_schedules_show_themselves_and_wrong_ones_show_their_text():
    attach()
    assert make("1f1b", 2, 4)._repr_png_().startswith(b"\x89PNG")
    assert timed(make("1f1b", 2, 4))._repr_png_().startswith(b"\x89PNG")
    assert replace(make("1f1b", 2, 4), rows=make("1f1b", 2, 4).rows[::-1])._repr_png_() is not None
    assert Schedule.parse("0B0 0F0")._repr_png_() is None
