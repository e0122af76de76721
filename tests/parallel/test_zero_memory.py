"""What every stage keeps on a device, to the byte, and how much of a fully sharded model is whole at a time."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.parallel.gathering import Gathering
from emu.parallel.gradients import Gradients
from emu.parallel.grouping import units
from emu.parallel.shards import Shards
from emu.spmd import BufferInFlight
from emu.trace.events import Mark

from . import training
from .test_flat import Vector
from .training import Made

STATES = ("parameters", "gradients", "optimizer")
BYTES = {None: (4, 4, 8), "bf16-mixed": (2, 2, 12)}  # an element: parameter, gradient, and all that Adam keeps


def ceil(a, b):
    return -(-a // b)


def states_bytes(vectors, ranks, zero, precision, rank=0):
    """The closed form: bytes by category, of vectors of so many elements that are cut over so many ranks."""
    param, grad, optimizer = BYTES[precision]
    whole, part = sum(vectors), sum(ceil(n, ranks) for n in vectors)
    if precision is None and zero in (1, 2):  # the optimizer works on views of whole parameters, which have no padding
        real = sum(min(max(n - rank * ceil(n, ranks), 0), ceil(n, ranks)) for n in vectors)
    else:
        real = part
    return {
        "parameters": param * (part if zero == 3 else whole),
        "gradients": grad * (part if zero >= 2 else whole),
        "optimizer": optimizer * (real if zero >= 1 else whole),
    }


def held_bytes(rank, make, data, how, kind=torch.optim.Adam):
    """What lives on a rank's device after a step and another backward."""
    dist = emu.DataParallel(make(), rank, "dp", **how)
    optimizer = dist.optimizer(kind, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        dist.backward(data)
        if not step:
            optimizer.step()
    return rank._device.ledger.by_category


def measured(make, data, ranks, how):
    results = emu.launch(held_bytes, emu.Mesh(dp=ranks), args=(make, data, how)).results
    for held in results:
        assert held["communication"] == held["temporary"] == 0
    return [{category: held[category] for category in STATES} for held in results]


def vector_of(n):
    return lambda: Vector(n).float()


def ones(n, rows=8):
    return emu.Batch(torch.ones(rows, n), torch.zeros(rows, dtype=torch.long))


@pytest.mark.parametrize(
    ("n", "ranks", "totals"),
    [
        (1000, 8, (16_000, 5_500, 3_750, 2_000)),  # 16, 5.5, 3.75 and 2 bytes an element
        (10, 4, (160, 76, 62, 48)),  # scenario 60: shards of 3
    ],
)
def test_mixed_precision_adam_keeps_what_the_paper_says(n, ranks, totals):
    for zero, total in enumerate(totals):
        expected = states_bytes([n], ranks, zero, "bf16-mixed")
        assert sum(expected.values()) == total
        how = {"zero": zero, "precision": "bf16-mixed"}
        assert measured(vector_of(n), ones(n), ranks, how) == [expected] * ranks


@given(
    training.models,
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from([None, "bf16-mixed"]),
    st.booleans(),
)
@example(Made((3, 5, 3)), 5, 3, "bf16-mixed", False)
def test_every_ranks_bytes_are_the_closed_form_with_shards_rounded_up(made, ranks, zero, precision, whole_backward):
    elements = {name: p.numel() for name, p in made.model().named_parameters()}
    vectors = [sum(elements.values())]
    if zero == 3:
        vectors = [sum(elements[name] for name in unit.names) for unit in units(made.model())]
    how = {"zero": zero, "precision": precision}
    if zero == 3:
        how["reshard_after_forward"] = not whole_backward  # at rest it makes no difference
    found = measured(made.model, made.batch(ranks + 1), ranks, how)
    assert found == [states_bytes(vectors, ranks, zero, precision, rank) for rank in range(ranks)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_what_memory_is_for_is_known_from_the_start(zero, precision):
    """A model in another dtype is new memory, and parameters all the same; what the module held before is gone."""

    def program(rank):
        dist = emu.DataParallel(Vector(10).float(), rank, "dp", zero=zero, precision=precision)
        return {category: n for category, n in rank._device.ledger.by_category.items() if n}, dist

    param, master = (4, 0) if precision is None else (2, 4)
    expected = {"parameters": param * (3 if zero == 3 else 10), "optimizer": master * (3 if zero else 10)}
    for held, _ in emu.launch(program, emu.Mesh(dp=4)).results:
        assert held == {category: n for category, n in expected.items() if n}


@pytest.mark.parametrize(("zero", "replicate"), [(1, 2), (2, 3), (3, 2), (3, 6), (3, 1)])
def test_hsdp_cuts_over_a_group_and_an_owner_keeps_all_of_a_vector(zero, replicate):
    how = {"zero": zero, "replicate": replicate, "precision": "bf16-mixed"}
    expected = states_bytes([100], 6 // replicate, zero, "bf16-mixed")
    assert measured(vector_of(100), ones(100), 6, how) == [expected] * 6
    owned = measured(vector_of(100), ones(100), 6, {**how, "by_owner": True})
    for r, held in enumerate(owned):
        mine = states_bytes([100], 1, zero, "bf16-mixed")
        none = states_bytes([100], 10**9, zero, "bf16-mixed")
        for category in STATES:
            cut = none[category] < mine[category]
            assert held[category] == (0 if cut and r % (6 // replicate) else mine[category])


def test_bytes_that_are_not_the_closed_form_are_seen(monkeypatch):
    how = {"zero": 2, "precision": "bf16-mixed"}
    right = [states_bytes([10], 4, 2, "bf16-mixed")] * 4
    assert measured(vector_of(10), ones(10), 4, how) == right
    collect = Gradients.collect

    def keeps_whole_gradients(self):  # what scenario 60 is about
        whole = self._whole
        collect(self)
        self.kept = whole

    monkeypatch.setattr(Gradients, "collect", keeps_whole_gradients)
    assert measured(vector_of(10), ones(10), 4, how) != right


# How much is whole at a time.


class Equal(nn.Module):
    """Layers of equal size, and no parameters beside them. x: [rows, width]."""

    def __init__(self, layers, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * x).sum()


UNIT_BYTES = 4 * (6 * 6 + 6)


def in_phases(rank, layers, how):
    dist = emu.DataParallel(Equal(layers), rank, "dp", zero=3, **how)
    for step in range(2):
        rank.mark(f"forward {step}")
        loss = dist.loss_sum(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))
        rank.mark(f"backward {step}")
        loss.backward()
        rank.mark(f"finish {step}")
        dist.finish(4)
        dist.zero_grad()
        rank.mark(f"end {step}")


def whole_units(layers, how, ranks=4):
    """The most units that are whole at once, by phase; the worst of ranks and steps. After the step: what is left."""
    run = emu.launch(in_phases, emu.Mesh(dp=ranks), args=(layers, how))
    shards = layers * 4 * ceil(6 * 6 + 6, ranks)
    worst = dict.fromkeys(("forward", "backward", "finish"), 0.0)
    for rank in range(ranks):
        at = {e.name: i for i, e in enumerate(run.trace[rank]) if isinstance(e, Mark)}
        indices, lines = run.memory.series(rank)
        for step in range(2):
            ends = [at[f"{phase} {step}"] for phase in (*worst, "end")]
            for phase, start, end in zip(worst, ends, ends[1:]):
                held = [n for i, n in zip(indices, lines["parameters"]) if start <= i < end]
                worst[phase] = max([worst[phase], *((n - shards) / UNIT_BYTES for n in held)])
    return worst


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_unit_and_those_that_are_on_their_way_are_whole(prefetch, ranks):
    found = whole_units(8, {"prefetch": prefetch}, ranks)  # scenario 62: 8 layers, and 2 units with depth 1
    assert found == {"forward": 1 + prefetch, "backward": 1 + prefetch, "finish": 0}


def test_no_more_units_are_whole_than_there_are():
    assert whole_units(2, {"prefetch": 3}) == {"forward": 2, "backward": 2, "finish": 0}


def test_without_resharding_all_are_whole_in_between():
    found = whole_units(5, {"reshard_after_forward": False})
    assert found == {"forward": 5, "backward": 5, "finish": 0}


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(0, 4))
def test_however_many_there_are(layers, prefetch):
    found = whole_units(layers, {"prefetch": prefetch}, 2)
    assert found == {"forward": min(1 + prefetch, layers), "backward": min(1 + prefetch, layers), "finish": 0}


def gathers_as_far_as_it_can(self, units):  # the host runs ahead, without a limit: 8 units, not 2
    for unit in self._order:
        unit.gather()


def frees_nothing(self):
    pass


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong"),
    [(Gathering, "_fetch", gathers_as_far_as_it_can), (Shards, "free", frees_nothing)],
)
def test_units_that_pile_up_are_seen(monkeypatch, owner, attribute, wrong):
    monkeypatch.setattr(owner, attribute, wrong)
    found = whole_units(8, {"prefetch": 1})
    assert max(found.values()) > 4


def test_a_unit_that_is_used_or_freed_before_it_is_there_is_told(monkeypatch, recwarn):
    def arrives_at_once(self):
        if not self.here:
            self.gather()
            self.works = self._coming  # never waited for
            self._coming = None
            self._bring()

    monkeypatch.setattr(Shards, "arrive", arrives_at_once)
    with pytest.raises(BufferInFlight):
        whole_units(3, {"prefetch": 1})
    assert not [str(w.message) for w in recwarn if "silenced" in str(w.message)]  # and nothing else goes wrong after it


# Gradients on their way.


def beside_bytes(layers, how):
    """The most that lives beside parameters, gradients and states in the second step's backward: copies under way."""

    def program(rank):
        dist = emu.DataParallel(Equal(layers), rank, "dp", precision="bf16-mixed", **how)
        for step in range(2):
            dist.zero_grad()
            loss = dist.loss_sum(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))
            rank.mark(f"backward {step}")
            loss.backward()
            rank.mark(f"finish {step}")
            dist.finish(8)

    run = emu.launch(program, emu.Mesh(dp=4))
    at = {e.name: i for i, e in enumerate(run.trace[0]) if isinstance(e, Mark)}
    indices, lines = run.memory.series(0)
    both = [a + b for a, b in zip(lines["temporary"], lines["communication"])]
    return max(n for i, n in zip(indices, both) if at["backward 1"] <= i < at["finish 1"])


IN_BUCKETS = [
    {"zero": 0, "bucket_bytes": 84},
    {"zero": 1, "bucket_bytes": 84},
    {"zero": 2, "bucket_bytes": 84},
    {"zero": 3},
]


@pytest.mark.parametrize("how", IN_BUCKETS, ids=str)
def test_copies_in_another_dtype_do_not_pile_up_until_the_step_ends(how):
    assert beside_bytes(4, how) == beside_bytes(9, how)


@pytest.mark.parametrize("how", IN_BUCKETS[:2], ids=str)
def test_copies_that_pile_up_are_seen(monkeypatch, how):
    monkeypatch.setattr(Gradients, "takes_more", False)
    assert beside_bytes(9, how) > 1.5 * beside_bytes(4, how)
