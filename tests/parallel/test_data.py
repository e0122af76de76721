"""Data parallelism: however the batch is cut, one device's bits; and what is nearly right is seen to be wrong."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import emu
from emu.equivalence import check
from emu.trace.compare import first_difference
from emu.trace.events import Collective

from . import programs
from .programs import GPT, SMALL, batch, configs, cuts, data_parallel, one_device


def verdict(program, config, sizes, tier="exact", mutants="none"):
    args = (config, batch(config, sum(sizes)), sizes)
    return check(program, emu.Mesh(dp=len(sizes)), one_device, args=args, tier=tier, mutants=mutants)


@settings(deadline=None, max_examples=40)
@given(configs, cuts)
@example(SMALL, [0, 0, 0, 0, 0, 0, 0, 1])  # seven empty ranks
@example(SMALL, [1] * 8)
@example(SMALL, [5])
def test_any_cut_of_the_batch_over_any_number_of_ranks_has_one_devices_bits(config, sizes):
    found = verdict(data_parallel, config, sizes)
    assert found.equivalent, str(found)
    assert found.max_rel_err == 0 and found.first_divergence is None
    assert found.n_parameters == len(dict(programs.GPT(config).named_parameters()))
    assert 0 < found.certificate_bits < 53


@settings(deadline=None, max_examples=12)
@given(
    configs,
    st.lists(st.integers(1, 3), min_size=2, max_size=5),
    st.sampled_from(
        [programs.divides_by_local_tokens, programs.averages_instead_of_summing, programs.drops_the_first_rank]
    ),
    st.sampled_from(["exact", "float64", "float32"]),
)
@example(SMALL, [2, 1], programs.divides_by_local_tokens, "exact")
@example(SMALL, [2, 1], programs.averages_instead_of_summing, "exact")
@example(SMALL, [2, 1], programs.drops_the_first_rank, "exact")
def test_what_is_nearly_data_parallelism_is_told_apart_in_every_tier(config, sizes, program, tier):
    if program is programs.divides_by_local_tokens:
        sizes = [sizes[0] + sizes[1], *sizes[1:]]  # with equal shares of the tokens it would be right
        data = batch(config, sum(sizes))
        shares = {int((y != -100).sum()) for y in data.y.split(sizes)}
        if len(shares) == 1:
            return
    found = verdict(program, config, sizes, tier)
    assert not found and not found.equivalent
    assert found.first_divergence == "parameters.embedding.weight"  # the loss, which comes before it, is right
    assert found.max_rel_err > 1e-4 and found.worst_parameter.startswith("parameters.")
    assert "parameters.embedding.weight" in found.why


def test_a_forgotten_reduction_is_told_by_the_ranks_that_differ():
    found = verdict(programs.forgets_to_reduce, SMALL, [2, 1, 2])
    assert not found
    assert found.first_divergence == "parameters.embedding.weight"
    assert "ranks 0 and 1" in found.why and "reduce it over 'dp'" in found.why


@pytest.mark.parametrize("tier", ["exact", "float64", "float32"])
def test_every_mutant_is_killed_or_changes_nothing(tier):
    found = verdict(data_parallel, SMALL, [2, 0, 1, 2], tier, mutants="all")
    assert found and not found.survivors
    assert (
        found.mutants == 13
    )  # gradients and loss: dropped, scaled, wrong op, wrong group, stale; initial values: the first
    assert (
        found.mutants_killed == 12
    )  # two and the last of these; all ranks make the same model, so dropping changes nothing
    assert found.mutants_equivalent == 1


def test_a_mutant_that_leaves_out_an_empty_rank_changes_nothing():
    found = verdict(data_parallel, SMALL, [2, 1, 0], mutants="all")
    assert (
        found and found.mutants_equivalent == 3
    )  # "wrong group" leaves out the last rank: of gradients, and of losses; and the initial values are the same
    assert found.mutants_killed == found.mutants - 3


@settings(deadline=None, max_examples=15)
@given(configs, cuts)
def test_a_shape_run_has_the_trace_of_the_real_one(config, sizes):
    args, mesh = (config, batch(config, sum(sizes)), sizes), emu.Mesh(dp=len(sizes))
    real = emu.launch(data_parallel, mesh, args=args)
    shape = emu.launch(data_parallel, mesh, args=args, backend="shape")
    assert first_difference(shape.trace, real.trace) is None
    turned = sizes[1:] + sizes[:1]
    if turned != sizes:  # the comparison sees another cut
        other = emu.launch(data_parallel, mesh, args=(config, args[1], turned))
        assert first_difference(other.trace, real.trace) is not None


def test_values_come_from_rank_0_then_buckets_are_reduced_last_parameter_first_and_the_loss_at_the_end():
    def program(rank):
        ddp = emu.DataParallel(GPT(SMALL, seed=rank), rank, "dp", bucket_bytes=600)
        ddp.backward(batch(SMALL, 4))
        return [g.shards.flat.names for g in ddp.gradients], {n: p.detach() for n, p in ddp.model.named_parameters()}

    run = emu.launch(program, emu.Mesh(dp=2))
    model = dict(GPT(SMALL, seed=0).named_parameters())
    for buckets, values in run.results:
        assert [name for bucket in buckets for name in bucket] == list(reversed(model)) and len(buckets) > 2
        assert all(torch.equal(values[name], model[name]) for name in model)
    assert not torch.equal(GPT(SMALL, seed=1).head.weight, model["head.weight"])
    events = [event for _, event in run.trace.of(Collective, rank=0)]
    assert [e.kind for e in events[: len(model)]] == ["broadcast"] * len(model)
    reduced = [event.name for event in events[len(model) :]]
    assert reduced == [*(f"bucket {i}" for i in range(len(run.results[0][0]))), "loss"]


class Branches(torch.nn.Module):
    """Uses `left` for positive rows only, and never trains `frozen`."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.frozen = (torch.nn.Linear(2, 2) for _ in range(3))
        self.frozen.requires_grad_(False)

    def loss_sum(self, x, y):
        kind = self.left if bool((x > 0).any()) else self.right
        return (kind(self.frozen(x)) ** 2).sum() + 0 * y.sum()


def test_a_parameter_that_only_some_ranks_used_is_reduced_by_all():
    x, y = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.zeros(2, dtype=torch.long)
    unused = False

    def program(rank):
        torch.manual_seed(0)
        ddp = emu.DataParallel(Branches(), rank, "dp", find_unused=unused)
        ddp.backward(emu.Batch(x, y))
        return emu.grads(ddp.model)

    with pytest.raises(emu.EmuError, match=r"rank [01]: backward gave no gradient to \w+\.\w+.*\n.*find_unused=True"):
        emu.launch(program, emu.Mesh(dp=2))
    unused = True
    first, second = emu.launch(program, emu.Mesh(dp=2)).results
    assert set(first) == {"left.weight", "left.bias", "right.weight", "right.bias"}
    assert all(torch.equal(first[name], second[name]) and first[name].any() for name in first)


def test_the_batch_may_be_cut_over_several_axes_and_keeps_the_order_of_its_rows():
    x = torch.arange(7)[:, None]

    def program(rank):
        return emu.Batch(x, x).shard(rank, "a", "b")[0].flatten().tolist()

    assert emu.launch(program, emu.Mesh(a=2, b=2)).results == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([1, 2], "do not cut 4 rows"),
        ([5, -1], "do not cut 4 rows"),
        ([4], "the 2 ranks of 'dp'"),
        ([], "one length per"),
    ],
)
def test_sizes_that_do_not_cut_the_batch_are_refused(sizes, says):
    data = batch(SMALL, 4)
    with pytest.raises(emu.EmuError, match=says):
        emu.launch(lambda rank: data.shard(rank, "dp", sizes=sizes), emu.Mesh(dp=2))


def test_a_batch_says_what_is_wrong_with_it():
    with pytest.raises(emu.EmuError, match=r"3 inputs and 2 labels.*\n.*every input row its labels"):
        emu.Batch(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(emu.EmuError, match=r"tokens=\.\.\."):
        emu.Batch(torch.zeros(3, 1), torch.zeros(3, device="meta"))
    assert emu.Batch(torch.zeros(3, 1), torch.zeros(3, device="meta"), tokens=3).tokens == 3


def test_a_batch_without_a_label_that_counts_is_refused():
    nothing = emu.Batch(torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), -100))
    assert nothing.tokens == 0
    with pytest.raises(emu.EmuError, match=r"no tokens to learn from.*\n.*at least one label that is not -100"):
        emu.launch(data_parallel, emu.Mesh(dp=2), args=(SMALL, nothing))


# What newcomers pass.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda m: emu.verify(m, emu.Mesh(dp=2)), r"the plan is a Mesh\n.*emu.Plan\(mesh\)"),
        (lambda m: emu.verify(m, "dp=2"), r'the plan is a str\n.*emu.Plan\("dp=2"\)'),
        (lambda m: emu.verify(m, None), r"the plan is a NoneType\n"),
        (lambda m: emu.verify("gpt-tiny", emu.Plan()), r"the model is a str, not a module\n.*loss_sum\(x, y\)"),
        (lambda m: emu.verify(programs.GPT, emu.Plan()), r"cannot be called without arguments.*\n.*pass lambda: "),
        (lambda m: emu.verify(lambda: 3, emu.Plan()), "the model is a int, not a module"),
        (lambda m: emu.verify(m, emu.Plan(), 3), r"the batch is a int\n.*the tuple \(x, y\)"),
        (lambda m: emu.verify(m, emu.Plan(), (torch.ones(2),)), "the batch is a tuple of 1"),
        (lambda m: emu.verify(m, emu.Plan(), ([1], [2])), "x of a batch is a list"),
        (lambda m: emu.Batch(torch.tensor(1), torch.tensor(1)), "x of a batch is a tensor without dimensions"),
        (lambda m: batch(SMALL, 4).shard(0, "dp"), r"the rank is a int \(0\)\n.*program\(rank\)"),
        (lambda m: emu.DataParallel(m, 0, "dp"), r"the rank is a int \(0\)"),
        (lambda m: emu.parallelize(m, emu.Plan(), 0), "the rank is a int"),
    ],
)
def test_what_is_not_what_it_should_be_is_told(wrong, says):
    with pytest.raises(emu.EmuError, match=says) as error:
        wrong(programs.GPT(SMALL, seed=0))
    assert error.value.hint


def test_a_tuple_is_a_batch():
    data = batch(SMALL, 4)
    plan = emu.Plan("dp=2")
    a, b = (emu.verify(programs.GPT(SMALL, seed=0), plan, d, mutants="none") for d in (data, (data.x, data.y)))
    assert a and b and a == b


def one_rank(use):
    return emu.launch(lambda rank: use(rank), emu.Mesh(dp=1)).results[0]


def test_a_parallel_model_has_parameters_and_says_that_it_is_no_module():
    model = programs.GPT(SMALL, seed=0)
    plain, mixed = (emu.Plan("dp=1", precision=precision) for precision in ("fp32", "bf16-mixed"))
    ddp = one_rank(lambda rank: emu.parallelize(programs.GPT(SMALL, seed=0), plain, rank))
    assert [p.shape for p in ddp.parameters()] == [p.shape for p in model.parameters()]
    assert [n for n, _ in ddp.named_parameters()] == [n for n, _ in model.named_parameters()]
    with pytest.raises(emu.EmuError, match=r"this rank's pieces, or copies.*\n.*\.optimizer\(torch.optim.AdamW"):
        one_rank(lambda rank: emu.parallelize(programs.GPT(SMALL, seed=0), mixed, rank).parameters())
    assert "no module" in repr(ddp) and ".model is the module" in repr(ddp) and "'dp'" in repr(ddp)
    with pytest.raises(AttributeError, match=r"no 'state_dict'; it is no module.*\.model\.state_dict"):
        _ = ddp.state_dict
    with pytest.raises(AttributeError, match=r"no 'nonsense'$"):
        _ = ddp.nonsense
    with pytest.raises(emu.EmuError, match=r"cannot be called\n.*\.backward\(batch\)"):
        ddp(1)


def test_a_plan_for_another_mesh_is_refused():
    with pytest.raises(
        emu.EmuError, match=r"the plan is for mesh dp=2, but the program runs on dp=1\n.*mesh_of\(plan\)"
    ):
        one_rank(lambda rank: emu.parallelize(programs.GPT(SMALL, seed=0), emu.Plan("dp=2"), rank))
