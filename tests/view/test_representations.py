"""Everything that a notebook may be handed shows itself in one form, escaped, whatever legal thing it is."""

import pytest
import torch

import emu
from emu import Grads, Layout, Mesh, Only, Partial, Plan, Shard, Slices
from emu.cost import price
from emu.hardware import cluster
from emu.parallel.pipeline import make
from emu.trace.events import Alloc, Collective, Kernel
from emu.trace.trace import Trace
from emu.view import attach, trace_table

attach()
FORMS = (
    "_repr_html_",
    "_repr_png_",
    "_repr_svg_",
    "_repr_jpeg_",
    "_repr_markdown_",
    "_repr_mimebundle_",
    "_repr_latex_",
)
HOSTILE = "<img src=x onerror=alert(1)>\ud800 $x_"


def shown(it):
    """What it shows itself as, which is exactly one form (None: its text)."""
    (form,) = [name for name in FORMS if hasattr(it, name)]
    found = getattr(it, form)()
    assert found is None or isinstance(found, bytes if form == "_repr_png_" else str)
    if isinstance(found, str):
        assert "<img src=x" not in found and "<script" not in found
    return found


def program(rank):
    x = torch.ones(64, 64) @ torch.ones(64, 64)
    return rank.group(*rank.mesh.axes).all_reduce(x) if rank.mesh.axes else x


def hostile_trace():
    kernel = Kernel(HOSTILE, HOSTILE, HOSTILE, 10, 10, "float32", (), HOSTILE)
    call = Collective("all_reduce", HOSTILE, (0, 1), 0, 8, (), "float32", "sum", "", -1, "s", HOSTILE, 0, HOSTILE)
    return Trace({HOSTILE: 2}, {rank: [kernel, call, Alloc(0, 8, HOSTILE, HOSTILE)] for rank in range(2)})


def parts_of(run):
    return [run, run.trace, run.timeline(), run.mesh, run.cluster, *([run.memory] if run.has_memory else [])]


@pytest.mark.parametrize("axes", [{}, {"pp": 1, "dp": 2, "tp": 2}])
def test_a_run_and_all_its_parts_show_themselves(axes):
    for part in parts_of(emu.launch(program, Mesh(**axes))):
        assert shown(part)


def test_a_run_shows_its_traffic_where_there_is_any():
    apart, together = (emu.launch(p, Mesh(dp=2))._repr_html_() for p in (lambda rank: torch.ones(3) + 1, program))
    assert 'alt="traffic of every link"' in together and 'alt="traffic of every link"' not in apart


def test_a_run_that_did_nothing_says_so():
    run = emu.launch(lambda rank: None, Mesh(dp=2))
    for part in parts_of(run):
        assert shown(part)
    assert "nothing was recorded" in run._repr_html_() and "nothing was recorded" in run.trace._repr_html_()


def test_a_run_without_memory_and_one_by_shapes_show_themselves():
    untracked = emu.launch(program, Mesh(dp=2), track=False)
    shapes = emu.launch(program, Mesh(dp=1000), backend="shape", ranks=[0, 999])
    for part in (untracked, shapes, shapes.trace, shapes.timeline(), shapes.mesh):
        assert shown(part)


def test_a_simulated_step_in_which_some_ranks_stand_for_all_shows_itself():
    run = emu.simulate("gpt-tiny", Plan("dp=8,pp=2", zero=1, microbatches=2, global_batch=16), cluster("h100", nodes=2))
    assert len(run.trace.ranks) < run.mesh.size
    assert shown(run) and shown(run.plan)


def test_names_from_programs_are_escaped():
    trace = hostile_trace()
    timeline = price(trace, cluster("h100-8"))
    grads = Grads({HOSTILE: torch.ones(2)}, {HOSTILE: Layout({HOSTILE: Shard(0)})})
    for it in (trace, timeline, grads, Layout({HOSTILE: Shard(0)})):
        assert shown(it)
    assert "&lt;img src=x" in shown(trace) and "&lt;img src=x" in shown(grads)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout({"tp": Shard(-1), "dp": Shard(3)}),
        Layout({"pp": Only((0, 2)), "tp": Partial("max")}),
        Layout({"tp": Slices(1, (((0, 2),), ((1, 4),)))}),
        Layout({"tp": Slices(0, ())}),
        Layout({"ep": Shard(0), "etp": Shard(1), "edp": Shard(2)}),
        Layout({"ep": Shard(0), "dp": Shard(1)}),  # fits no mesh
    ],
)
def test_a_layout_says_every_axis(layout):
    html = shown(layout)
    assert all(f">{axis}</td>" in html for axis in layout.placements)


def test_gradients_say_where_each_lies():
    run = emu.launch(lambda rank: Grads({"w": torch.ones(2, 3)}, {"w": Layout({"dp": Shard(0)})}), Mesh(dp=2))
    html = shown(run.results[1])
    assert "[2, 3]" in html and "dp: cut along dimension 0" in html
    assert "and 40 more" in shown(Grads({f"w{i}": torch.ones(1) for i in range(100)}, {})) and shown(Grads({}, {}))


@pytest.mark.parametrize("name", ["h100-16384", "v100-8", "tpu-v4-cube"])
def test_every_kind_of_cluster_shows_itself(name):
    html = shown(cluster(name))
    assert cluster(name).name in html and 'alt="ladder of memories and links"' in html


@pytest.mark.parametrize("plan", [Plan(), Plan("dp=1024"), Plan("pp=2,cp=2,tp=2", sp=True)])
def test_plans_show_who_holds_what(plan):
    assert shown(plan).startswith(b"\x89PNG")


def test_a_plan_of_more_ranks_than_can_be_drawn_is_text():
    assert shown(Plan("dp=16384")) is None


def test_schedules_show_themselves():
    assert shown(make("1f1b", 2, 4))


def test_a_trace_is_counted_by_kind(make):
    table = trace_table(make.training_step(ranks=2, layers=3))
    rows = {row[0]: row[1:3] for row in table.rows}
    assert rows["dp.all_reduce"] == ("6", "604 MB")  # 3 layers of 100.7 MB on two ranks
    assert rows["kernels, forward"][0] == "12" and rows["allocated, gradients"][0] == "6"
    assert table.note == "6 marks"
    assert "all_reduce" not in " ".join(row[0] for row in trace_table(make.training_step(2).without("dp.*")).rows)


def test_bars_of_a_trace_are_on_one_scale_whatever_is_counted():
    call = Collective("all_reduce", "dp", (0,), 0, 75, (), "float32", "sum", "", -1, "s", "", 0, "")
    events = [Kernel("add", "", "", 100, 200, "float32", (), ""), call, Alloc(0, 1, "gradients", "")]
    table = trace_table(Trace({"dp": 1}, {0: events}))
    assert table.headers[3] == "of the row with most bytes"
    lengths = {row[0]: (row[2], len(row[3].removesuffix("▏"))) for row in table.rows}
    assert lengths == {
        "kernels outside any phase": ("200 B", 12),
        "dp.all_reduce": ("75 B", 4),  # 4.5 of 12, and a half goes to what is even
        "allocated, gradients": ("1 B", 0),
    }
    assert all(row[3] for row in table.rows)  # what is little has a line, not nothing
