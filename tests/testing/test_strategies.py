"""The public strategies: what they draw is possible, every option occurs, and it shrinks to what is simplest."""

import subprocess
import sys
from itertools import permutations
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

import emu
from emu import testing
from emu.parallel import Batch
from emu.spmd import EmuError
from emu.testing.choices import AXES, CHOICES, FOLDS


def collected(strategy, most):
    """What a strategy draws, the same each time."""
    drawn = []

    @settings(
        max_examples=most, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(value):
        drawn.append(value)

    collect()
    return drawn


def test_meshes_have_all_axes_in_any_order_and_folds_that_divide():
    drawn = collected(testing.meshes(max_ranks=6), 300)
    assert all(mesh.size <= 6 and set(mesh.axes) == set(AXES) for mesh in drawn)
    assert {mesh.size for mesh in drawn} == set(range(1, 7))
    assert len({tuple(mesh.axes) for mesh in drawn}) >= 20  # of 24
    assert {(mesh.folds.get("ep", 1), mesh.folds.get("etp", 1)) for mesh in drawn} >= {(1, 1), (2, 1), (1, 2), (2, 2)}


def test_meshes_may_be_bounded():
    drawn = collected(testing.meshes(max_ranks=4, axes=("dp", "tp"), folds=False), 60)
    assert all(set(mesh.axes) == {"dp", "tp"} and mesh.size <= 4 and not mesh.folds for mesh in drawn)


def test_every_option_of_a_plan_occurs():
    deep = testing.plans(4, axes=("pp",), microbatches=[4])  # as many as some schedules need
    bounds = (testing.plans(), 100), (deep, 150), (testing.plans(4, axes=("cp", "tp")), 80)
    drawn = [plan for strategy, n in bounds for plan in collected(strategy, n)]
    many = settings(max_examples=5000, deadline=None, database=None, derandomize=True)

    def occurs(what):
        # Which are drawn depends a little on what is imported: hypothesis also tries constants that it finds there.
        return any(map(what, drawn)) or find(st.one_of(*(strategy for strategy, _ in bounds)), what, settings=many)

    for option, values in CHOICES.items():
        if option in emu.Plan.__dataclass_fields__:
            assert {getattr(plan, option) for plan in drawn} <= set(values), option
            assert all(occurs(lambda plan, o=option, v=v: getattr(plan, o) == v) for v in values), option
    for sizes in FOLDS.values():
        assert prod(sizes) > 4 or occurs(lambda plan, s=sizes: (plan.ep, plan.etp) == s), sizes
    for axis in AXES:
        assert all(occurs(lambda plan, a=axis, n=n: plan.axes().get(a, 1) == n) for n in (1, 2, 3)), axis
    for pair in permutations(AXES, 2):  # in either order
        assert occurs(lambda plan, pair=pair: tuple(axis for axis in plan.axes() if axis in pair) == pair), pair


def test_plans_may_be_bounded():
    for plan in collected(testing.plans(max_ranks=4, axes=("dp", "tp"), zero=[3], sp=[False]), 60):
        assert set(plan.axes()) <= {"dp", "tp"} and plan.zero == 3 and not plan.sp


def test_all_shrinks_to_what_is_simplest():
    few = settings(max_examples=20, deadline=None, derandomize=True, database=None)
    assert find(testing.plans(max_ranks=2), lambda plan: True, settings=few) == emu.Plan(
        "", precision="fp32", global_batch=2, seq=5
    )
    assert find(testing.meshes(), lambda mesh: True, settings=few).size == 1
    factory = find(testing.models(emu.Plan("dp=2")), lambda model: True, settings=few)
    assert factory.config.layers == 1 and not factory.config.experts and factory.seed == 0
    batch = find(testing.batches(factory, emu.Plan("dp=2", global_batch=3, seq=4)), lambda batch: True, settings=few)
    assert batch.tokens == 12


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: testing.plans(max_ranks=0), "max_ranks=0"),
        (lambda: testing.plans(axes=("xp",)), "no axis|an axis 'xp'"),
        (lambda: testing.plans(speed=[1]), "an option 'speed'"),
        (lambda: testing.plans(zero=[]), "zero=\\[\\] lists no values"),
        (lambda: testing.plans(fold=["ep9"]), "no fold 'ep9'"),
        (lambda: testing.plans(max_ranks=1, sp=[True], axes=("dp",), fold=["ep4"]), "none of fold"),
        (lambda: testing.plans(zero=[0, 7]), "there is no zero=7"),
        (lambda: testing.plans(replicate=[0]), "replicate=0"),
        (lambda: testing.plans(dp=[0]), "axis 'dp' has size 0"),
        (lambda: testing.plans(dp=["2"]), "axis 'dp' has size '2'"),
        (lambda: testing.plans(max_ranks=8, dp=[9]), "takes more than 8 ranks"),
        (lambda: testing.plans(axes=("dp",), fold=["ep4"], max_ranks=3), "none of fold=.*: "),
        (lambda: testing.plans(axes="dp"), "axes='dp' is a text"),
        (lambda: testing.meshes(axes="dp,tp"), "axes='dp,tp' is a text"),
        (lambda: testing.meshes(axes=("dp", "dp")), "twice"),
        (lambda: testing.meshes(axes=("dp", "ep")), "'ep' is no axis, but a fold"),
        (lambda: testing.meshes(axes=("on",)), "'on' is no name"),
        (lambda: testing.meshes(axes=(3,)), "3 is no name"),
        (lambda: testing.batches(torch.nn.Linear(2, 2)), "vocabulary"),
    ],
)
def test_what_cannot_be_drawn_is_told(wrong, words):
    with pytest.raises(EmuError, match=words):
        find(wrong(), lambda value: True)


def test_batches_are_uneven_and_learn_something():
    factory = testing.ModelFactory(find(testing.models(), lambda model: True).config)
    drawn = collected(testing.batches(factory, emu.Plan("dp=2", global_batch=3, seq=6)), 60)
    assert all(batch.x.shape == batch.y.shape == (3, 6) and 0 < batch.tokens <= 18 for batch in drawn)
    assert any(len(set((batch.y != -100).sum(1).tolist())) == 3 for batch in drawn)  # rows of different lengths
    assert any(not bool((batch.y != -100).any(1).all()) for batch in drawn)  # rows of which nothing counts


def test_a_model_has_a_layer_for_every_stage_and_an_expert_for_every_rank():
    few = settings(max_examples=5, deadline=None, derandomize=True, database=None)
    deep = emu.Plan("pp=4", schedule="interleaved", chunks=2, microbatches=4)
    assert find(testing.models(deep), lambda model: True, settings=few).config.layers == 8
    wide = emu.Plan("dp=4", ep=4)
    assert find(testing.models(wide), lambda model: True, settings=few).config.experts == 4


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("replicate", [3]),
        ("prefetch", [5]),
        ("chunks", [1, 3]),
        ("microbatches", [7]),
        ("seq", [64]),
        ("checkpoint", ["every:3"]),
        ("dp", [5]),
    ],
)
def test_values_that_are_not_of_the_list_may_be_drawn_where_plans_have_them(option, values):
    more = {"replicate": {"dp": [3], "zero": [1]}, "prefetch": {"zero": [3]}}.get(option, {})
    drawn = collected(testing.plans(axes=("dp",), **more, **{option: values}), 5)
    read = (lambda plan: plan.axes().get("dp", 1)) if option == "dp" else lambda plan: getattr(plan, option)
    assert {read(plan) for plan in drawn} <= set(values)


def test_meshes_have_axes_of_any_name():
    drawn = collected(testing.meshes(max_ranks=4, axes=["rows", "columns"]), 20)
    assert all(set(mesh.axes) == {"rows", "columns"} for mesh in drawn)


class Short(torch.nn.Module):
    """A model of short sequences."""

    def __init__(self):
        super().__init__()
        self.config = emu.models.Config(layers=1, width=4, heads=2, vocab=7, seq=3)


@pytest.mark.parametrize("plan", [None, emu.Plan("dp=2", seq=40)])
def test_a_model_and_a_batch_fit_with_a_plan_and_without(plan):
    strategy = testing.models(plan).flatmap(lambda model: st.tuples(st.just(model), testing.batches(model, plan)))
    for model, batch in collected(strategy, 10):
        assert batch.x.shape == (8, 40 if plan else emu.Plan().seq)
        assert torch.isfinite(model().loss_sum(batch.x, batch.y))


def test_a_batch_without_a_plan_is_no_longer_than_the_model_says():
    for model in (Short(), Short):
        assert find(testing.batches(model), lambda batch: True).x.shape == (8, 3)


def verified(data, most, tier="exact"):
    plan = data.draw(testing.plans(max_ranks=most))
    model = data.draw(testing.models(plan, max_layers=1))
    batch = data.draw(testing.batches(model, plan))
    try:
        found = emu.verify(model, plan, batch=batch, tier=tier, mutants="none")
    except emu.EmuError as error:
        raise AssertionError(f"{plan} {model}") from error
    assert found, (plan, model, str(found))


@settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_drawn_model_trains_under_its_plan_on_a_drawn_batch(data):
    verified(data, 4)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_drawn_models_train_under_their_plans(data):
    verified(data, 8)


def test_a_model_that_does_not_fit_its_plan_is_seen():
    """Negative control: what the strategies see to is needed."""
    plan = emu.Plan("tp=2", ep=2, global_batch=2, seq=5)
    dense = find(testing.models(emu.Plan("tp=2")), lambda model: not model.config.experts)
    with pytest.raises(EmuError, match="expert"):
        emu.verify(dense, plan, batch=Batch(*torch.ones(2, 2, 5, dtype=torch.long)), mutants="none")


def test_without_hypothesis_it_says_what_to_install():
    code = (
        "import sys, emu; sys.modules['hypothesis'] = None\ntry: import emu.testing\nexcept emu.EmuError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "emu[testing]"' in done.stdout, done.stderr
