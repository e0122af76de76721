"""Cutting models into stages by cost and by memory: the best there is, from what was measured on shapes alone."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import emu
from emu.equivalence.compare import whole_results
from emu.models import Config, Decoder
from emu.parallel import Pipeline, shard_model
from emu.parallel.pipeline import peak_activations
from emu.parallel.pipeline.division.balancing import balanced, least_worst, lightest, spans
from emu.parallel.pipeline.division.measuring import Measured, measure
from emu.parallel.pipeline.division.units import divided, units_of
from emu.parallel.pipeline.division.weighing import Needs, in_flight, layers_by_cost, layers_by_memory
from emu.parallel.pipeline.schedules import make
from emu.spmd import EmuError, PlanError

from ..memory.activations import Sizes, left_out, table
from ..models.strategies import configs

costs_of_units = st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=9)


def every_cut(units: int, parts: int):
    """All ways to cut a row into parts of at least one unit."""
    for ends in combinations(range(1, units), parts - 1):
        yield [b - a for a, b in pairwise((0, *ends, units))]


def tokens(config: Config, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(rows, config.seq, dtype=torch.int64)
    return x, x


# The arithmetic, against trying everything.


@given(costs_of_units, st.data())
def test_a_balanced_cut_is_the_best_of_all(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    whole = [Fraction(c) for c in costs]  # sums without rounding

    def loads(counts):
        return [sum(whole[a:b]) for a, b in spans(counts)]

    def merit(counts):  # the worst stage; then evenness; then more for the first ones
        return max(loads(counts)), sum(load**2 for load in loads(counts)), [-n for n in counts]

    assert balanced(costs, stages) == min(every_cut(len(costs), stages), key=merit)


def test_an_even_cut_is_not_always_balanced():
    """What the property above can tell apart."""
    assert balanced([1, 1, 1, 1, 4], 2) == [4, 1] != [3, 2]


@given(st.data())
def test_with_weights_by_stage_the_worst_is_least(data):
    """As microbatches in flight weigh the same layer differently on every stage."""
    units = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
    parts = data.draw(st.integers(1, len(units)))
    flights = data.draw(st.lists(st.integers(0, 5), min_size=parts, max_size=parts))

    def load(part, start, stop):
        return sum(fixed + flights[part] * each for fixed, each in units[start:stop])

    def worst(counts):
        return max(load(part, a, b) for part, (a, b) in enumerate(spans(counts)))

    found = least_worst(load, len(units), parts)
    assert sum(found) == len(units) and min(found) >= 1
    assert worst(found) == min(map(worst, every_cut(len(units), parts)))


@pytest.mark.parametrize("costs, stages", [([1, 2], 3), ([], 1), ([1, -1], 1), ([1, float("nan")], 2)])
def test_what_cannot_be_cut_is_said(costs, stages):
    with pytest.raises(PlanError):
        balanced(costs, stages)


def alike(layers: int, saved: int, numbers: int) -> list[Measured]:
    return [Measured(1, {i: saved}, {i: numbers}, 1) for i in range(layers)]


SHARED = ("zb-v", "interleaved", "dualpipe-v", "dualpipe")


@given(st.sampled_from(SHARED), st.sampled_from([1, 2]), st.integers(4, 9), st.integers(0, 20), st.integers(0, 3))
def test_ranks_with_several_stages_are_best_for_layers_alike(name, half, layers, saved, numbers):
    schedule = make(name, 2 if name != "dualpipe" else 2 * half, 6, 1 if name != "interleaved" else 2)
    needs = Needs(alike(layers, saved, numbers), schedule)

    def worst(counts):
        return max(needs.by_rank(counts))

    for tried in (0, 10**9):  # by descent alone, and by trying everything
        found = lightest(layers, schedule.ranks_of, needs.by_rank, tried)
        assert worst(found) == min(map(worst, every_cut(layers, schedule.stages)))


@given(st.sampled_from([*SHARED, "1f1b", "gpipe", "zb-h1", "v-half"]), st.integers(1, 8), st.integers(1, 3))
def test_what_is_in_flight_equals_the_schedule_s_peak(name, microbatches, half):
    schedule = make(name, 2 * half, microbatches + 2 * half, 2 if name == "interleaved" else 1)
    peaks = peak_activations(schedule)
    for rank in range(schedule.ranks):
        assert max(sum(held for _, held in moment) for moment in in_flight(schedule, rank)) == peaks[rank]


# What is measured.


@given(configs(unfused=True, experts=True), st.integers(1, 3))
def test_flops_are_those_of_the_closed_form(config, rows):
    assume(config.capacity is None)  # choices that are dropped are computed by nobody
    model = Decoder(config)
    found = measure(model, *tokens(config, rows))
    attention = "causal" if config.fused else "full"
    assert sum(unit.flops for unit in found) == config.flops(rows, attention=attention)
    by_name = dict(zip([unit.path for unit in units_of(model)], found))
    assert by_name["embedding"].flops == by_name["norm"].flops == 0
    assert by_name["head"].flops == 2 * rows * config.seq * config.width * config.vocab
    assert by_name["blocks.0"].flops == config.block_flops(rows, attention=attention)


@given(st.integers(1, 3), st.integers(2, 8), st.integers(1, 2), st.integers(1, 4))
def test_kept_bytes_of_a_block_are_the_published_formula_s(b, s, heads, head_dim):
    """https://arxiv.org/abs/2205.05198, section 4.1: 34 s b h + 5 a s^2 b, in 16 bits with dropout."""
    sizes = Sizes(s, b, 2 * heads * head_dim, heads, 1)
    config = sizes.config(2)
    model = Decoder(config).bfloat16()
    found = dict(zip([unit.path for unit in units_of(model)], measure(model, *tokens(config, b))))
    h, a = sizes.h, sizes.a
    assert sum(table(sizes, False).values()) == 34 * s * b * h + 5 * a * s * s * b
    # Between the layers nothing is kept but what the next one keeps as its input; the causal mask is every layer's.
    kept = {key: n for key, n in found["blocks.1"].saved.items() if key not in found["blocks.0"].saved}
    extra = sum(kept.values()) - 34 * s * b * h - 5 * a * s * s * b
    assert extra in (sum(left_out(sizes, False).values()), 2 * sum(left_out(sizes, False).values()))


def test_the_model_and_the_batch_stay_as_they_are():
    config = Config(layers=2, width=8, heads=2, vocab=11, seq=4, experts=2, balance=0.1)
    model = Decoder(config)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    measure(model, *tokens(config))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None and not p.is_meta for p in model.parameters())


def test_devices_notice_nothing():
    """The same trace, memory and time whether a rank measures or not."""
    config = Config(layers=2, width=8, heads=2, vocab=11, seq=4)

    def program(rank, measures):
        model, example = Decoder(config), tokens(config)
        if measures:
            measure(model, *example)
        rank.group("dp").all_reduce(model.loss_sum(*example).detach())

    runs = [emu.launch(program, emu.Mesh(dp=2), args=(measures,)) for measures in (True, False)]
    assert runs[0].trace.events == runs[1].trace.events
    assert len(runs[0].trace.events[0]) > 20


def test_a_model_that_reads_its_numbers_is_said_to_be_immeasurable():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def loss_sum(self, x, y):
            for layer in self.layers:
                x = layer(x) if x.sum().item() else x
            return x.sum()

    with pytest.raises(EmuError, match=r"Reads cannot be measured.*numbers") as caught:
        layers_by_cost(Reads(), 2, (torch.ones(2, 3), torch.ones(2)))
    assert "stages=[3, 3, 2]" in caught.value.hint


# Which cut comes of it.


def test_a_large_vocabulary_costs_the_last_stage_layers():
    def last(vocab):
        config = Config(layers=12, width=16, heads=2, vocab=vocab, seq=8)
        return layers_by_cost(Decoder(config), 4, tokens(config))[-1]

    found = [last(vocab) for vocab in (16, 192, 400, 1600)]
    assert found == sorted(found, reverse=True) and found[0] == 3 and found[-1] == 0


@given(st.integers(2, 4), st.integers(3, 7), st.integers(2, 4000))
def test_the_dearest_stage_of_a_decoder_is_as_cheap_as_any_cut_allows(stages, layers, vocab):
    config = Config(layers=layers, width=8, heads=2, vocab=vocab, seq=4)
    stages = min(stages, layers)
    block, head = config.block_flops(2), 2 * 2 * 4 * 8 * vocab

    def dearest(counts):
        return max([n * block for n in counts[:-1]] + [counts[-1] * block + head])

    found = layers_by_cost(Decoder(config), stages, tokens(config))
    every = ([n - (i in (0, stages - 1)) for i, n in enumerate(cut)] for cut in every_cut(layers + 2, stages))
    assert sum(found) == layers and dearest(found) == min(map(dearest, every))


def test_layers_of_unequal_cost_are_counted_at_their_cost():
    class Mixed(nn.Module):
        """Layers of any width inside, as experts beside dense layers."""

        def __init__(self, hidden):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in hidden)

        def loss_sum(self, x, y):
            for layer in self.layers:
                x = x + layer(x)
            return x.square().sum()

    x = torch.zeros(3, 8)
    assert layers_by_cost(Mixed([8] * 4 + [24] * 4), 2, (x, x)) == [5, 3]
    assert layers_by_cost(Mixed([24] * 4 + [8] * 4), 2, (x, x)) == [3, 5]
    assert layers_by_cost(Mixed([8, 32] * 4), 4, (x, x)) == [2, 2, 2, 2]


def test_early_stages_of_1f1b_get_fewer_layers_by_memory_and_gpipe_s_do_not():
    config = Config(layers=16, width=16, heads=2, vocab=16, seq=64, positions="rotary")
    model, example = Decoder(config), tokens(config)
    found = layers_by_memory(model, make("1f1b", 4, 8), example)
    assert found == sorted(found) and found[0] <= 2 < 6 <= found[-1]
    assert layers_by_memory(model, make("gpipe", 4, 8), example)[:3] == [4, 4, 4]
    # Where parameters are all that counts, the schedule does not matter.
    heavy = [layers_by_memory(model, make(n, 4, 8), example, bytes_per_parameter=1e9) for n in ("1f1b", "gpipe")]
    assert heavy[0] == heavy[1]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe", "zb-v", "interleaved", "dualpipe", "v-min"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_no_cut_needs_less_memory(name, recompute, tied):
    config = Config(layers=6, width=8, heads=2, vocab=200, seq=8, tied=tied)
    model, example = Decoder(config), tokens(config)
    schedule = make(name, 2, 5 if name != "dualpipe" else 6, 2 if name == "interleaved" else 1)
    found = layers_by_memory(model, schedule, example, recompute=recompute)
    units = measure(model, *example)
    together = [_join(units[:2]), *units[2:8], _join(units[8:])]
    needs = Needs(together, schedule, recompute=recompute)
    pieces = [found[0] + 1, *found[1:-1], found[-1] + 1]
    assert max(needs.by_rank(pieces)) == min(max(needs.by_rank(cut)) for cut in every_cut(8, schedule.stages))


def _join(units):
    saved = {key: n for unit in units for key, n in unit.saved.items()}
    parameters = {key: n for unit in units for key, n in unit.parameters.items()}
    return Measured(0, saved, parameters, units[0].input_bytes)


@pytest.mark.parametrize("stages", [9, 40])
def test_more_stages_than_pieces_are_an_error_with_both_numbers(stages):
    config = Config(layers=6, width=8, heads=2, vocab=16, seq=4)
    with pytest.raises(PlanError, match=f"{stages} stages, but Decoder has 6 layers") as caught:
        layers_by_cost(Decoder(config), stages, tokens(config))
    assert caught.value.nearest == 8


# In a run.


def test_a_model_with_a_large_head_steps_sooner_when_cut_by_cost():
    """On shapes, so that products are large enough to count; times are computed, and always the same."""
    config = Config(layers=3, width=1024, heads=8, vocab=40_000, seq=1024)
    x = torch.zeros(3, config.seq, dtype=torch.int64)

    def program(rank, stages):
        pipe = Pipeline(Decoder(config), rank, schedule="1f1b", microbatches=3, stages=stages, example=(x[:1], x[:1]))
        pipe.backward((x, x))
        return [sum(unit in path for path, _ in pipe.model.named_parameters()) for unit in ("head.", "norm1.weight")]

    def run(stages):
        mesh = emu.Mesh(pp=2, on=emu.cluster("h100-8"))
        return emu.launch(program, mesh, backend="shape", launch_mode="graph", args=(stages,))

    even, by_cost = run("even"), run("cost")
    assert even.results[1] == [1, 1] and by_cost.results[1] == [1, 0]
    assert by_cost.metrics.step_time_s < 0.9 * even.metrics.step_time_s


@pytest.mark.parametrize("how", ["cost", "memory"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_training_does_not_depend_on_the_cut(how, name):
    config = Config(layers=4, width=8, heads=2, vocab=300, seq=4, tied=True)
    x = torch.randint(0, 300, (4, 4), generator=torch.Generator().manual_seed(0))

    def program(rank, stages):
        pipe = Pipeline(Decoder(config), rank, schedule=name, microbatches=4, stages=stages, example=(x[:1], x[:1]))
        return pipe.backward((x, x)), pipe.gather_gradients()

    mesh = emu.Mesh(pp=2)
    found, expected = (
        whole_results(emu.launch(program, mesh, args=(stages,)).results, mesh) for stages in (how, "even")
    )
    torch.testing.assert_close(found, expected)
    assert any(name.startswith("1.blocks.3") for name in found)


def test_what_is_missing_to_measure_is_said():
    config = Config(layers=4, width=8, heads=2, vocab=16, seq=4)

    def without(rank):
        Pipeline(Decoder(config), rank, stages="cost")

    def cut_inside(rank):
        model = Decoder(config)
        sharding = shard_model(model, rank)
        Pipeline(model, rank, stages="memory", example=tokens(config), sharding=sharding)

    with pytest.raises(PlanError, match="there is none") as caught:
        emu.launch(without, emu.Mesh(pp=2))
    assert "example=(x[:2], y[:2])" in caught.value.hint
    with pytest.raises(PlanError, match="cut inside its layers") as caught:
        emu.launch(cut_inside, emu.Mesh(pp=2, tp=2))
    assert "layers_by_memory" in caught.value.hint


def test_a_single_stage_begins_by_itself_and_nobody_names_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert [[unit.path for unit in some] for some in divided(model, 1, [])] == [["0", "1"]]
    with pytest.raises(PlanError, match="layers on 2 stages"):
        divided(model, 2, [])
