"""Batch normalisation over ranks is torch's over the whole batch; local statistics, and cheap formulas, are not."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import emu
from emu.equivalence import check
from emu.parallel.statistics import SyncBatchNorm, synchronize_statistics
from emu.trace.compare import first_difference
from emu.trace.events import Collective

CLASSES = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
# Of two values, normalised, little is left but their order: gradients are the rest of what cancels, and as inexact.
cuts = st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(lambda cut: sum(cut) > 3)
shapes = st.tuples(st.integers(1, 3), st.lists(st.integers(1, 3), max_size=3))  # channels, positions
options = st.fixed_dictionaries(
    {
        "affine": st.booleans(),
        "momentum": st.sampled_from([None, 0.1, 0.5]),
        "track_running_stats": st.booleans(),
        "eps": st.sampled_from([1e-5, 0.1]),
    }
)
PLAIN = {"affine": True, "momentum": 0.1, "track_running_stats": True, "eps": 1e-5}


class Model(nn.Module):
    """Two batch normalisations and something between them, so that the first one's gradient is not simple."""

    def __init__(self, channels, positions, **options):
        super().__init__()
        kind = CLASSES[len(positions)]
        self.first, self.second = kind(channels, **options), kind(channels, **options)
        if options["affine"]:
            for i, p in enumerate(self.parameters()):
                nn.init.uniform_(p, 0.5, 1.5, generator=torch.Generator().manual_seed(i))

    def forward(self, x):
        return self.second(self.first(x).tanh() + x)


def data(rows, channels, positions, seed):
    g = torch.Generator().manual_seed(seed)
    size = (rows, channels, *positions)
    return torch.randn(size, generator=g) * 2 + 3, torch.randn(size, generator=g)


def steps(model, batches, rows, reduce):
    """Two batches in training and one in evaluation; everything that comes out, of some rows."""
    out, layouts = {}, {}
    sharded = emu.Layout({"dp": emu.Shard(0)})
    for i, (x, t) in enumerate(batches):
        model.train(i < 2)
        x, t = x[rows].to(torch.get_default_dtype(), copy=True).requires_grad_(), t[rows].to(torch.get_default_dtype())
        y = model(x)
        (y * t + y**3).sum().backward()
        out |= {f"y{i}": y.detach(), f"inputs.x{i}": x.grad}
        layouts |= {f"y{i}": sharded, f"inputs.x{i}": sharded}
    for name, p in model.named_parameters():
        out[name] = reduce(p.grad)
    out |= {name: b.clone() for name, b in model.named_buffers()}
    return emu.Grads(out, layouts)


def distributed(rank, cut, shape, options):
    model = synchronize_statistics(Model(*shape, **options), rank.group("dp"))
    assert isinstance(model.first, SyncBatchNorm) and isinstance(model.second, SyncBatchNorm)
    return _own_rows(rank, model, cut, shape)


def local_statistics(rank, cut, shape, options):
    return _own_rows(rank, Model(*shape, **options), cut, shape)


def _own_rows(rank, model, cut, shape):
    group = rank.group("dp")
    start = sum(cut[: group.rank])
    batches = [data(sum(cut), *shape, seed) for seed in range(3)]
    return steps(model, batches, slice(start, start + cut[group.rank]), group.all_reduce)


def whole(cut, shape, options):
    return steps(
        Model(*shape, **options), [data(sum(cut), *shape, seed) for seed in range(3)], slice(None), lambda g: g
    )


def verdict(program, cut, shape, options, **rest):
    rest = {"tier": "float64", "mutants": "none"} | rest
    return check(program, emu.Mesh(dp=len(cut)), whole, args=(cut, shape, options), **rest)


@given(cuts, shapes, options)
@example([0, 0, 4, 0], (3, []), PLAIN)
@example([1, 1], (2, []), PLAIN | {"eps": 1.0})  # no rank has two values
@example([3, 1, 0, 2], (2, [2, 3]), PLAIN | {"momentum": None})
@example([2, 1], (1, [1, 2, 3]), PLAIN | {"track_running_stats": False})
def test_any_cut_gives_outputs_gradients_and_running_statistics_of_the_whole_batch(cut, shape, options):
    found = verdict(distributed, cut, shape, options)
    assert found.equivalent, str(found)


@pytest.mark.parametrize("cut", [[2, 2], [3, 1]])
def test_statistics_of_every_rank_alone_are_another_function(cut):
    """The control: what plain modules do."""
    found = verdict(local_statistics, cut, (2, [3]), PLAIN | {"track_running_stats": False})
    assert not found and found.max_rel_err > 1e-2 and found.first_divergence == "y0"
    assert verdict(local_statistics, [4], (2, [3]), PLAIN).equivalent  # alone, it is the same
    assert "ranks 0 and 1" in verdict(local_statistics, cut, (2, [3]), PLAIN).why  # what is tracked differs


def test_every_mutant_is_killed():
    found = verdict(distributed, [2, 0, 1, 2], (2, [2]), PLAIN, mutants="all")
    assert found and not found.survivors, str(found)
    assert found.mutants == 3 + 5 + 5  # statistics: gathered, and back; gradients: reduced
    assert found.mutants_killed == found.mutants


def test_one_collective_forward_and_one_backward():
    def program(rank):
        bn = SyncBatchNorm(rank.group("dp"), 3)
        bn(torch.randn(4, 3, requires_grad=True)).sum().backward()
        rank.mark("evaluation")
        bn.eval()(torch.randn(4, 3))

    run = emu.launch(program, emu.Mesh(dp=2))
    found = [(event.kind, event.bytes) for _, event in run.trace.of(Collective, rank=0)]
    assert found == [("all_gather", 2 * 7 * 4), ("reduce_scatter", 2 * 7 * 4)]


@given(st.sampled_from([1e2, 1e3, 1e4]), st.integers(0, 9))
def test_a_mean_far_from_zero_costs_no_more_digits_than_torch_loses_on_one_device(ratio, seed):
    """float32 against float64, on values whose mean is `ratio` times their deviation."""
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed)) + ratio
    t = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed + 1))

    def trained(bn, x, t):
        x = x.clone().requires_grad_()
        y = bn(x)
        (y * t + y**3).sum().backward()
        return y.detach(), x.grad

    def program(rank):
        rows = slice(0, 40) if rank == 0 else slice(40, 64)
        return trained(SyncBatchNorm(rank.group("dp"), 2), x[rows], t[rows])

    exact = trained(nn.BatchNorm1d(2, dtype=torch.float64), x.double(), t.double())
    alone = trained(nn.BatchNorm1d(2), x, t)
    ours = [torch.cat(parts) for parts in zip(*emu.launch(program, emu.Mesh(dp=2)).results)]
    for right, one, many in zip(exact, alone, ours):
        # Four times: rounding of the mean goes either way, so one of them may be lucky; the floor is float32's own.
        assert error(many, right) <= 4 * error(one, right) + 1e-5
    # The control: the variance from sums and sums of squares.
    n, s, q = 64, x.sum(0), x.square().sum(0)
    naive = (x - s / n) * (q / n - (s / n) ** 2 + 1e-5).clamp(min=1e-5).rsqrt()
    if ratio >= 1e3:
        assert error(naive, exact[0]) > 10 * error(ours[0], exact[0])


def error(a, b):
    return float((a.double() - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32_and_comes_back_in_its_own_dtype(dtype):
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)

    def program(rank):
        bn = SyncBatchNorm(rank.group("dp"), 3)
        return bn(x[:5] if rank == 0 else x[5:]), bn.running_var

    (a, var), (b, _) = emu.launch(program, emu.Mesh(dp=2)).results
    plain = nn.BatchNorm1d(3)
    y = plain(x.float())
    assert a.dtype == dtype and torch.equal(torch.cat([a, b]), y.to(dtype))
    assert var.dtype == torch.float32 and torch.allclose(var, plain.running_var, rtol=1e-6)


def test_second_derivatives_are_those_of_the_whole_batch():
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def penalty(bn, x, sum_of):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad((bn(x) ** 3).sum(), x, create_graph=True)
        (g**2).sum().backward()
        return x.grad

    def program(rank):
        return penalty(SyncBatchNorm(rank.group("dp"), 2, dtype=torch.float64), x[:3] if rank == 0 else x[3:], None)

    ours = torch.cat(emu.launch(program, emu.Mesh(dp=2)).results)
    plain = penalty(nn.BatchNorm1d(2, dtype=torch.float64), x, None)
    assert error(ours, plain) < 1e-12 and plain.abs().max() > 1e-3


def test_a_shape_run_has_the_trace_of_the_real_one():
    def program(rank):
        bn = SyncBatchNorm(rank.group("dp"), 2)
        bn(torch.zeros(3 - rank, 2, 2, device=rank.device).requires_grad_()).sum().backward()

    real, shape = (emu.launch(program, emu.Mesh(dp=2), backend=b) for b in ("virtual", "shape"))
    assert first_difference(shape.trace, real.trace) is None


# A plain model becomes one with common statistics.


def test_parameters_buffers_names_and_mode_are_kept_and_a_shared_module_stays_shared():
    def program(rank):
        bn = nn.BatchNorm2d(3, momentum=None)
        model = nn.Sequential(nn.Conv2d(2, 3, 1), bn, nn.ReLU(), nn.Sequential(bn, nn.BatchNorm2d(3, affine=False)))
        model.eval()
        before, optimizer = dict(model.state_dict(keep_vars=True)), torch.optim.SGD(model.parameters(), lr=1)
        assert synchronize_statistics(model, rank.group()) is model
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(before) and all(after[k] is before[k] for k in after)
        assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
        assert model[1] is model[3][0] and type(model[1]) is SyncBatchNorm and not model[1].training
        assert model[1].momentum is None and model[3][1].weight is None
        synchronize_statistics(model, rank.group())  # once more changes nothing
        model.load_state_dict(model.state_dict())
        return type(synchronize_statistics(nn.BatchNorm1d(1), rank.group())).__name__

    assert emu.launch(program, emu.Mesh(dp=2)).results == ["SyncBatchNorm"] * 2


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [0, 1, 0]])
def test_fewer_than_two_values_on_all_ranks_together_are_refused(rows):
    def program(rank):
        SyncBatchNorm(rank.group("dp"), 2)(torch.zeros(rows[rank], 2))

    with pytest.raises(emu.EmuError, match=rf"more than 1 value per channel.*have {sum(rows)} together\n.*two rows"):
        emu.launch(program, emu.Mesh(dp=len(rows)))
    run = emu.launch(lambda rank: SyncBatchNorm(rank.group(), 2).eval()(torch.zeros(1, 2)), emu.Mesh(dp=2))
    assert run.results[0].shape == (1, 2)


class OwnNorm(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda g: SyncBatchNorm(g, 2)(torch.zeros(3, 4)), r"2 channels got a tensor of shape \[3, 4\]"),
        (lambda g: SyncBatchNorm(g, 2)(torch.zeros(2)), r"shape \[2\]\n.*\[rows, channels, ...\]"),
        (lambda g: synchronize_statistics(3, g), "the model is a int"),
        (lambda g: synchronize_statistics(nn.ReLU(), "dp"), r"the group is a str\n.*rank.group"),
        (lambda g: synchronize_statistics(nn.Sequential(nn.Sequential(OwnNorm(2))), g), r"0\.0 is a OwnNorm"),
        (lambda g: synchronize_statistics(OwnNorm(2), g), "the model is a OwnNorm"),
    ],
)
def test_what_cannot_be_is_told(wrong, says):
    with pytest.raises(emu.EmuError, match=says) as error:
        emu.launch(lambda rank: wrong(rank.group()), emu.Mesh(dp=2))
    assert error.value.hint


def test_a_rank_for_a_group_is_told():
    with pytest.raises(emu.EmuError, match=r"the group is a Rank\n.*rank.group"):
        emu.launch(lambda rank: synchronize_statistics(nn.ReLU(), rank), emu.Mesh(dp=2))
