"""Checks: what they compare, in which tier, what they say of a wrong program, and whether they would notice one."""

import pytest
import torch

import emu
from emu.equivalence import check
from emu.equivalence.verify import random_batch
from emu.models import GPT, Config
from emu.spmd import BufferInFlight, CrossRankAccess, PlanError

SMALL = Config(layers=1, width=8, heads=2, ffn=8, vocab=11, seq=4)
TIERS = ("exact", "float64", "float32")


def data(rows=5):
    g = torch.Generator().manual_seed(3)
    return emu.Batch(*(torch.randint(0, SMALL.vocab, (rows, SMALL.seq), generator=g) for _ in "xy"))


def program(rank):
    """Data parallelism by hand, with raw collectives."""
    batch, model, dp = data(), GPT(SMALL, seed=0), rank.group("dp")
    x, y = batch.shard(rank, "dp")
    loss = model.loss_sum(x, y)
    loss.backward()
    for p in model.parameters():
        dp.all_reduce(p.grad).div_(batch.tokens)
    return {"loss": dp.all_reduce(loss.detach().clone()).div_(batch.tokens), "parameters": emu.grads(model)}


def reference():
    batch, model = data(), GPT(SMALL, seed=0)
    loss = model.loss_sum(batch.x, batch.y)
    loss.backward()
    for p in model.parameters():
        p.grad.div_(batch.tokens)
    return {"loss": loss.detach() / batch.tokens, "parameters": emu.grads(model)}


MESH = emu.Mesh(dp=3)


@pytest.mark.parametrize("tier", TIERS)
def test_a_right_program_is_equivalent_in_every_tier(tier):
    found = check(program, MESH, reference, tier=tier)
    assert found and found.equivalent and found.tier == tier
    assert found.mutants == 8 and found.mutants_killed == 8
    assert tier in str(found) and "8 of 8 mutants killed" in str(found)
    assert (found.certificate_bits is not None) == (tier == "exact")
    if tier == "exact":
        assert found.max_rel_err == 0
    assert found.max_rel_err < {"exact": 1e-300, "float64": 1e-12, "float32": 1e-5}[tier]


@pytest.mark.parametrize(("size", "tiers"), [(1e-4, ()), (1e-7, ("float32",)), (1e-14, ("float32", "float64"))])
def test_each_tier_sees_errors_down_to_its_own_size(size, tiers):
    def slightly_wrong(rank):
        result = program(rank)
        for g in result["parameters"].values():
            g.mul_(1 + size)
        return result

    for tier in TIERS:
        found = check(slightly_wrong, MESH, reference, tier=tier, mutants="none")
        assert found.equivalent == (tier in tiers), f"{tier}: {found}"


@pytest.mark.parametrize("tier", TIERS)
def test_float32_data_from_outside_is_read_in_the_dtype_of_the_tier(tier):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def loss(rows):
        w = torch.nn.Parameter(torch.full((4, 2), 0.3))
        ((rows @ w).float() ** 2).mul(torch.ones(2, dtype=torch.float32)).sum().backward()  # asks for float32 in vain
        return w.grad

    def split(rank):
        return {"dtype": float(loss(x).dtype.itemsize), "w": rank.group("dp").all_reduce(loss(x.split(2)[rank]))}

    found = check(split, MESH, lambda: {"dtype": 4.0 if tier == "float32" else 8.0, "w": loss(x)}, tier=tier)
    assert found, str(found)


def test_a_narrow_model_from_outside_is_not_taken_for_float64():
    outside = torch.ones(3, requires_grad=True)
    for use in (lambda: (outside * 2).sum().backward(), lambda: outside.detach().add_(1)):
        with pytest.raises(emu.EmuError, match=r"made outside.*\n.*make it inside the program"):
            check(lambda rank, use=use: use(), MESH, lambda use=use: use(), tier="float64")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("beside", [11093.0, torch.tensor(11093.0), torch.full((2,), 11093.0)])
def test_a_large_result_beside_small_gradients_hides_none_of_them(tier, beside):
    gradient = torch.tensor([5.5e-5, -2e-5])

    def returns(factor):
        return lambda *rank: {"loss": beside, "parameters": {"w": gradient * factor}}

    found = check(returns(1.5), MESH, returns(1.0), tier=tier)
    assert not found and found.first_divergence == "parameters.w" and "1.50x too large" in found.why
    assert check(returns(1.0), MESH, returns(1.0), tier=tier)


def test_what_is_zero_up_to_rounding_is_measured_against_its_own_kind():
    """A key bias under softmax: its gradient is noise around zero, beside gradients of weights."""

    def returns(noise):
        return lambda *rank: {"parameters": {"w": torch.ones(2), "b": torch.ones(2) * noise}}

    assert check(returns(2e-17), MESH, returns(-1e-17), tier="float64")
    assert not check(returns(2e-12), MESH, returns(-1e-12), tier="float64")
    alone = check(lambda rank: {"w": torch.ones(2), "b": torch.ones(2) * 2e-17}, MESH,
                  lambda: {"w": torch.ones(2), "b": torch.ones(2) * 1e-17}, tier="float64")  # fmt: skip
    assert not alone and alone.first_divergence == "b"  # nothing says that these two are alike


# What is refused before anything runs.


def test_an_unknown_tier_is_refused_with_the_list():
    with pytest.raises(emu.EmuError, match=r"no tier 'bf16'.*\n.*exact, float64, float32"):
        check(program, MESH, reference, tier="bf16")


@pytest.mark.parametrize("wrong", [None, 3, {"loss": 1.0}])
def test_a_reference_that_is_no_function_is_refused(wrong):
    with pytest.raises(emu.EmuError, match=r"the reference is a .*, not a program\n.*reference\(rank\)"):
        check(program, MESH, wrong)


@pytest.mark.parametrize("wrong", ["some", -1, 2.5, True, None])
def test_a_wrong_number_of_mutants_is_refused_before_anything_runs(wrong):
    with pytest.raises(emu.EmuError, match='"none", "sampled", "all", or a number'):
        check(lambda rank: pytest.fail("it ran"), MESH, lambda: pytest.fail("it ran"), mutants=wrong)


@pytest.mark.parametrize(
    ("asked", "run"), [("none", 0), (0, 0), (3, 3), ("3", 3), ("sampled", 8), ("all", 10), (99, 10)]
)
def test_as_many_mutants_run_as_were_asked_for(asked, run):
    found = check(program, MESH, reference, tier="float64", mutants=asked)
    assert found and (found.mutants, found.mutants_killed) == (run, run)


# Races, and memory that ranks share: results may be right by luck.


@pytest.mark.parametrize("tier", TIERS)
def test_a_race_is_not_equivalent_whatever_its_results(tier):
    def overlapping(rank, waits):
        g = torch.ones(4) * (rank + 1)
        work = rank.group("dp").all_reduce(g, async_op=True)
        if waits:
            work.wait()
        out = g * 2
        work.wait()
        return out

    right = lambda waits: torch.full((4,), 12.0)  # noqa: E731
    with pytest.raises(BufferInFlight):
        check(overlapping, MESH, right, args=(False,), tier=tier)
    assert check(overlapping, MESH, right, args=(True,), tier=tier)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_sum_through_a_global_dict_are_refused(tier, shared):
    box = {}

    def summing(rank):
        g = torch.ones(4) * (rank + 1)
        if not shared:
            return rank.group("dp").all_reduce(g)
        box[int(rank)] = g
        rank.group("dp").barrier()
        return sum(box[r] for r in range(3))

    right = lambda: torch.full((4,), 6.0)  # noqa: E731
    if shared:
        with pytest.raises(CrossRankAccess):
            check(summing, MESH, right, tier=tier)
    else:
        assert check(summing, MESH, right, tier=tier)


def test_a_program_that_runs_in_float64_only_is_tracked_in_it():
    def wide(rank, races):
        assert torch.ones(1).dtype == torch.float64
        g = torch.ones(4)
        work = rank.group("dp").all_reduce(g, async_op=True)
        out = g * 2 if races else None
        work.wait()
        return g * 2 if out is None else out

    right = lambda races: torch.full((4,), 6.0)  # noqa: E731
    assert check(wide, MESH, right, args=(False,), tier="float64")
    with pytest.raises(BufferInFlight):
        check(wide, MESH, right, args=(True,), tier="float64")


# What cannot be compared, or says nothing.


def test_an_empty_result_proves_nothing():
    found = check(lambda rank: None, MESH, lambda: None)
    assert not found and "returns nothing to compare" in found.why and "emu.grads(model)" in found.why


def test_an_all_zero_result_proves_nothing():
    found = check(lambda rank: torch.zeros(3), MESH, lambda: torch.zeros(3))
    assert not found and not found.equivalent and "every result is zero" in found.why
    assert check(lambda rank: torch.ones(3), MESH, lambda: torch.ones(3))


def test_a_result_that_cannot_be_compared_is_named():
    with pytest.raises(emu.EmuError, match="model is a Linear, which cannot be compared"):
        check(program, MESH, lambda: {"model": torch.nn.Linear(1, 1)})


def test_a_result_that_one_side_lacks_is_named():
    def without_loss(rank):
        return {"parameters": program(rank)["parameters"]}

    found = check(without_loss, MESH, reference, mutants="none")
    assert not found and found.first_divergence == "loss" and "the program has none" in found.why
    found = check(program, MESH, lambda: {"parameters": reference()["parameters"]}, mutants="none")
    assert not found and found.first_divergence == "loss" and "the reference has none" in found.why


def test_another_shape_is_named_with_both():
    found = check(lambda rank: torch.ones(2), MESH, lambda: torch.ones(3))
    assert not found and "shapes (2,) and (3,)" in found.why


def test_what_is_not_finite_is_never_equivalent():
    for value in (float("nan"), float("inf")):
        found = check(lambda rank, v=value: torch.tensor([1.0, v]), MESH, lambda: torch.ones(2), tier="float64")
        assert not found and "not finite" in found.why


def test_overflows_on_both_sides_prove_nothing():
    for value in (float("nan"), float("inf")):
        found = check(lambda rank, v=value: torch.tensor([1.0, v]), MESH, lambda v=value: torch.tensor([1.0, v]))
        assert not found and "not finite on both sides" in found.why


def test_numbers_of_different_kinds_are_compared_by_value():
    assert check(lambda rank: torch.ones(2).sum().item(), MESH, lambda: torch.tensor(2), tier="float32")
    for imaginary in (1.0, 2.0):
        found = check(lambda rank: torch.ones(2) + 1j, MESH, lambda i=imaginary: torch.ones(2) + 1j * i, tier="float64")
        assert bool(found) == (imaginary == 1.0)


def test_replicas_that_disagree_are_named_with_their_ranks():
    found = check(lambda rank: {"w": torch.tensor([1.0 + (rank == 2)])}, MESH, lambda: {"w": torch.ones(1)})
    assert not found and found.first_divergence == found.worst_parameter == "w"
    assert "ranks 0 and 2" in found.why and "'dp'" in found.why


def test_a_rank_that_returns_less_is_named():
    found = check(lambda rank: {"w": torch.ones(1)} if rank != 1 else {}, MESH, lambda: {"w": torch.ones(1)})
    assert not found and "rank 1" in found.why and "'w'" in found.why


def test_pieces_are_put_together_by_their_layouts():
    whole = torch.arange(6.0) + 1

    def pieces(rank, placement):
        mine = {"shard": whole.split(2)[rank], "partial": whole / 4 * (rank + 1 if rank < 2 else 1)}[placement]
        layout = {"shard": emu.Shard(0), "partial": emu.Partial("sum")}[placement]
        return emu.Grads({"w": mine.clone()}, {"w": emu.Layout({"dp": layout})})

    def right(placement):
        return {"w": whole.clone()}

    for placement in ("shard", "partial"):
        assert check(pieces, MESH, right, args=(placement,), tier="float64")
    forgot = check(lambda rank, placement: {"w": pieces(rank, placement)["w"]}, MESH, right, args=("shard",))
    assert not forgot  # without its layout a piece is a replica that disagrees


@pytest.mark.parametrize(("op", "whole"), [("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0), ("prod", 6.0)])
def test_partial_results_are_combined_by_their_operation(op, whole):
    def parts(rank):
        return emu.Grads({"w": torch.ones(2) * (rank + 1)}, {"w": emu.Layout({"dp": emu.Partial(op)})})

    assert check(parts, MESH, lambda: {"w": torch.full((2,), whole)})
    assert not check(parts, MESH, lambda: {"w": torch.full((2,), whole + 1)})
    with pytest.raises(emu.EmuError, match=r"no Partial\('mean'\).*\n.*sum, avg, max, min, prod"):
        emu.Partial("mean")


def test_layouts_that_differ_or_name_no_axis_and_names_that_collide_are_refused():
    def cut(rank, axis, everyone):
        layouts = {"w": emu.Layout({axis: emu.Shard(0)})} if everyone or rank != 1 else {}
        return emu.Grads({"w": torch.ones(1)}, layouts)

    right = lambda *args: {"w": torch.ones(3)}  # noqa: E731
    assert check(cut, MESH, right, args=("dp", True))
    with pytest.raises(emu.EmuError, match="ranks 0 and 1 return 'w' with different layouts"):
        check(cut, MESH, right, args=("dp", False))
    with pytest.raises(emu.EmuError, match="'w' names axis 'tp', but the mesh has dp"):
        check(cut, MESH, right, args=("tp", True))
    twice = {"a": {"b": 1.0}, "a.b": 2.0}
    with pytest.raises(emu.EmuError, match=r"two results are called 'a\.b'"):
        check(lambda rank: twice, MESH, lambda: twice)


# A reference with a rank, without one, and with arguments.


def test_a_reference_may_take_the_rank_or_leave_it_out():
    def with_rank(rank, scale):
        assert rank == 0 and rank.group("dp").size == 1
        return torch.ones(2) * scale

    def with_default(scale, unused=None):
        assert unused is None
        return torch.ones(2) * scale

    def named_rank(rank, scale=None):
        return torch.ones(2) * scale

    for right in (
        with_rank,
        with_default,
        named_rank,
        lambda scale: torch.ones(2) * scale,
        lambda *a: torch.ones(2) * a[-1],
    ):
        assert check(lambda rank, scale: torch.ones(2) * scale, MESH, right, args=(3.0,))
        assert not check(lambda rank, scale: torch.ones(2) * scale + 1, MESH, right, args=(3.0,))


# Mutants.


def test_a_program_that_returns_too_little_leaves_survivors_and_is_not_accepted():
    def only_loss(rank):
        return {"loss": program(rank)["loss"]}

    found = check(only_loss, MESH, lambda: {"loss": reference()["loss"]}, mutants="all")
    assert found.equivalent and not found  # the loss is right, but gradients went unchecked
    assert len(found.survivors) == 5 and found.mutants_killed == 5
    assert all("dp.all_reduce at" in survivor for survivor in found.survivors)
    assert "must return more" in found.why and "went unnoticed" in str(found)


@pytest.mark.parametrize("way", ["copied", "optimizer", "bare"])
def test_whatever_holds_the_parameters_survivors_are_noticed(way):
    """A deep copy registers no parameter, and a bare tensor belongs to no module: both are states nevertheless."""
    import copy

    def too_little(rank):
        if way == "copied":
            model = copy.deepcopy(GPT(SMALL, seed=0))
            model.loss_sum(data().x, data().y).backward()
            weights = list(model.parameters())
        else:
            weights = [torch.ones(3, requires_grad=True)]
            (weights[0] * (rank + 1)).sum().backward()
        for w in weights:
            rank.group("dp").all_reduce(w.grad)
        if way == "optimizer":  # its parameters are the state, and it has none of its own
            torch.optim.SGD(weights, lr=0.5).step()
        return torch.ones(1)

    found = check(too_little, MESH, lambda: torch.ones(1), tier="float64", mutants="all")
    assert found.equivalent and not found and found.survivors


@pytest.mark.parametrize("replaced", [True, False])
def test_a_parameter_that_was_replaced_before_any_use_is_no_state(replaced):
    """As a tied head's first weight: its memory was never written, and so differs from run to run."""
    import itertools

    garbage = itertools.count()

    def step(rank):
        layer = torch.nn.Linear(2, 2, bias=False)
        layer.weight = torch.nn.Parameter(torch.full((2, 2), float(next(garbage))))
        if replaced:
            layer.weight = torch.nn.Parameter(torch.ones(2, 2))
        rank.group("dp").broadcast(torch.ones(3))  # what every rank has anyway
        return torch.ones(1)

    found = check(step, MESH, lambda: torch.ones(1), tier="float64", mutants="all")
    assert found.mutants > 0 and bool(found.survivors) is not replaced  # one that stays is a state: it is noticed


@pytest.mark.parametrize(
    ("mesh", "fields"), [("dp=2", {}), ("dp=2", {"zero": 3}), ("tp=2", {}), ("tp=2", {"sp": True})], ids=str
)
def test_no_mutant_of_a_tied_models_plan_goes_unnoticed(mesh, fields):
    from emu.models import Decoder, config

    small = config("gpt-tiny", layers=1, tied=True)
    plan = emu.Plan(mesh, global_batch=3, seq=8, **fields)
    found = emu.verify(lambda: Decoder(small, seed=0), plan, mutants="all")
    assert found and found.mutants_killed and not found.survivors


def test_a_communication_that_changes_nothing_has_equivalent_mutants():
    """Which mutants are equivalent is read off the ranks' states, so what is thrown away counts for nothing."""

    def wasteful(rank):
        rank.group("dp").all_reduce(torch.ones(3) * (rank + 1))
        return torch.ones(1)

    found = check(wasteful, MESH, lambda: torch.ones(1), mutants="all")
    assert found and (found.mutants, found.mutants_equivalent, found.mutants_killed) == (5, 5, 0)
    assert "5 more change nothing" in str(found)


def test_a_mutant_that_makes_the_program_fail_is_killed():
    def careful(rank):
        total = rank.group("dp").all_reduce(torch.ones(2))
        if total[0] != 3:
            raise AssertionError("lost a rank")
        return total

    found = check(careful, MESH, lambda: torch.full((2,), 3.0), mutants="all")
    assert found and found.mutants_killed == found.mutants == 5


@pytest.mark.parametrize("kind", ["all_reduce", "send"])
def test_a_mutant_that_never_ends_is_killed(kind):
    """A loop until all are done: a mutant that loses what the others say never is."""

    def until_done(rank):
        dp, rounds, done = rank.group("dp"), 0, torch.zeros(1)
        while done < 3:
            if kind == "all_reduce":
                done = dp.all_reduce(torch.ones(1))
            else:
                dp.exchange([("send", torch.full((1,), 3.0), (rank + 1) % 3), ("recv", done, (rank - 1) % 3)])
            rounds += 1
        return torch.tensor([float(rounds)])

    found = check(until_done, MESH, lambda: torch.ones(1), mutants="all", tier="float64")
    assert found and found.mutants_killed > 0 and found.mutants_killed + found.mutants_equivalent == found.mutants


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "send"])
def test_mutants_of_every_kind_of_communication_are_killed(kind):
    def talk(rank):
        dp, x = rank.group("dp"), torch.arange(6.0) + 10 * rank + 1
        if kind == "send":
            out = torch.zeros(6)
            dp.exchange([("send", x, (rank + 1) % 3), ("recv", out, (rank - 1) % 3)])
        else:
            out = getattr(dp, kind)(x.clone())
        return emu.Grads({"out": out}, {"out": emu.Layout({"dp": emu.Shard(0)})})

    expected = torch.cat([r["out"] for r in emu.launch(talk, MESH).results])
    found = check(talk, MESH, lambda: {"out": expected.double()}, tier="float64", mutants="all")
    assert found and found.mutants_killed == found.mutants > 0, str(found)


def test_a_program_on_one_rank_has_no_mutants():
    found = check(program, emu.Mesh(dp=1), reference, mutants="all")
    assert found and found.mutants == 0


# emu.verify.


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", ["module", "factory"])
def test_a_plan_is_verified_for_a_module_or_a_function_that_makes_one(tier, kind):
    model = GPT(SMALL, seed=0) if kind == "module" else lambda: GPT(SMALL, seed=0)
    found = emu.verify(model, emu.Plan("dp=3", global_batch=5, seq=4), tier=tier, mutants=8)
    assert found and found.mutants_killed >= 5, str(found)  # the others change nothing: every rank makes the same model
    if kind == "module":  # it is left as it was
        assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("seq", [5, 32])
def test_a_plan_with_longer_sequences_than_the_model_takes_is_refused(seq):
    with pytest.raises(PlanError, match=rf"seq={seq}, but Decoder takes sequences of at most 4 tokens") as error:
        emu.verify(GPT(SMALL), emu.Plan("dp=2", seq=seq))
    assert (error.value.field, error.value.value, error.value.nearest) == ("seq", seq, 4)
    assert emu.verify(GPT(SMALL), emu.Plan("dp=2", seq=3), mutants="none")  # shorter ones are fine


def test_verify_says_what_a_model_lacks():
    with pytest.raises(emu.EmuError, match=r"Linear has no loss_sum\(x, y\)"):
        emu.verify(torch.nn.Linear(1, 1), emu.Plan("dp=2"))

    class Bare(torch.nn.Linear):
        def loss_sum(self, x, y):
            return self(x).sum()

    with pytest.raises(emu.EmuError, match=r"does not say its vocabulary.*\n.*pass a batch"):
        emu.verify(Bare(1, 1), emu.Plan("dp=2"))
    with_batch = emu.Batch(torch.ones(3, 1), torch.zeros(3))
    assert emu.verify(lambda: Bare(1, 1), emu.Plan("dp=2"), with_batch, tier="float64")


@pytest.mark.parametrize(("vocab", "seq"), [("vocab", "seq"), ("vocab_size", "max_position_embeddings")])
def test_a_batch_is_drawn_from_what_a_config_says_also_in_the_words_of_transformers(vocab, seq):
    from types import SimpleNamespace

    def model(**config):
        made = GPT(SMALL, seed=0)
        made.config = SimpleNamespace(**config)
        return made

    told = model(**{vocab: SMALL.vocab, seq: SMALL.seq})
    plan = emu.Plan("dp=2", global_batch=64, seq=SMALL.seq)
    drawn = random_batch(told, plan)
    assert drawn.x.shape == (64, SMALL.seq) and int(drawn.x.max()) == SMALL.vocab - 1
    assert random_batch(model(**{vocab: SMALL.vocab}), emu.Plan("dp=2", seq=99)).x.shape == (8, 99)  # no limit is told
    with pytest.raises(PlanError, match=rf"at most {SMALL.seq} tokens \(config.{seq}\)") as caught:
        random_batch(told, emu.Plan("dp=2", seq=SMALL.seq + 1))
    assert caught.value.nearest == SMALL.seq
    with pytest.raises(emu.EmuError, match=r"config\.vocab or config\.vocab_size"):  # negative control
        random_batch(model(**{seq: SMALL.seq}), plan)


@pytest.mark.parametrize("as_function", [False, True])
def test_a_model_that_is_frozen_altogether_has_nothing_to_verify(as_function):
    def make(trained):
        model = GPT(SMALL)
        for name, p in model.named_parameters():
            p.requires_grad_(name == trained)
        return model

    def verdict(trained):
        model = (lambda: make(trained)) if as_function else make(trained)
        return emu.verify(model, emu.Plan("dp=2", seq=4), mutants="none")

    with pytest.raises(emu.EmuError, match=r"all parameters of .* are frozen") as error:
        verdict(None)
    assert "requires_grad" in error.value.hint
    assert verdict(next(name for name, _ in make(None).named_parameters()))  # one is enough


def test_a_model_that_depends_on_more_than_its_rows_is_not_equivalent():
    """Batch statistics are of each rank's own rows: a real fault of data parallelism, not noise."""

    class Statistics(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))

        def loss_sum(self, x, y):
            return ((x - x.mean(0)) * self.w).pow(2).sum()

    batch = emu.Batch(torch.arange(8.0).reshape(4, 2) ** 2, torch.zeros(4))
    found = emu.verify(Statistics, emu.Plan("dp=2"), batch, tier="float64")
    assert not found and found.first_divergence == "loss"
    assert emu.verify(Statistics, emu.Plan("dp=1"), batch, tier="float64")


# After a run.


def test_a_run_checks_itself_and_a_loaded_one_cannot(tmp_path):
    run = emu.launch(program, MESH)
    assert run.check(reference, mutants="none")
    assert not run.check(lambda: {name: t * 2 for name, t in reference().items() if name == "loss"}, mutants="none")
    run.save(tmp_path / "run")
    with pytest.raises(emu.EmuError, match=r"has no program.*\n.*launch the program again"):
        emu.Run.load(tmp_path / "run").check(reference)


def test_a_check_leaves_torch_as_it_was():
    before, state = torch.get_default_dtype(), torch.random.get_rng_state()
    check(program, MESH, reference, mutants="none")
    with pytest.raises(ZeroDivisionError):
        check(lambda rank: 1 / 0, MESH, reference)
    assert torch.get_default_dtype() == before and torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("tier", ["exact", "float64", "float32"])
def test_whole_numbers_are_compared_as_whole_numbers(tier):
    """2^53 and 2^53 + 1 are the same double."""

    def one_more(more):
        return lambda rank: {"w": torch.ones(2), "count": torch.tensor([2**53 + more])}

    assert check(one_more(1), MESH, one_more(1), tier=tier, mutants="none")
    verdict = check(one_more(1), MESH, one_more(0), tier=tier, mutants="none")
    assert not verdict and verdict.first_divergence == "count"
