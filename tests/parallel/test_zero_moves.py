"""What a step sends, from the trace, to the element: 2P, 2P, 2P and 3P times (1 - 1/N), in the dtype of each role."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import emu
from emu.parallel.shards import Shards
from emu.spmd import Precision
from emu.trace.events import Collective

from . import training
from .programs import SMALL
from .training import ADAMW, Made, accumulates

# How often an element of the message goes over a link, but for the share that a rank keeps to itself.
TIMES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "reduce": 1, "broadcast": 1}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}
DECISIONS = ("loss", "used parameters", "gradient norm")  # a number or two, for all ranks to know


def stepping(rank, made, data, how, microbatches=1):
    dist = emu.DataParallel(made.model(), rank, "dp", **how)
    optimizer = dist.optimizer(ADAMW.kind, **ADAMW.options)
    for step in range(2):
        rank.mark(f"step {step}")
        dist.backward(data, microbatches=microbatches)
        optimizer.step()
    rank.mark("end")


def sent(run, start="step 1", end="end"):
    """Elements that all ranks together send, by (kind, dtype)."""
    found: Counter = Counter()
    for _, e in run.trace.window(start, end).of(Collective):
        if e.name not in DECISIONS:
            n = len(e.members)
            found[e.kind, e.dtype] += Fraction(TIMES[e.kind] * e.bytes * (n - 1), ITEM_BYTES[e.dtype] * n)
    return +found


def elements(made):
    return sum(p.numel() for p in made.model().parameters())


def steps(made, ranks, how, microbatches=1):
    args = (made, made.batch(2 * ranks), how, microbatches)
    return emu.launch(stepping, emu.Mesh(dp=ranks), args=args)


def moved(made, ranks, how, microbatches=1):
    return sent(steps(made, ranks, how, microbatches))


@given(training.models, st.integers(1, 8), st.integers(0, 3), st.booleans(), st.integers(0, 3))
@example(Made((1, 3)), 8, 3, False, 1)  # 6 elements over 8 ranks
@example(Made((3, 5, 3)), 4, 1, False, 0)
def test_a_step_moves_2p_2p_2p_3p_elements_but_for_a_ranks_own_share(made, ranks, zero, by_owner, prefetch):
    how = {"zero": zero, "prefetch": prefetch, "by_owner": by_owner and zero > 0, "bucket_bytes": 200}
    p = elements(made)
    total = sum(moved(made, ranks, how).values())
    assert total == (3 if zero == 3 else 2) * p * (ranks - 1)  # by rank on average: times p (1 - 1/ranks)


@pytest.mark.parametrize(("zero", "times"), [(0, (2, 2)), (1, (2, 2)), (2, (2, 4)), (3, (3, 9))])
def test_accumulation_moves_gradients_once_where_they_stay_whole_and_else_every_time(zero, times):
    made = Made(SMALL)
    for microbatches, expected in zip((1, 3), times):
        assert sum(moved(made, 4, {"zero": zero}, microbatches).values()) == expected * elements(made) * 3


def test_parameters_that_stay_whole_between_forward_and_backward_are_gathered_once():
    made = Made(SMALL)
    how = {"zero": 3, "reshard_after_forward": False}
    assert sum(moved(made, 4, how).values()) == 2 * elements(made) * 3
    assert sum(moved(made, 4, how, 3).values()) == 6 * elements(made) * 3


@settings(max_examples=12)
@given(training.models, st.sampled_from([(1, 4), (2, 2), (4, 1), (2, 3), (3, 2)]), st.integers(1, 3), st.booleans())
def test_hsdp_moves_within_a_group_what_zero_does_and_a_shard_across(made, shape, zero, by_owner):
    replicate, size = shape
    p, run = elements(made), steps(made, replicate * size, {"zero": zero, "replicate": replicate, "by_owner": by_owner})
    within = (3 if zero == 3 else 2) * p * (size - 1) * replicate
    across = 2 * p * (replicate - 1)
    assert sum(sent(run).values()) == within + across
    if replicate > 1:
        labels = Counter(e.group for _, e in run.trace.window("step 1", "end").of(Collective) if e.name != "loss")
        assert set(labels) == {"dp.shard", "dp.replicate"}


@pytest.mark.parametrize("by_owner", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("roles", "param", "reduce"),
    [
        ("bf16-mixed", "bfloat16", "float32"),
        (Precision(param="bf16", grad="bf16", reduce="bf16"), "bfloat16", "bfloat16"),
        (None, "float32", "float32"),
    ],
)
def test_parameters_move_in_their_dtype_and_gradients_in_that_of_reductions(zero, by_owner, roles, param, reduce):
    if by_owner and not zero:
        return
    made = Made((3, 5, 3))
    p = elements(made)
    found = moved(made, 4, {"zero": zero, "precision": roles, "by_owner": by_owner})
    if not zero:
        assert found == {("all_reduce", reduce): 2 * p * 3}
        return
    kinds = ("broadcast", "reduce") if by_owner else ("all_gather", "reduce_scatter")
    gathers = 2 if zero == 3 else 1
    assert found == {(kinds[0], param): gathers * p * 3, (kinds[1], reduce): p * 3}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("form", "reductions"), [("both", 1), ("backward", 1), ("forward", 4)])
def test_without_sync_there_is_one_reduction_a_step_of_the_bytes_of_the_parameters(zero, form, reductions):
    """Scenario 4: 4 microbatches of 2 rows over 2 ranks. What counts is where backward runs."""
    made = Made((3, 5, 3))

    def program(rank):
        rank.mark("start")
        accumulates(rank, made, [made.batch(16)], ADAMW, 2, [8, 8], {"zero": zero, "units": []}, 1, syncs, form)
        rank.mark("end")

    syncs = [False, False, False, True]
    run = emu.launch(program, emu.Mesh(dp=2))
    kinds = ("all_reduce", "reduce_scatter")
    found = [e for _, e in run.trace.of(Collective, rank=0) if e.kind in kinds and e.name in ("bucket 0", "root")]
    assert len(found) == 2 * reductions  # two steps
    assert all(e.bytes == 4 * elements(made) for e in found)


def test_padding_that_is_sent_and_a_gather_too_many_are_seen(monkeypatch):
    made = Made((3, 5, 3))
    free = Shards.free

    def gathers_again(self):
        free(self)
        if self._shard is not None and self.place.stage == 3 and not self.here:
            self.arrive()
            free(self)

    right = 3 * elements(made) * 3
    assert sum(moved(made, 4, {"zero": 3}).values()) == right
    monkeypatch.setattr(Shards, "free", gathers_again)
    assert sum(moved(made, 4, {"zero": 3}).values()) > right
    monkeypatch.undo()

    def spreads_padding(self, own, whole):
        self.place.group.all_gather(own.new_zeros(self.slots), name=self.name)
        return spread(self, own, whole)

    spread = Shards._spread
    monkeypatch.setattr(Shards, "_spread", spreads_padding)
    assert sum(moved(made, 4, {"zero": 1}).values()) > 2 * elements(made) * 3
