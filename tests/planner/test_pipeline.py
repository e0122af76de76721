"""How long a pipeline takes in closed form, against its schedule walked action by action."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import llama, workload

from emu.parallel.pipeline import Times, make, peak_activations, timed
from emu.planner.closed import predict, stack
from emu.planner.closed.activations import layer_bytes
from emu.planner.closed.memory import _in_flight
from emu.planner.closed.pipeline import FORMS, hops_s, makespan_s
from emu.planner.closed.stages import StageTime, laid, layers_of_stages, stage_times
from emu.planner.closed.timing import LayerTime


def walked(schedule, stages, microbatches, chunks=1):
    """The makespan of the schedule, each stage's time shared out evenly over its chunks."""
    ranks = len(stages)
    made = make(schedule, ranks, microbatches, *((chunks,) if chunks > 1 else ()))
    each = [stages[stage % ranks] for stage in range(ranks * chunks)]
    return timed(
        made,
        Times(
            [s.forward / chunks for s in each],
            [(s.backward - s.weight) / chunks for s in each],
            [s.weight / chunks for s in each],
        ),
    ).makespan


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 5)])
@pytest.mark.parametrize("ranks, microbatches", [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_equal_stages_take_as_long_as_the_schedule_walked(schedule, chunks, ranks, microbatches):
    stages = [StageTime(1.0, 2.0, 1.0)] * ranks
    w = workload(layers=40, pp=ranks, vp=chunks, schedule=schedule)
    assert makespan_s(w, stages, microbatches) == pytest.approx(walked(schedule, stages, microbatches, chunks))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("ranks, microbatches", [(2, 1), (4, 3), (8, 9), (2, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("weight", [0.2, 0.8, 1.0])
def test_zero_bubble_schedules_take_as_long_as_a_step_costs_when_walked(schedule, ranks, microbatches, weight):
    """Within 3 %: from a rank's first start to its last stop, as ranks need not wait for one another between steps.

    Among them as many micro-batches as fill no bubble.
    """
    stages = [StageTime(1.0, 1.0 + weight, weight)] * ranks
    w = workload(pp=ranks, schedule=schedule)
    made = make(schedule, ranks, microbatches)
    cost = timed(made, Times(1.0, 1.0, weight)).cost
    assert makespan_s(w, stages, microbatches) == pytest.approx(cost, rel=0.03)


@st.composite
def uneven(draw):
    """Stages as models have them: equal in the middle, with less or more at the ends."""
    ranks = draw(st.integers(2, 8))
    ends = [draw(st.floats(0.6, 1.3)) for _ in range(2)]
    times = [ends[0], *(1.0,) * (ranks - 2), ends[1]]
    return [StageTime(t, 2.1 * t, t) for t in times], ranks * draw(st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(uneven(), st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)]))
def test_stages_that_differ_take_about_as_long_as_the_schedule_walked(drawn, kind):
    """Within 9 %, interleaved within 15 % (a slow first stage waits less); and never less than the slowest has to do."""
    (stages, microbatches), (schedule, chunks) = drawn, kind
    w = workload(layers=24, pp=len(stages), vp=chunks, schedule=schedule)
    found = makespan_s(w, stages, microbatches)
    assert found == pytest.approx(walked(schedule, stages, microbatches, chunks), rel=0.15 if chunks > 1 else 0.09)
    assert found >= microbatches * max(s.whole for s in stages)


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("microbatches", [1, 8, 9, 30])
def test_a_stage_much_slower_than_others_waits_less_where_it_stands_earlier(slow, microbatches):
    """Walked exactly, or 3 % above: forwards in flight fill what it would wait for the stages behind it."""
    stages = [StageTime(3.0, 5.0, 2.0) if i == slow else StageTime(1.0, 1.5, 1.0) for i in range(4)]
    found = makespan_s(workload(pp=4), stages, microbatches)
    whole = walked("1f1b", stages, microbatches)
    assert whole * (1 - 1e-9) <= found <= 1.03 * whole


def test_a_stage_also_waits_after_its_last_forward():
    """By hand: two stages that take 1 + 2 and 0.9 + 1.9 s, the first with two micro-batches of three in flight.

    The first works 3 x 3 s; it waits 2.8 s for the other's first, less a forward of 1 s; and for its last, less a backward.
    """
    stages = [StageTime(1.0, 2.0, 1.0), StageTime(0.9, 1.9, 0.9)]
    by_hand = 9 + (2.8 - 1) + (2.8 - 2)
    assert makespan_s(workload(pp=2), stages, 3) == pytest.approx(by_hand)
    assert walked("1f1b", stages, 3) == pytest.approx(by_hand)


@given(uneven())
def test_who_waits_for_the_receiver_never_gains_by_it(drawn):
    stages, microbatches = drawn
    w = workload(layers=24, pp=len(stages))
    waiting = makespan_s(w, stages, microbatches, waits=True)
    assert waiting >= makespan_s(w, stages, microbatches) - 1e-9
    assert waiting == pytest.approx(sum(s.whole for s in stages) + (microbatches - 1) * max(s.whole for s in stages))


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 2), ("zb-h1", 2), ("zb-h1", 3)])
@pytest.mark.parametrize("microbatches", [4, 16, 40])
def test_chunks_of_schedules_whose_forms_have_none_are_walked(schedule, chunks, microbatches):
    w = workload(pp=4, vp=chunks, schedule=schedule, global_batch=microbatches, stack="megatron-2023")
    stages = [StageTime(1.0, 2.0, 1.0)] * len(laid(w).layers)
    made = make(schedule, 4, microbatches, chunks)
    assert makespan_s(w, stages, microbatches) == pytest.approx(timed(made).makespan, rel=0.01)
    each = layer_bytes(w, stack(w.stack), 1)
    held = [_in_flight(w, stack(w.stack), 1, device, chunks) / each for device in range(4)]
    share = min(1.0, 32 * 2048 * 2048 / each)
    assert held == pytest.approx(peak_activations(made, share))


WALKED = ["zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v"]


@pytest.mark.parametrize("schedule", WALKED)
@pytest.mark.parametrize("microbatches", [5, 16, 40, 41, 100])
@pytest.mark.parametrize("end", [0.0, 0.7])
def test_schedules_without_a_form_are_walked_and_then_repeat(schedule, microbatches, end):
    """As walked in full, with stages where the schedule's rows have them, within 0.3 %."""
    assert schedule not in FORMS
    w = workload(pp=4, schedule=schedule)
    layer = StageTime(1.0, 2.0, 0.9)
    stages = [StageTime(*(n * part for part in layer)) for n in laid(w).layers]
    stages[-1] = StageTime(stages[-1].forward + end, stages[-1].backward + 2 * end, stages[-1].weight + end)
    made = make(schedule, 4, microbatches)
    assert made.stages == len(stages)
    times = Times([s.forward for s in stages], [s.backward - s.weight for s in stages], [s.weight for s in stages])
    whole = timed(made, times).makespan
    assert makespan_s(w, stages, microbatches) == pytest.approx(whole, rel=3e-3)


@pytest.mark.parametrize("schedule", [*FORMS, *WALKED])
def test_no_part_of_a_step_is_negative_and_bubbles_are_what_is_left(schedule):
    for batch in (4, 8, 64, 65):
        found = predict(llama(pp=4, tp=2, dp=1, schedule=schedule, global_batch=batch, stack="megatron-2023"))
        assert all(part >= -1e-12 for part in found.parts.values()), found.parts
        assert sum(found.parts.values()) == found.step_s


def test_stages_lie_where_a_schedules_rows_have_them():
    assert laid(workload(pp=2, schedule="zb-v")).devices == ((0, 3), (1, 2))
    assert laid(workload(pp=4, schedule="dualpipe")).devices == ((0, 3), (1, 2), (1, 2), (0, 3))
    assert laid(workload(pp=2, vp=2, schedule="interleaved")) == (((12, 12)), ((0,), (1,)))
    assert laid(workload()).devices == ((0,),)


def test_work_of_a_stage_on_two_devices_is_shared():
    """DualPipe's devices do half of the micro-batches of each of their stages: all together do all of it once."""
    for schedule in (*FORMS, *WALKED):
        lies = laid(w := workload(pp=4, schedule=schedule))
        stages = [StageTime(1.0 + i, 2.0 + i, 0.5) for i in range(len(lies.layers))]
        devices = lies.per_device(stages)
        assert len(devices) == 4
        assert sum(d.whole for d in devices) == pytest.approx(sum(s.whole for s in stages)), w.schedule


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (24, 4, (6, 6, 6, 6)),
        (126, 16, (7, *(8,) * 14, 7)),
        (22, 8, (2, *(3,) * 6, 2)),
        (61, 8, (8, 8, 8, 8, 8, 7, 7, 7)),
        (5, 1, (5,)),
        (3, 2, (2, 1)),
    ],
)
def test_layers_are_dealt_out_as_frameworks_do(layers, stages, expected):
    assert layers_of_stages(layers, stages) == expected


@given(st.integers(1, 200), st.integers(1, 64))
def test_every_layer_has_a_stage(layers, stages):
    if stages > layers:
        return
    dealt = layers_of_stages(layers, stages)
    assert sum(dealt) == layers and len(dealt) == stages and min(dealt) >= 0 and max(dealt) - min(dealt) <= 1


def test_half_of_the_heads_backward_is_its_weights():
    """By hand, with layers of 1 and 2 s, of which 1 s is the weights'."""
    layer = LayerTime(1.0, 2.0, 1.0, 1.0, 1.0, 1.0, *(0.0,) * 5)
    found = stage_times((3, 3), layer, (0.25, 0.5), (1.0, 3.0))
    assert found == (StageTime(3.25, 6.5, 3.0), StageTime(4.0, 9.0, 4.5))


def test_messages_between_stages_cost_less_where_they_overlap():
    w, stages = workload(pp=4), [StageTime(1.0, 2.0, 1.0)] * 4
    assert 0 < hops_s(w, stages, 1e-3, 16, overlapped=True) < hops_s(w, stages, 1e-3, 16, overlapped=False)
    assert hops_s(workload(), stages[:1], 1e-3, 16, overlapped=False) == 0


@pytest.mark.parametrize("schedule", WALKED)
@pytest.mark.parametrize("microbatches", [8, 41, 80])
def test_messages_of_walked_schedules_cost_what_they_do_when_walked(schedule, microbatches):
    """In v-min, each forward waits for the one before: as many hops as micro-batches, and not once down and back."""
    w = workload(pp=4, schedule=schedule)
    stages = [StageTime(1.0, 2.0, 0.9)] * len(laid(w).layers)
    made = make(schedule, 4, microbatches)
    spans = [timed(made, Times(1.0, 1.1, 0.9, communication=hop)).makespan for hop in (0.0, 0.05)]
    found = hops_s(w, stages, 0.05, microbatches, overlapped=True)
    assert found == pytest.approx(spans[1] - spans[0], rel=0.02)
