"""The noise scale is measured without bias, and it tells at which batch size training stops gaining from a larger one."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.demo.batch_size import BATCHES, COPIES, DEVIATION, H, train, tuned
from emu.models import GPT, Config
from emu.parallel.noise import GradientNoise, Noise, Tradeoff, fit_tradeoff, noise_from


class Pull(nn.Module):
    """Example x pulls the parameter to itself: its gradient is w - x."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def loss_sum(self, x):
        return 0.5 * ((self.w - x) ** 2).sum()


POINTS = torch.tensor([[1.0, 0.0], [-2.0, 0.5], [0.25, 3.0]], dtype=torch.float64)
START = torch.tensor([1.0, -1.0], dtype=torch.float64)
GRADIENTS = START - POINTS
TRUE = Noise(float(GRADIENTS.mean(0).square().sum()), float(GRADIENTS.var(0, unbiased=False).sum()))


def over_all_batches(cut, passes=1, biased=False):
    """The average estimate over every batch that can be drawn from POINTS: its expectation, exactly."""

    def program(rank):
        model, group = Pull(START), rank.group()
        noise = GradientNoise(model, group)
        first = sum(cut[: group.rank])
        for batch in itertools.product(range(3), repeat=sum(cut)):
            mine = POINTS[list(batch)][first : first + cut[group.rank]]
            model.w.grad = None
            for rows in mine.tensor_split(passes):
                model.loss_sum(rows).backward()
                noise.small(len(rows), len(rows) + 1 if biased and len(rows) else None)
            group.all_reduce(model.w.grad).div_(sum(cut))
            noise.large()
        return noise.measured()

    results = emu.launch(program, emu.Mesh(ranks=len(cut)), track=False).results
    assert all(r == results[0] for r in results)
    return results[0]


@settings(max_examples=12)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=4).filter(lambda c: 2 <= sum(c) <= 4 and max(c) < sum(c)))
@example([1, 3])
@example([2, 0, 1])
def test_the_estimate_is_right_on_average_however_uneven_the_ranks_batches_are(cut):
    found = over_all_batches(cut)
    assert found == pytest.approx(TRUE, rel=1e-12)  # a sum of at most 81 numbers of size 10 in float64


def test_several_backward_passes_are_small_batches_as_well():
    assert over_all_batches([4], passes=2) == pytest.approx(TRUE, rel=1e-12)
    assert over_all_batches([3, 1], passes=2) == pytest.approx(TRUE, rel=1e-12)


def test_a_wrong_divisor_is_a_wrong_estimate():
    """The control."""
    assert over_all_batches([2, 1], biased=True).noise != pytest.approx(TRUE.noise, rel=0.1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_it_measures_the_same_whatever_of_the_model_is_sharded(zero):
    """One step of a decoder, its batch cut 2 + 1 + 0 + 1; the estimates from plain torch's gradients of the same rows."""
    config, cut = Config(layers=1, width=8, heads=2, ffn=8, vocab=11, seq=4), [2, 1, 0, 1]
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 11, (4, 4), generator=g) for _ in "xy")

    def model():
        return GPT(config, seed=0).double()

    def program(rank):
        dist = emu.DataParallel(model(), rank, "dp", zero=zero)
        noise = GradientNoise(dist.model, dist.group)
        for _ in range(2):
            dist.zero_grad()
            dist.backward((x, y), sizes=cut)
            noise.small(cut[rank], 4 * cut[rank])
            noise.large(dist.gather_gradients().values())
        return noise.measured()

    def square(rows):
        plain = model()
        (plain.loss_sum(x[rows], y[rows]) / y[rows].numel()).backward()
        return sum(float(p.grad.square().sum()) for p in plain.parameters())

    smalls = sum(map(square, (slice(0, 2), slice(2, 3), slice(3, 4)))) / 3
    expected = noise_from(smalls, square(slice(0, 4)), 3 / (1 / 2 + 1 + 1), 4)
    assert emu.launch(program, emu.Mesh(dp=4)).results[0] == pytest.approx(expected, rel=1e-9)


def test_a_shape_run_measures_at_the_same_cost():
    def program(rank):
        model = nn.Linear(3, 3)
        noise = GradientNoise(model, rank.group())
        model(torch.ones(2, 3, device=rank.device)).sum().backward()
        noise.small(2)
        noise.large()

    real, shape = (emu.launch(program, emu.Mesh(ranks=2), backend=b) for b in ("virtual", "shape"))
    assert len(real.trace) == len(shape.trace)


# Training to a goal, on a problem on which everything is known.


@pytest.fixture(scope="module")
def trained():
    out = {}
    for batch in BATCHES:
        expected, lr = tuned(batch)
        steps, noise = emu.launch(train, emu.Mesh(dp=4), args=(batch, lr), track=False).results[0]
        out[batch] = (steps, noise, expected)
    return out


def test_training_takes_the_steps_that_the_closed_form_expects(trained):
    for batch, (steps, _, expected) in trained.items():
        # The average loss of 64 copies in 16 directions lies within about sqrt(2 / 1024) = 4 % of its expectation.
        assert steps == pytest.approx(expected, rel=0.08, abs=1), batch
    assert trained[4][0] > 5 * trained[512][0]


def test_steps_follow_the_tradeoff_and_the_measured_noise_scale_is_its_critical_batch_size(trained):
    steps = [trained[batch][0] for batch in BATCHES]
    curve = fit_tradeoff(BATCHES, steps)
    for batch, taken in zip(BATCHES, steps):
        assert curve.steps(batch) == pytest.approx(taken, rel=0.1), (curve, steps)  # steps are whole, and vary by 4 %
    # The noise scale grows as the gradient shrinks; its average over the way is what counts, to a factor of order 1.
    measured = trained[32][1].scale
    assert curve.critical / 1.5 < measured < curve.critical * 1.5
    # It helps up to there, and not beyond: twice the batch saves most of half the steps below, and next to none above.
    assert trained[8][0] / trained[4][0] < 0.6 and trained[512][0] / trained[256][0] > 0.9


def test_noise_is_what_makes_larger_batches_useful():
    """The control: with twice the deviation the critical batch size is four times as large, without noise it is zero."""
    critical = {}
    for deviation in (0.0, DEVIATION, 2 * DEVIATION):
        batches = [4, 16, 64, 256, 1024]
        critical[deviation] = fit_tradeoff(batches, [tuned(batch, deviation)[0] for batch in batches]).critical
    assert critical[0.0] == pytest.approx(0, abs=1e-9)
    assert critical[2 * DEVIATION] / critical[DEVIATION] == pytest.approx(4, rel=0.1)


def test_the_measured_noise_is_that_of_the_problem(trained):
    """tr(S) of all copies together is known: it does not change on the way, the signal does."""
    for batch in (8, 64):
        steps, noise, _ = trained[batch]
        exact = COPIES * DEVIATION**2 * float(H.sum())
        # Chi-squared: at least steps * (4 - 1) * 1024 terms, few of which dominate; four deviations.
        weights = H.repeat(COPIES)
        effective = float(weights.sum() ** 2 / weights.square().sum()) * 3 * steps
        assert noise.noise == pytest.approx(exact, rel=4 * math.sqrt(2 / effective))


# The arithmetic.


@given(st.floats(0.1, 100), st.floats(0, 100), st.integers(1, 50), st.integers(51, 1000))
def test_two_sizes_tell_signal_from_noise(signal, noise, small, large):
    found = noise_from(signal + noise / small, signal + noise / large, small, large)
    assert found == pytest.approx((signal, noise), rel=1e-9, abs=1e-9)
    assert found.scale == pytest.approx(noise / signal, rel=1e-7, abs=1e-7)


def test_noise_that_hides_the_signal_has_no_scale():
    assert Noise(-0.1, 2.0).scale == math.inf and Noise(0.0, 2.0).scale == math.inf


@given(st.floats(1, 1000), st.floats(1, 1e5), st.lists(st.integers(1, 10000), min_size=2, max_size=8, unique=True))
def test_an_exact_tradeoff_is_found_and_its_critical_batch_doubles_both(min_steps, min_examples, batches):
    truth = Tradeoff(min_steps, min_examples)
    found = fit_tradeoff(batches, [truth.steps(b) for b in batches])
    for batch in batches:
        assert found.steps(batch) == pytest.approx(truth.steps(batch), rel=1e-6)
    assert truth.steps(truth.critical) == pytest.approx(2 * min_steps)
    assert truth.examples(truth.critical) == pytest.approx(2 * min_examples)
    for batch in batches:
        time, cost = truth.steps(batch) / min_steps - 1, truth.examples(batch) / min_examples - 1
        assert time * cost == pytest.approx(1, rel=1e-6)  # the paper's hyperbola


def test_what_shows_one_limit_only_has_only_that():
    assert fit_tradeoff([1, 2, 4], [100, 50, 25]) == pytest.approx((0, 100), abs=1e-9)
    assert fit_tradeoff([1, 2, 4], [100, 40, 15]).min_steps == 0
    assert fit_tradeoff([1, 2, 4], [100, 40, 15]).critical == math.inf
    assert fit_tradeoff([1, 2, 4], [7, 7, 7.5]) == pytest.approx((7.16, 0), abs=0.01)


def measure(rank, cut, first=lambda noise: None):
    model = nn.Linear(1, 1)
    noise = GradientNoise(model, rank.group())
    model(torch.ones(cut[rank], 1)).sum().backward()
    first(noise)
    noise.small(cut[rank])
    noise.large()
    return noise.measured()


@pytest.mark.parametrize(
    ("cut", "first", "says"),
    [
        ([2], lambda noise: None, r"no smaller one to compare it with\n.*two ranks"),
        ([2, 0], lambda noise: None, "one batch had all the rows"),
        ([1, 1], lambda noise: noise.measured(), r"no step was measured yet"),
        ([1, 1], lambda noise: noise.small(-1), "a batch of -1 examples"),
        ([1, 1], lambda noise: noise.small(1.0), "a batch of 1.0 examples"),
        ([1, 1], lambda noise: GradientNoise(nn.ReLU(), noise.group), "no parameters to train"),
    ],
)
def test_what_cannot_be_measured_is_told(cut, first, says):
    with pytest.raises(emu.EmuError, match=says) as error:
        emu.launch(measure, emu.Mesh(ranks=len(cut)), args=(cut, first))
    assert error.value.hint


@pytest.mark.parametrize(
    ("batches", "steps", "says"),
    [([1], [2], "1 batch sizes"), ([1, 1], [2, 3], "1 of them different"), ([1, 2], [2], "1 numbers of steps"),
     ([1, 2], [2, 0], "not above zero"), ([1, math.inf], [2, 1], "not above zero")],
)  # fmt: skip
def test_measurements_that_fit_nothing_are_refused(batches, steps, says):
    with pytest.raises(emu.EmuError, match=says):
        fit_tradeoff(batches, steps)
    with pytest.raises(emu.EmuError, match="two sizes"):
        noise_from(1.0, 1.0, 4, 4)


def test_a_model_is_no_longer_watched_after_close():
    def program(rank):
        model = nn.Linear(1, 1)
        GradientNoise(model, rank.group()).close()
        return len(model.weight._backward_hooks or {})

    assert emu.launch(program, emu.Mesh(ranks=1)).results == [0]
