"""Every stage, shape and split of data parallelism, to the bit: training on ranks is training on one device (exact tier)."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import emu.parallel.optimizer as optimizing
from emu.parallel.gradients import Gradients
from emu.parallel.shards import Shards

from . import training
from .training import ADAMW, SGD, Made, accumulates, exactly, first_difference, on_one_device, on_ranks, same_on_grid

INF = float("inf")


@st.composite
def cases(draw, most_ranks=12):
    made = draw(training.models)
    size = draw(st.integers(1, most_ranks))
    sizes = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    sizes[draw(st.integers(0, size - 1))] += 0 if any(sizes) else 1
    return {
        "made": made,
        "sizes": sizes,
        "how": draw(training.options(size, made.names(), [None, "bf16-mixed"])),
        "rule": training.fits(made.names(), draw(training.rules)),
        "microbatches": draw(st.integers(1, 3)),
        "steps": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(["program", 1, 2])),
    }


ODD = Made((3, 5, 3))


def case(how, sizes=(2, 0, 1, 3), rule=ADAMW, made=ODD, microbatches=1, steps=2, order="program"):
    return {
        "made": made,
        "sizes": list(sizes),
        "how": how,
        "rule": rule,
        "microbatches": microbatches,
        "steps": steps,
        "order": order,
    }


def differs(case, program=on_ranks, *more):
    made, sizes, rule = case["made"], case["sizes"], case["rule"]
    data = [made.batch(sum(sizes), seed) for seed in range(2)]
    right = exactly(on_one_device, 0, made, data, rule, case["steps"])
    args = (made, data, rule, case["steps"], sizes, case["how"], case["microbatches"], *more)
    ours = exactly(program, len(sizes), *args, order=case["order"])
    return first_difference(ours, right, loss=same_on_grid)


@given(cases())
@example(case({"zero": 3, "replicate": 4}))  # (n, 1)
@example(case({"zero": 2, "replicate": 2, "by_owner": True}, rule=SGD._replace(clip=0.01)))
@example(case({"zero": 1, "replicated": ["*"]}))
@example(case({"zero": 3}, sizes=[1] * 12, made=Made((1, 3))))  # six elements over twelve ranks
def test_training_on_ranks_is_training_on_one_device_to_the_bit(case):
    assert differs(case) is None


@pytest.mark.exhaustive
@settings(max_examples=600)
@given(cases())
def test_training_on_ranks_is_training_on_one_device_to_the_bit_at_length(case):
    assert differs(case) is None


# Scenario 4: what no_sync is put around.


@given(
    cases(most_ranks=6),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.sampled_from(["both", "backward", "forward"]),
)
@example(case({"zero": 0}), [False, False, False, True], "both")
@example(case({"zero": 1}), [True, False, True, False], "both")  # a sum over ranks, and then more that must be summed
@example(case({"zero": 3, "replicate": 2}), [False, True, False], "backward")
def test_wherever_no_sync_stands_gradients_are_those_of_the_whole_batch(case, syncs, form):
    assert differs(case, accumulates, syncs, form) is None


# What is nearly right, and seen.

_norm, _collect = optimizing.global_norm, Gradients.collect


def keeps_its_sum_on_every_rank(self):  # the sum of ranks, which more is added to, is counted by all of them
    self.collect()
    self._summed = False


def overwrites_its_part(self):  # scenario 9
    if self._going is not None:
        self._part = None
    _collect(self)


def measures_its_own_shard(given, vectors, norm, *where):  # scenario 15
    if norm == 2.0:
        return sum((g * g).sum() for g in given).sqrt()
    return max((g.abs().amax() for g in given if g.numel()), default=torch.zeros(()))


def counts_replicas(given, vectors, norm, *where):
    return _norm(given, vectors, norm, *where) * 2.0**0.5


def divides_late_and_by_what_is_its_own(self, divisor):
    self.collect()
    self.own().div_(max(divisor - self.shards.place.group.rank, 1))


def never_refreshes(self):
    return None


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong", "seen"),
    [
        (Gradients, "before", keeps_its_sum_on_every_rank, case({"zero": 1}, microbatches=1)),
        (Gradients, "collect", overwrites_its_part, case({"zero": 2}, microbatches=3)),
        (Gradients, "collect", overwrites_its_part, case({"zero": 3}, sizes=[3], microbatches=3)),
        (optimizing, "global_norm", measures_its_own_shard, case({"zero": 3}, rule=SGD._replace(clip=0.01))),
        (optimizing, "global_norm", measures_its_own_shard, case({"zero": 1}, rule=SGD._replace(clip=0.01, norm=INF))),
        (optimizing, "global_norm", counts_replicas, case({"zero": 1, "replicate": 2}, rule=SGD._replace(clip=0.01))),
        (Gradients, "finish", divides_late_and_by_what_is_its_own, case({"zero": 2})),
        (Shards, "refresh", never_refreshes, case({"zero": 1})),
        (Shards, "refresh", never_refreshes, case({"zero": 3, "precision": "bf16-mixed"})),
    ],
)
def test_what_is_nearly_right_is_seen(monkeypatch, owner, attribute, wrong, seen):
    program, more = (accumulates, ([True, True], "both")) if attribute == "before" else (on_ranks, ())
    assert differs(seen, program, *more) is None
    monkeypatch.setattr(owner, attribute, wrong)
    assert differs(seen, program, *more) is not None
