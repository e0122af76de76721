"""Local SGD: with an average after every step it is data parallelism; with more steps between, what the algebra says."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.equivalence import check
from emu.models import GPT, Config
from emu.parallel.local import LocalSGD
from emu.trace.events import Collective

SMALL = Config(layers=1, width=8, heads=2, ffn=8, vocab=11, seq=4)
cuts = st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any)
powers = st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=5).filter(lambda c: sum(c) in (1, 2, 4, 8))


def rows_of(step, rows):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (rows, 4), generator=g), torch.randint(0, 11, (rows, 4), generator=g)


def small_model():
    """Of multiples of 2^-20, so that float64 has room for exact steps."""
    model = GPT(SMALL, seed=0)
    for p in model.parameters():
        p.data.mul_(2**20).round_().div_(2**20)
    return model


def local_sgd(rank, cut, lr, steps, every, momentum=0.0, by_tokens=True):
    model, group = small_model(), rank.group("dp")
    local = LocalSGD(model, rank, "dp", every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    start, mine = sum(cut[: group.rank]), cut[group.rank]
    for step in range(steps):
        x, y = (t[start : start + mine] for t in rows_of(step, sum(cut)))
        if mine:
            optimizer.zero_grad()
            model.loss_sum(x, y).backward()
            for p in model.parameters():
                p.grad.div_(4 * mine)
            optimizer.step()
        local.step(4 * mine if by_tokens else 1)
    local.average()
    return parameters(model)


def one_device(cut, lr, steps, every, momentum=0.0, by_tokens=True):
    """Plain SGD on whole batches."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for step in range(steps):
        optimizer.zero_grad()
        model.loss_sum(*rows_of(step, sum(cut))).backward()
        for p in model.parameters():
            p.grad.div_(4 * sum(cut))
        optimizer.step()
    return parameters(model)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def verdict(cut, lr=0.5, steps=2, every=1, tier="float64", mutants="none", **rest):
    args = (cut, lr, steps, every, *rest.values())
    return check(local_sgd, emu.Mesh(dp=len(cut)), one_device, args=args, tier=tier, mutants=mutants)


@settings(max_examples=10)
@given(cuts, st.floats(0.01, 0.9))
@example([0, 3, 0, 1], 0.3)
def test_averaging_after_every_step_is_data_parallelism_in_the_float64_tier(cut, lr):
    """Each rank divides by its own tokens before the sum, which rounds: in general the bits differ (see below)."""
    found = verdict(cut, lr)
    assert found.equivalent, str(found)


@settings(max_examples=10)
@given(powers, st.sampled_from([0.5, 0.0625]))
@example([4, 0, 2, 1, 1], 0.125)
def test_it_has_data_parallelisms_bits_where_every_operation_is_exact(cut, lr):
    found = verdict(cut, lr, tier="exact")
    assert found.equivalent and found.max_rel_err == 0, str(found)


@pytest.mark.parametrize(("cut", "lr"), [([3, 1], 0.5), ([2, 2], 0.3)])
def test_it_has_not_where_a_division_or_the_learning_rate_rounds(cut, lr):
    found = verdict(cut, lr, tier="exact")
    assert not found and found.max_rel_err < 1e-12


def test_ranks_that_count_alike_whatever_their_tokens_are_told_apart():
    assert not verdict([3, 1], momentum=0.0, by_tokens=False).equivalent
    assert verdict([2, 2], momentum=0.0, by_tokens=False).equivalent  # with equal tokens it is right


def test_more_steps_between_averages_or_momentum_of_their_own_are_another_training():
    assert not verdict([2, 2], steps=4, every=2)
    assert verdict([4], steps=4, every=2)  # alone, there is nothing to average
    assert verdict([2, 2], momentum=0.5).max_rel_err < 1e-12  # linear: averaged momentum is momentum of averages
    assert not verdict([2, 2], steps=4, every=4, momentum=0.5)


def test_every_mutant_is_killed():
    found = verdict([2, 0, 1, 1], mutants="all")
    assert found and not found.survivors, str(found)
    assert found.mutants == 10  # tokens and parameters: all_reduce, five ways each
    assert found.mutants_equivalent == 1 and found.mutants_killed == 9  # a whole number is not scaled


# On quadratics: rank r follows a (w - c) for H steps from w, to c + (1 - lr a)^H (w - c).


def on_quadratics(a, c, tokens, every, lr=0.1, averages=200, outer=None):
    """Where local SGD ends, in float64; the path of its averages."""

    def program(rank):
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        local = LocalSGD(model, rank, every=every, **({"outer": outer} if outer else {}))
        optimizer, path = torch.optim.SGD(model.parameters(), lr=lr), []
        for _ in range(averages * every):
            model.weight.grad = a[rank] * (model.weight.detach() - c[rank])
            optimizer.step()
            if local.step(tokens[rank]):
                path.append(model.weight.item())
        return path

    return emu.launch(program, emu.Mesh(ranks=len(a)), track=False).results[0]


@settings(max_examples=8)
@given(st.integers(1, 6), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_it_ends_where_steps_between_averages_put_it(every, tokens):
    a, c = (1.0, 4.0), (0.0, 1.0)
    end = on_quadratics(a, c, tokens, every)[-1]
    pull = [n * (1 - (1 - 0.1 * k) ** every) for n, k in zip(tokens, a)]
    assert end == pytest.approx(sum(p * x for p, x in zip(pull, c)) / sum(pull), rel=1e-12)
    optimum = sum(n * k * x for n, k, x in zip(tokens, a, c)) / sum(n * k for n, k in zip(tokens, a))
    if every == 1:
        assert end == pytest.approx(optimum, rel=1e-12)
    else:  # the control: ranks that drift to their own optima do not average to the common one
        assert abs(end - optimum) > 1e-2


def test_an_outer_optimizer_sees_the_way_back_as_the_gradient_of_the_averages():
    a, c, tokens, every = (1.0, 4.0), (0.0, 1.0), (1, 3), 3

    def diloco(ps):
        return torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)

    path = on_quadratics(a, c, tokens, every, averages=20, outer=diloco)
    w = torch.zeros(1, dtype=torch.float64)
    optimizer = diloco([w])
    expected = []
    for _ in range(20):
        average = sum(n * (x + (1 - 0.1 * k) ** every * (w - x)) for n, k, x in zip(tokens, a, c)) / sum(tokens)
        w.grad = w - average
        optimizer.step()
        expected.append(w.item())
    assert path == pytest.approx(expected, rel=1e-12)
    assert path != pytest.approx(on_quadratics(a, c, tokens, every, averages=20), rel=1e-2)  # the control


# What it costs, and what goes wrong.


@pytest.mark.parametrize("every", [1, 4])
def test_it_communicates_the_parameters_once_every_so_many_steps(every):
    def program(rank):
        model = nn.Linear(5, 3)
        local = LocalSGD(model, rank, "dp", every=every)
        return [local.step(1) for _ in range(9)]

    run = emu.launch(program, emu.Mesh(dp=2))
    assert run.results[0] == [step % every == 0 for step in range(1, 10)]
    moved = sum(event.bytes for _, event in run.trace.of(Collective, rank=0))
    assert moved == (9 // every) * (18 * 4 + 8)  # parameters in float32, and a count


def test_it_holds_the_parameters_twice_between_averages():
    def program(rank):
        model = nn.Linear(64, 64, bias=False)
        local = LocalSGD(model, rank, every=3)
        local.step(1)

    run, size = emu.launch(program, emu.Mesh(ranks=2)), 64 * 64 * 4
    held = {category: bytes_[-1] for category, bytes_ in run.memory.series(0)[1].items()}
    assert (held["parameters"], held["optimizer"], run.memory.peak_bytes(0)) == (size, size, 2 * size)


def test_ranks_are_apart_between_averages_and_alike_after_and_an_average_without_a_step_or_a_token_changes_nothing():
    def program(rank):
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        local, seen = LocalSGD(model, rank, every=2), []
        for tokens in (rank + 1, 0, 0, 0):
            if tokens:
                model.weight.data.add_(tokens)
            seen.append((model.weight[0, 0].item(), local.step(tokens)))
            seen.append(model.weight[0, 0].item())
        local.average()
        return [*seen, model.weight[0, 0].item()]

    one, two = emu.launch(program, emu.Mesh(ranks=2)).results
    mean = pytest.approx(1 + (1 * 1 + 2 * 2) / 3)
    assert one == [(2.0, False), 2.0, (2.0, True), mean, (mean, False), mean, (mean, True), mean, mean]
    assert two[:2] == [(3.0, False), 3.0] and two[3:] == one[3:]


def wrapped(rank):
    return emu.DataParallel(emu.models.GPT(emu.models.config("gpt-tiny")), rank)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda rank: LocalSGD(nn.Linear(1, 1), rank, every=0), r"every=0\n.*1 or more"),
        (lambda rank: LocalSGD(nn.Linear(1, 1), rank, every=2.0), r"every=2.0"),
        (lambda rank: LocalSGD(nn.ReLU(), rank, every=1), "ReLU has no parameters to train"),
        (lambda rank: LocalSGD(nn.Linear(1, 1), 0, every=1), r"the rank is a int \(0\)\n.*LocalSGD\(model, rank"),
        (lambda rank: LocalSGD(wrapped(rank), rank, every=1), r"is a DataParallel, not a module\n.*takes the place of"),
        (lambda rank: LocalSGD(nn.Linear(1, 1), rank, every=1).step(-1), r"tokens=-1\n.*0 for a rank without rows"),
    ],
)
def test_what_cannot_be_is_told(wrong, says):
    with pytest.raises(emu.EmuError, match=says) as error:
        emu.launch(wrong, emu.Mesh(ranks=1))
    assert error.value.hint
