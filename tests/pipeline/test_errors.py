"""What cannot be a pipeline, or goes wrong in one, is told in words that help; nothing hangs."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import emu
from emu.models import GPT, Config
from emu.parallel import Pipeline, Plan
from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.running import executor
from emu.parallel.pipeline.schedules import make
from emu.spmd import Deadlock, EmuError, PlanError, ScheduleError

from .programs import NAMES, Case

pytestmark = pytest.mark.usefixtures("float64")


def trains(rank, make_model, how, data=None):
    pipe = Pipeline(make_model(), rank, **{"microbatches": 2, **how})
    return pipe.backward(rows() if data is None else data)


def rows(n=4, width=3):
    g = torch.Generator().manual_seed(0)
    return emu.Batch(torch.randn(n, width, generator=g), torch.randint(0, 3, (n,), generator=g))


def refused(error, match, make_model, pp=2, data=None, **how):
    with pytest.raises(error, match=match) as caught:
        emu.launch(trains, emu.Mesh(pp=pp), args=(make_model, how, data))
    assert caught.value.hint
    return caught.value


class Layers(nn.Module):
    """Some layers; what is done with them is each test's."""

    def __init__(self, n=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def loss_sum(self, x, y):
        return nn.functional.cross_entropy(self(x), y, reduction="sum")


# What a schedule cannot do.


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 24), st.integers(1, 5))
def test_a_schedule_is_made_or_says_which_numbers_do_not_fit(name, ranks, microbatches, chunks):
    try:
        made = make(name, ranks, microbatches, chunks)
    except PlanError as error:
        numbers = {"mesh": ranks, "pp": ranks, "chunks": chunks, "microbatches": microbatches}
        assert error.field in numbers and error.hint
        assert name in error.message and f"={numbers[error.field]}" in error.message, error
        assert error.nearest is None or error.nearest != numbers[error.field]
    else:
        assert (made.ranks, made.microbatches) == (ranks, microbatches)


@pytest.mark.parametrize(
    ("pp", "how", "numbers"),
    [
        (3, {"schedule": "dualpipe"}, "pp=3"),
        (2, {"schedule": "1f1b", "chunks": 2}, "chunks=2"),
        (2, {"schedule": "zb-v", "chunks": 3}, "chunks=3"),
    ],
)
def test_a_pipeline_that_its_schedule_cannot_do_is_refused(pp, how, numbers):
    error = refused(PlanError, re.escape(numbers), lambda: Layers(12), pp, **how)
    assert how["schedule"] in error.message
    with pytest.raises(PlanError, match=re.escape(numbers)):
        Plan(f"pp={pp}", microbatches=2, schedule=how["schedule"], chunks=how.get("chunks", 1))


def test_fewer_layers_than_stages_names_both():
    error = refused(PlanError, "6 stages, but Layers has 4 layers", Layers, 6)
    assert error.nearest == 4
    refused(PlanError, "8 stages, but Layers has 4 layers", Layers, 4, schedule="zb-v")


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ([1, 2], r"\[1, 2\] layers on 2 stages, but Layers has 4"),
        ([4], r"\[4\] layers on 2 stages"),
        ([5, -1], "but Layers has 4 layers"),
        ([4, 0], "stage 1 of Layers has no module"),
        (["layers.9"], "'layers.9'"),
        (["layers.1", "layers.2"], "do not make 2 stages"),
        (["layers.0"], "do not make 2 stages"),
        ("odd", "'odd'"),
        (None, "stages=None"),
        (3, "stages=3"),
        (["layers.2", 1], r"stages=\['layers.2', 1\]"),
        ([2.5, 1.5], r"stages=\[2.5, 1.5\]"),
        ([True, 3], r"stages=\[True, 3\]"),
    ],
)
def test_cuts_that_do_not_fit_the_model_are_refused(stages, match):
    refused(PlanError, match, Layers, stages=stages)


def test_a_schedule_that_waits_for_itself_is_refused_before_anything_runs():
    ran = []

    def stuck(rank, ranks, microbatches, chunks):
        """Rank 1 goes back on microbatch 0 only after the forward of 1, which rank 0 does after its own backward of 0."""
        order = [("F", 0), ("B", 0), ("F", 1), ("B", 1)] if rank == 0 else [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
        for kind, m in order:
            yield Action(rank, kind, m)

    class Watched(Layers):
        def forward(self, x):
            ran.append(1)
            return super().forward(x)

    error = refused(ScheduleError, "deadlock|wait", Watched, schedule=stuck)
    assert error.problem == "deadlock" and set(error.waiting) == {0, 1}
    assert not ran


def test_a_schedule_that_leaves_something_out_is_refused():
    whole = make("1f1b", 2, 2)
    less = Schedule((whole.rows[0][:-1], whole.rows[1]), "less")
    assert refused(ScheduleError, "0B1", Layers, schedule=less).problem == "missing"


@pytest.mark.parametrize("schedule", [None, 3])
def test_what_is_no_schedule_is_refused(schedule):
    error = refused(PlanError, f"schedule={schedule}", Layers, schedule=schedule)
    assert error.field == "schedule" and "1f1b" in error.hint


@pytest.mark.parametrize("recompute", ["no", 1, None])
def test_recompute_is_a_yes_or_a_no(recompute):
    assert refused(PlanError, "recompute=", Layers, recompute=recompute).field == "recompute"


def test_a_generator_that_has_another_number_of_microbatches_is_refused():
    def three(rank, ranks, microbatches, chunks):
        return make("1f1b", ranks, 3).rows[rank]

    error = refused(PlanError, "three was asked for 2 microbatches, and its actions are of 3", Layers, schedule=three)
    assert error.field == "microbatches"
    emu.launch(trains, emu.Mesh(pp=2), args=(Layers, {"schedule": three, "microbatches": 3}, rows(6)))  # the control


def test_a_schedule_for_other_numbers_is_refused_with_both():
    refused(PlanError, "3 ranks and 2 microbatches.*pp=2", lambda: Layers(3), schedule=make("1f1b", 3, 2))
    refused(PlanError, "5 microbatches.*2 microbatches", Layers, schedule=make("1f1b", 2, 5))


# What a model must be.


def test_a_model_whose_code_reads_what_another_stage_computes():
    class Reads(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
                if x.sum().item() > 1e9:
                    break
            return x

    refused(EmuError, "reads numbers of the output of layers.0, which another stage computes", Reads)


def test_modules_that_are_called_in_another_order_than_registered():
    class Backwards(Layers):
        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    error = refused(EmuError, "layers.3", Backwards)
    assert "registered" in error.hint

    class Returns(Layers):
        def forward(self, x):
            for i in (0, 2, 1, 3):
                x = self.layers[i](x)
            return x

    refused(EmuError, "layers.1", Returns)


def test_a_layer_that_needs_two_tensors_across_a_boundary():
    class Add(nn.Linear):
        def forward(self, x, other):
            return super().forward(x) + other

    class Skips(Layers):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Add(3, 3) for _ in range(4))

        def forward(self, x):
            before = x
            for layer in self.layers:
                before, x = x, layer(x, before)
            return x

    error = refused(EmuError, r"layers.2 needs the output of layers.0, which lies before stage", Skips)
    assert "one tensor" in error.hint


def test_a_layer_that_returns_several_tensors():
    class Both(nn.Linear):
        def forward(self, x):
            return super().forward(x[0]), x[1]

    class Pairs(Layers):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Both(3, 3) for _ in range(4))

        def forward(self, x):
            x = (x, x)
            for layer in self.layers:
                x = layer(x)
            return x[0]

    error = refused(
        EmuError, "the first argument of layers.2 is no tensor of activations that stage 0 could send", Pairs
    )
    assert "first argument" in error.hint


def test_a_stage_called_outside_its_pipeline():
    def program(rank):
        Pipeline(Layers(), rank, microbatches=2).model(torch.zeros(1, 3))

    with pytest.raises(EmuError, match=r"layers.0 lies on stage 0 of a pipeline, and was called outside of it"):
        emu.launch(program, emu.Mesh(pp=2))


def test_the_loss_of_a_stage():
    def program(rank):
        Pipeline(Layers(), rank, microbatches=2).loss_sum(torch.zeros(1, 3), torch.zeros(1))

    with pytest.raises(EmuError, match="no loss of its own") as caught:
        emu.launch(program, emu.Mesh(pp=2))
    assert ".backward(batch)" in caught.value.hint


# What goes wrong while it runs.


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_in_the_middle_ends_all(schedule, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("in the middle")

    class Faulty(nn.Linear):
        count = 0

        def forward(self, x):
            self.count += 1
            if self.count == 2 and where == "forward":
                raise ZeroDivisionError("in the middle")
            out = super().forward(x)
            return Fails.apply(out) if self.count == 2 else out

    class Model(Layers):
        def __init__(self):
            super().__init__(8)
            self.layers[-1] = Faulty(3, 3)

    for order in ("program", 1):
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            emu.launch(
                trains,
                emu.Mesh(pp=2),
                args=(Model, {"schedule": schedule, "microbatches": 4}, rows(8)),
                order=order,
            )


def test_after_a_failure_the_next_batch_is_as_if_nothing_had_been():
    data, bad = rows(), emu.Batch(rows().x[:, :2], rows().y)

    def program(rank, fails):
        pipe = Pipeline(Layers(), rank, microbatches=2)
        if fails and rank.mesh.axes["pp"] == 1:
            with pytest.raises(RuntimeError):
                pipe.backward(bad)
        return pipe.backward(data), pipe.gather_gradients()

    torch.manual_seed(0)
    template = Layers().state_dict()
    Layers_init = Layers.__init__

    def same(self, n=4):
        Layers_init(self, n)
        self.load_state_dict(template)

    Layers.__init__ = same
    try:
        (loss, right), (after, found) = (
            emu.launch(program, emu.Mesh(pp=1), args=(f,)).results[0] for f in (False, True)
        )
    finally:
        Layers.__init__ = Layers_init
    assert torch.equal(loss, after) and all(torch.equal(found[k], right[k]) for k in right)


def test_a_pipeline_whose_batch_failed_in_the_middle_takes_no_other(monkeypatch):
    """What stages had sent each other would be taken for the next batch's."""

    def program(rank):
        pipe = Pipeline(Layers(), rank, microbatches=2)
        with pytest.raises(ZeroDivisionError):
            pipe.backward(rows())
        with pytest.raises(EmuError, match="failed in the middle") as caught:
            pipe.backward(rows())
        assert "anew" in caught.value.hint

    monkeypatch.setattr(executor.Execution, "run", lambda self: 1 / 0)
    emu.launch(program, emu.Mesh(pp=2))


def test_ranks_with_other_batches_are_noticed():
    """Ranks of one pipeline need the same rows; other shapes would go into buffers of the wrong size."""

    def program(rank):
        data = rows(4 if rank == 0 else 6)
        return Pipeline(Layers(), rank, microbatches=2).backward(data)

    with pytest.raises((EmuError, ValueError)):  # the model itself may be the first to see it
        emu.launch(program, emu.Mesh(pp=2))


def test_ranks_that_run_other_schedules_are_noticed():
    def program(rank):
        how = {"microbatches": 2} if rank == 0 else {"microbatches": 4}
        return Pipeline(Layers(), rank, **how).backward(rows(4))

    with pytest.raises((EmuError, ValueError)):
        emu.launch(program, emu.Mesh(pp=2))


def test_a_rank_that_leaves_is_named():
    def program(rank):
        pipe = Pipeline(Layers(), rank, microbatches=2)
        if rank == 0:
            pipe.backward(rows())

    with pytest.raises(Deadlock, match="rank 1 finished"):
        emu.launch(program, emu.Mesh(pp=2))


@pytest.mark.parametrize(
    "microbatches", [0, -1, 1.5, [], [2, 1], [5, -1], True, [1.0, 3.0], ["a", "b"], "4", "13", [True, 3], {2}]
)
def test_microbatches_that_do_not_make_up_the_rows(microbatches):
    def program(rank):
        Pipeline(Layers(), rank, microbatches=2).backward(rows(), microbatches=microbatches)

    with pytest.raises(EmuError, match="microbatches") as caught:
        emu.launch(program, emu.Mesh(pp=2))
    assert caught.value.hint


def test_another_number_of_microbatches_is_the_generators_to_say():
    """And of a finished schedule it is an error that names both."""
    case = Case((3, 3, 3), {"pp": 2}, make("1f1b", 2, 2), rows=((2, 2),))

    def program(rank):
        case.pipeline(rank).backward(rows(), microbatches=3)

    with pytest.raises(PlanError, match=r"2 microbatches.*3 microbatches"):
        emu.launch(program, emu.Mesh(pp=2))


def test_learned_positions_cannot_begin_a_stage():
    """Their first argument is no activation: it follows from the shape of the batch."""
    config = Config(layers=2, width=4, heads=2, vocab=5, seq=3)
    data = emu.Batch(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long))
    refused(EmuError, "positions", lambda: GPT(config), data=data, stages=["positions"])
