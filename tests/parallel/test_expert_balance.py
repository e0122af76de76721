"""The balance loss and the capacity of sequences and batches that ranks hold parts of: what one device computes."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import emu
from emu.equivalence import check
from emu.models.router import Balance, Capacity
from emu.parallel.expert import balance as balancing
from emu.parallel.expert import become_shared_balance, become_shared_capacity
from emu.spmd import EmuError, split_sizes

from .moe_programs import Case, shape, spread


@dataclass(frozen=True)
class Sequences:
    """Sequences, cut over tp along their length and over dp by rows."""

    case: Case  # its tokens are not used
    rows: tuple[int, ...]  # of every dp rank
    seq: int
    tp: int
    ep: int = 1
    etp: int = 1

    def data(self):
        """Tokens, and what outputs are multiplied by: [rows, seq, width]; how much the balance of a row weighs: [rows]."""
        g = torch.Generator().manual_seed(self.case.seed + 1)
        n = sum(self.rows)
        x, c = (torch.randn(n, self.seq, self.case.config.width, generator=g) for _ in range(2))
        return x, c, torch.randint(0, self.seq + 1, (n,), generator=g)

    @property
    def mesh(self):
        return emu.Mesh(dp=len(self.rows), tp=self.tp, ep=self.ep, etp=self.etp)


def balance_of(model, weights):
    return (model.balance_loss * weights).sum() * model.balance.coefficient


def reference(rank, cut, *others):
    model = cut.case.model()
    x, c, weights = cut.data()
    x.requires_grad_()
    y = model(x)
    balance = balance_of(model, weights)
    ((y * c).sum() + balance).backward()
    n = x.shape[0] * x.shape[1]
    return {"y": y, "loss": balance.detach() / n, "x": {"grad": x.grad / n}, "grads": emu.spmd.grads(model)}


def program(rank, cut, break_it=lambda rank, model: None):
    model = cut.case.model()
    layouts = spread(rank, model)
    tp, dp, world = rank.group("tp"), rank.group("dp"), rank.group("dp", "tp")
    become_shared_balance(model.balance, tp, dp)
    become_shared_capacity(model.capacity, tp)
    break_it(rank, model)
    sizes = split_sizes(cut.seq, tp.size)
    x, c, weights = cut.data()
    x, c = (t.split(cut.rows)[dp.rank].split(sizes, 1)[tp.rank] for t in (x, c))
    x = x.clone().requires_grad_()
    y = model(x)
    balance = balance_of(model, weights.split(cut.rows)[dp.rank])  # the same on every rank of tp
    ((y * c).sum() + balance).backward()
    n = sum(cut.rows) * cut.seq

    def everyone(t):
        return dp.all_gather(tp.all_gather(t.detach(), 1, sizes), 0, cut.rows)

    for name, p in model.named_parameters():
        (rank.group("edp") if name in layouts else world).all_reduce(p.grad)
    return {
        "y": everyone(y),
        "loss": dp.all_reduce(balance.detach().clone()) / n,
        "x": {"grad": everyone(x.grad) / n},
        "grads": emu.spmd.grads(model, layouts),
    }


def made(over="sequence", capacity=None, rows=(2, 1), seq=5, tp=2, **cut):
    return Sequences(Case(shape(balance=0.3, balance_over=over, capacity=capacity), ()), rows, seq, tp, **cut)


@st.composite
def sequences(draw):
    tp = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3).filter(any))
    ranks = tp * len(rows)
    ep = draw(st.sampled_from([n for n in range(1, 5) if ranks % n == 0]))
    experts = draw(st.integers(max(2, ep), 6))
    config = shape(
        experts,
        draw(st.integers(1, min(3, experts))),
        balance=0.3,
        balance_over=draw(st.sampled_from(["sequence", "batch"])),
        capacity=draw(st.sampled_from([None, 0.5, 1.0, 1.25])),
    )
    return Sequences(Case(config, (), draw(st.integers(0, 99))), tuple(rows), draw(st.integers(1, 7)), tp, ep)


@given(sequences())
@example(made("batch", rows=(2, 0, 1), seq=1, tp=2))  # a rank without rows, and one without tokens of its sequences
def test_any_cut_gives_the_balance_loss_its_gradient_and_the_drops_of_one_device(cut):
    verdict = check(program, cut.mesh, reference, args=(cut,), mutants="none")
    assert verdict, verdict.why


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_every_mutant_of_a_communication_is_noticed(over):
    cut = made(over, capacity=0.75, ep=2)
    verdict = check(program, cut.mesh, reference, args=(cut,), mutants="all")
    assert verdict and not verdict.survivors, verdict.why
    assert verdict.mutants_killed > 20


def told(cut, break_it):
    return not check(program, cut.mesh, reference, args=(cut, break_it), mutants="none")


def test_a_balance_over_the_tokens_of_one_rank_is_another_loss():
    def alone(rank, model):
        model.balance.__class__ = Balance

    assert told(made("sequence"), alone) and told(made("batch"), alone)


def test_a_gradient_of_its_own_ranks_loss_alone_falls_short(monkeypatch):
    monkeypatch.setattr(balancing, "copy_to", lambda x, group, name=None: x)
    assert told(made("batch"), lambda *_: None)


def test_a_capacity_that_counts_from_the_start_of_its_own_shard_drops_others():
    def alone(rank, model):
        model.capacity.__class__ = Capacity

    def forgets_earlier_ranks(rank, model):
        keep = model.capacity.keep
        model.capacity.keep = lambda experts, limit, before: keep(experts, limit)

    cut = made(capacity=0.75)
    assert told(cut, alone) and told(cut, forgets_earlier_ranks)


def test_a_length_that_is_known_spares_the_host_a_wait():
    def waits(cut, knows):
        class Known:
            length = cut.seq

        def program(rank):
            model = cut.case.model()
            become_shared_capacity(model.capacity, rank.group("tp"), Known() if knows else None)
            experts = torch.zeros(1, split_sizes(cut.seq, 2)[rank], 2, dtype=torch.int64)
            return model.capacity(experts)

        run = emu.launch(program, emu.Mesh(tp=2))
        return run.results, len(list(run.trace.of(emu.trace.events.HostWait)))

    cut = made(capacity=0.75)
    (kept, with_it), (same, without) = waits(cut, True), waits(cut, False)
    assert all(torch.equal(a, b) for a, b in zip(kept, same))
    assert with_it == 0 < without


@pytest.mark.parametrize(("over", "rows", "seq"), [("sequence", 2, 0), ("batch", 2, 0), ("batch", 0, 3)])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_where_there_are_no_tokens_the_balance_loss_is_0_as_on_one_device(over, rows, seq, top_k):
    """Nothing over nothing would be nan."""

    def program(rank):
        balance = Balance(over)
        become_shared_balance(balance, rank.group("tp"))
        probabilities = torch.zeros(rows, seq, 4, requires_grad=True)
        loss = balance(probabilities, torch.zeros(rows, seq, top_k, dtype=torch.int64))
        loss.sum().backward()
        return loss.detach(), probabilities.grad

    ((right, _),) = emu.launch(program, emu.Mesh(tp=1)).results
    assert not right.any()
    for loss, grad in emu.launch(program, emu.Mesh(tp=2)).results:
        assert torch.equal(loss, right) and grad.shape == (rows, seq, 4)


def test_sequences_that_nobody_cuts_are_left_to_the_plain_module():
    def program(rank):
        model = made("sequence", capacity=1.0).case.model()
        become_shared_balance(model.balance, rank.group("tp"), rank.group("dp"))
        become_shared_capacity(model.capacity, rank.group("tp"))
        return type(model.balance) is Balance and type(model.capacity) is Capacity

    assert emu.launch(program, emu.Mesh(dp=2, tp=1)).results == [True, True]


def test_a_module_is_shared_once():
    def program(rank):
        for _ in range(2):
            become_shared_balance(balance, rank.group("tp"))

    balance = Balance()
    with pytest.raises(EmuError, match="already"):
        emu.launch(program, emu.Mesh(tp=2), ranks=None)
