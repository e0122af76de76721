"""Random numbers under tensor parallelism: equal on replicas, independent on shards and between data ranks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu
import emu.parallel.tensor.randomness as randomness
from emu.equivalence.compare import whole_results
from emu.models import GPT, Config
from emu.parallel import DataParallel, shard_model
from emu.parallel.tensor.randomness import become_sharded_dropout, mixed, own_randomness, share_generators
from emu.spmd import EmuError, Mesh, copy_to, reduce_from
from emu.virtual.launch import run_virtual
from tests.parallel.programs import batch

N = 64  # numbers a draw: two that are independent agree in half of them, never in all


def dropouts(rank):
    """A dropout for what is replicated over tp, and one for what is sharded."""
    whole, shard = nn.Dropout(0.5), nn.Dropout(0.5)
    become_sharded_dropout(shard, rank.group("tp"))
    return {"replicated": whole, "sharded": shard}


def masks(rank, seed, plan, share=True):
    """What a rank's dropouts leave of ones: (kind, mask), in the order of the plan."""
    torch.manual_seed(seed)  # the same on every rank, as scripts do
    if share:
        share_generators(rank, rank.group("tp"))
    drop, got = dropouts(rank), []
    for kind in plan:
        rank.group().barrier()  # a hand-over: others draw in between
        if kind == "nothing":  # of a sharded activation, on some ranks
            drop["sharded"](torch.ones(0 if rank.coords["tp"] else N))
        else:
            got.append((kind, drop[kind](torch.ones(N))))
    return got


def follows_the_rule(mesh, seed, plan, order="program", **options):
    """Asserts that masks agree exactly where they should. Returns them."""
    results = run_virtual(lambda rank: masks(rank, seed, plan, **options), mesh, order=order).results
    seen = {}
    for rank, got in enumerate(results):
        coords = mesh.coords(rank)
        others = tuple(i for axis, i in coords.items() if axis != "tp")
        for i, (kind, mask) in enumerate(got):
            where = (i, others, coords["tp"] if kind == "sharded" else "all")
            assert torch.equal(seen.setdefault(where, mask), mask), f"replicas have different masks: {where}"
    different = {tuple(mask.tolist()) for mask in seen.values()}
    assert len(different) == len(seen), "masks that should be independent are the same"
    return results


meshes = st.builds(
    lambda tp, dp, pp: Mesh(pp=pp, dp=dp, tp=tp), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)
)
kinds = st.sampled_from(["replicated", "sharded", "nothing"])
plans = st.lists(kinds, min_size=1, max_size=8)
PLAN = ["replicated", "sharded", "nothing", "sharded", "replicated"]
MESH = Mesh(dp=2, tp=3)


@given(meshes, st.integers(0, 2**32), plans, st.integers(0, 99))
def test_masks_agree_on_replicas_and_nowhere_else_whatever_runs_in_between(mesh, seed, plan, order):
    once = follows_the_rule(mesh, seed, plan)
    again = follows_the_rule(mesh, seed, plan, order)
    for a, b in zip(once, again):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(a, b)), "the order of ranks decides nothing"


def test_other_seeds_give_other_masks():
    seen = set()
    for seed in range(50):
        for got in follows_the_rule(MESH, seed, ["replicated", "sharded"]):
            seen |= {tuple(mask.tolist()) for _, mask in got}
    assert len(seen) == 50 * (2 + 6)


@contextmanager
def never_own(group):
    yield


@contextmanager
def never_shared_again(group):
    torch.manual_seed(mixed(randomness._draw(), group.rank))
    yield


@contextmanager
def drawn_where_there_is_something(group):
    """Draws for the seed on the first rank only, as if the others had nothing to drop."""
    state = torch.get_rng_state()
    torch.manual_seed(mixed(randomness._draw(), group.rank))
    yield
    if group.rank:
        torch.set_rng_state(state)


@pytest.mark.parametrize("wrong", [never_own, never_shared_again, drawn_where_there_is_something])
def test_control_another_rule_is_noticed(wrong, monkeypatch):
    follows_the_rule(MESH, 1, PLAN)
    monkeypatch.setattr(randomness, "own_randomness", wrong)
    with pytest.raises(AssertionError):
        follows_the_rule(MESH, 1, PLAN)


def test_control_data_ranks_that_are_not_told_apart_are_noticed(monkeypatch):
    monkeypatch.setattr(randomness, "mixed", lambda seed, *others: seed)
    with pytest.raises(AssertionError, match="should be independent"):
        follows_the_rule(MESH, 1, ["replicated"])


def test_control_ranks_that_do_not_share_a_state_are_noticed():
    def program(rank):
        drop = nn.Dropout(0.5)  # every virtual rank starts from a state of its own
        return [("replicated", drop(torch.ones(N)))]

    a, b = (got[0][1] for got in run_virtual(program, Mesh(tp=2)).results)
    assert not torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------------ the mixing
def test_every_bit_of_what_is_mixed_changes_half_of_the_hash():
    flips = []
    for seed, index in [(0, 0), (1, 2), (2**63 - 1, 7), (0x123456789ABCDEF, 1)]:
        for bit in range(63):
            flips.append(bin(mixed(seed, index) ^ mixed(seed ^ 1 << bit, index)).count("1"))
        for bit in range(12):
            flips.append(bin(mixed(seed, index) ^ mixed(seed, index ^ 1 << bit)).count("1"))
    # 64 coins: 32 heads, standard deviation 4; of 300 such throws the mean has 0.23
    assert min(flips) > 8 and max(flips) < 56 and abs(sum(flips) / len(flips) - 32) < 1.5


def collisions(mix) -> int:
    """How many of neighbouring (seed, index) share the 32 bits that torch's CPU generator takes."""
    pairs = [(seed, index) for seed in range(64) for index in range(64)]
    return len(pairs) - len({mix(*pair) % 2**32 for pair in pairs})


def test_neighbouring_seeds_on_neighbouring_ranks_do_not_meet():
    assert collisions(mixed) == 0  # 4096^2 / 2 pairs in 2^32: 0.002 expected
    assert collisions(lambda seed, index: mixed(index, seed)) == 0
    assert mixed(1, 2) != mixed(2, 1)


def test_control_seed_plus_rank_meets():
    assert collisions(lambda seed, index: seed + index) > 3000


def test_masks_drop_what_they_should_and_independently():
    tp, n, p = 4, 50_000, 0.1

    def program(rank):
        torch.manual_seed(0)
        share_generators(rank, rank.group("tp"))
        drop = nn.Dropout(p)
        become_sharded_dropout(drop, rank.group("tp"))
        return drop(torch.ones(n)) == 0

    dropped = torch.stack(run_virtual(program, Mesh(dp=2, tp=tp)).results).double()  # [ranks, n]
    five_sigma = 5 * (p * (1 - p) / n) ** 0.5
    assert (dropped.mean(1) - p).abs().max() < five_sigma
    correlation = torch.corrcoef(dropped) - torch.eye(2 * tp)
    assert correlation.abs().max() < 5 / n**0.5
    ahead = torch.corrcoef(torch.stack([row for i in range(4) for row in dropped[:, i : n - 4 + i]]))  # shifted streams
    assert (ahead - torch.eye(8 * tp)).abs().max() < 5.5 / n**0.5  # 496 pairs


# ------------------------------------------------------------------------------------------- checkpoints, and gradients
@pytest.mark.parametrize("reentrant", [False, True])
@given(plan=st.lists(st.sampled_from(["replicated", "sharded"]), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_recomputed_block_draws_the_same_masks(reentrant, plan, seed):
    def program(rank, recompute):
        torch.manual_seed(seed)
        share_generators(rank, rank.group("tp"))
        drop, drawn = dropouts(rank), []

        def block(x):
            x = torch.tanh(x)
            for kind in plan:
                x = drop[kind](x)
            drawn.append(x.detach() != 0)
            return torch.exp(x)

        x = torch.linspace(0.1, 1, N).requires_grad_()
        for _ in range(2):
            y = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
            y.sum().backward()
        assert len(drawn) == (4 if recompute else 2)
        if recompute:
            assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
        return x.grad, torch.rand(3)  # and goes on from where it was

    plain, again = (run_virtual(program, Mesh(tp=2), args=(r,)).results for r in (False, True))
    assert all(torch.equal(a, b) for one, other in zip(plain, again) for a, b in zip(one, other))
    assert torch.equal(plain[0][1], plain[1][1])


def test_control_a_state_that_checkpointing_does_not_know_is_noticed(monkeypatch):
    own = torch.Generator().manual_seed(7)

    @contextmanager
    def apart(group):
        state = torch.get_rng_state()
        torch.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=own)))
        yield
        torch.set_rng_state(state)

    def program(rank):
        drop, drawn = dropouts(rank)["sharded"], []

        def block(x):
            y = drop(x)
            drawn.append(y.detach())
            return torch.tanh(y)

        checkpoint(block, torch.ones(N, requires_grad=True), use_reentrant=False).sum().backward()
        return torch.equal(drawn[0], drawn[1])

    assert run_virtual(program, Mesh(tp=2)).results == [True, True]
    monkeypatch.setattr(randomness, "own_randomness", apart)
    assert run_virtual(program, Mesh(tp=2)).results == [False, False]


@given(tp=st.integers(1, 4), seed=st.integers(0, 99))
def test_gradients_are_those_of_one_device_that_drops_the_same(tp, seed):
    """A two-layer perceptron: hidden units are sharded, so their masks join to one; the output's mask is everyone's."""
    width, hidden, rows = 6, 8, 5
    sizes = emu.spmd.split_sizes(hidden, tp)
    g = torch.Generator().manual_seed(seed)
    x, up, down, weigh = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((rows, width), (hidden, width), (width, hidden), (rows, width))
    )

    def program(rank):
        torch.manual_seed(seed)
        group = rank.group("tp")
        share_generators(rank, group)
        drop = dropouts(rank)
        mine = [x.clone(), up.split(sizes)[group.rank].clone(), down.split(sizes, 1)[group.rank].clone()]
        a, b, c = (t.requires_grad_() for t in mine)
        h = drop["sharded"](torch.tanh(copy_to(a, group) @ b.T))
        y = drop["replicated"](reduce_from(h @ c.T, group))
        (y * weigh).sum().backward()
        return y.detach(), a.grad, b.grad, c.grad, h.detach() != 0, y.detach() != 0

    results = run_virtual(program, Mesh(tp=tp)).results
    inner = torch.cat([r[4] for r in results], 1)
    assert all(torch.equal(r[5], results[0][5]) for r in results)
    a, b, c = (t.clone().requires_grad_() for t in (x, up, down))
    y = (torch.tanh(a @ b.T) * inner * 2) @ c.T * results[0][5] * 2  # p = 0.5
    (y * weigh).sum().backward()
    close = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of at most 8 terms in another order
    for r, rows_, columns in zip(results, b.grad.split(sizes), c.grad.split(sizes, 1)):
        for ours, right in zip(r, (y.detach(), a.grad, rows_, columns)):
            torch.testing.assert_close(ours, right, **close)


# --------------------------------------------------------------------------------------------------- what it leaves alone
@pytest.mark.parametrize("backend", ["virtual", "shape"])
def test_the_draw_is_no_part_of_the_record(backend):
    def program(rank, sharded):
        drop = nn.Dropout(0.5)
        if sharded:
            become_sharded_dropout(drop, rank.group("tp"))
        drop(torch.ones(8, device=rank.device, requires_grad=True)).sum().backward()

    with_, without = (emu.launch(program, Mesh(tp=2), args=(s,), backend=backend).trace[1] for s in (True, False))
    assert with_ == without and with_


def test_sharing_says_one_number_once():
    def program(rank):
        share_generators(rank, rank.group("tp"))

    for backend in ("virtual", "shape"):
        trace = emu.launch(program, Mesh(dp=2, tp=2), backend=backend).trace
        said = [e for e in trace[3] if type(e).__name__ == "Collective"]
        assert [(e.kind, e.name, e.bytes, e.members) for e in said] == [("broadcast", "random seed", 8, (2, 3))]


def test_what_does_not_drop_draws_nothing():
    def program(rank):
        drop = dropouts(rank)["sharded"]
        before = torch.get_rng_state()
        x = torch.ones(4)
        assert drop.eval()(x) is x
        drop.train().p = 0.0
        drop(x)
        assert torch.equal(torch.get_rng_state(), before)
        drop.p = 0.5
        drop(x)
        assert not torch.equal(torch.get_rng_state(), before)

    run_virtual(program, Mesh(tp=2))


def test_a_group_of_one_is_plain_torch():
    def program(rank):
        torch.manual_seed(3)
        ours = dropouts(rank)["sharded"](torch.ones(N))
        torch.manual_seed(3)
        return torch.equal(ours, F.dropout(torch.ones(N), 0.5))

    assert run_virtual(program, Mesh(tp=1)).results == [True]


def test_the_shared_state_comes_back_when_something_fails_inside():
    def program(rank):
        torch.manual_seed(1)
        with pytest.raises(ZeroDivisionError), own_randomness(rank.group("tp")):
            torch.rand(5)
            raise ZeroDivisionError
        return torch.rand(3)

    a, b = run_virtual(program, Mesh(tp=2)).results
    assert torch.equal(a, b)


def test_a_module_stays_what_it_was():
    class Noise(nn.Module):
        """Draws, and is no dropout."""

        def forward(self, x, scale=1.0):
            return x + scale * torch.randn_like(x)

    def program(rank):
        torch.manual_seed(0)
        noise, drop = Noise(), nn.Dropout(0.25, inplace=True)
        for module in (noise, drop, drop):
            become_sharded_dropout(module, rank.group("tp"))
        assert isinstance(drop, nn.Dropout) and isinstance(noise, Noise)
        assert repr(drop) == "ShardedDropout(p=0.25, inplace=True)" and type(noise).__name__ == "ShardedNoise"
        x = torch.ones(N)
        assert drop(x) is x
        return noise(torch.zeros(3), scale=2.0), torch.rand(1)

    (a, shared), (b, same) = run_virtual(program, Mesh(tp=2)).results
    assert not torch.equal(a, b) and torch.equal(shared, same)


def test_something_that_is_no_module_is_refused():
    with pytest.raises(EmuError, match="a function is no module that draws"):
        run_virtual(lambda rank: become_sharded_dropout(F.dropout, rank.group("tp")), Mesh(tp=2))


# -------------------------------------------------------------------------------------------------------- a whole model
def biased(config):
    """A decoder none of whose branches is 0 anywhere, which would hide whether it was dropped."""
    model, g = GPT(config, seed=0), torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return model


def dropping(rank, config, data, sp):
    """One backward of a decoder that drops out everywhere: loss, gradients, and (module, mask) of every call in order."""
    model = biased(config)
    torch.manual_seed(5)
    dist = DataParallel(model, rank, "dp", sharding=shard_model(model, rank, sp=sp))
    drawn = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, x, out, name=name: drawn.append((name, (out != 0) | (x[0] == 0))))
    loss = dist.backward(data)
    return loss, dist.gather_gradients(), drawn


def joined(mesh, drawn, call, sp):
    """One device's mask of a call, from those of all ranks."""
    name, rows = drawn[0][call][0], []
    for i in range(mesh.axes["dp"]):
        parts = [drawn[mesh.rank_at({"dp": i, "tp": j})][call][1] for j in range(mesh.axes["tp"])]
        sharded = sp or name.endswith("attention.core.dropout")
        if not sharded:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name}: replicas drop differently"
        rows.append(torch.cat(parts, 1) if sharded else parts[0])  # heads of [batch, heads, seq, seq], or the sequence
    return torch.cat(rows)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("tp, dp, sp", [(1, 2, False), (2, 1, False), (2, 2, True), (2, 2, False), (4, 1, True)])
def test_a_decoder_has_the_gradients_of_one_device_that_drops_the_same(tp, dp, sp):
    config = Config(2, 16, 4, vocab=11, seq=6, dropout=0.3, attention_dropout=0.4, fused=False)
    data, mesh = batch(config, 4), Mesh(dp=dp, tp=tp)
    results = run_virtual(dropping, mesh, args=(config, data, sp)).results
    drawn = [masks for *_, masks in results]
    masks = [joined(mesh, drawn, call, sp) for call in range(len(drawn[0]))]
    assert len(masks) == 7 and len({tuple(mask.flatten()[:200].tolist()) for mask in masks}) == 7
    model, left = biased(config), iter(masks)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = lambda x, p=module.p: x * next(left) / (1 - p)
    loss = model.loss_sum(data.x, data.y) / data.tokens
    loss.backward()
    found = whole_results([{"loss": loss, "gradient": gradients} for loss, gradients, _ in results], mesh)
    right = {"loss": loss.detach(), **{f"gradient.{name}": p.grad for name, p in model.named_parameters()}}
    assert found.keys() == right.keys()
    for name, tensor in right.items():  # of the order of 0.1; in float64, but for sums in another order
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-14)
