"""What bisection says is true: of one rank, of numbers written over, of what is right after all, of steps on the way."""

import re

import pytest
import torch
import torch.nn.functional as F

import emu
from emu.equivalence.bisection.standing import Standings

DRAW = torch.Generator().manual_seed(0)
X, W, V = (torch.randn(shape, generator=DRAW) for shape in ((8, 6), (6, 6), (6, 5)))
LABELS = torch.arange(8) % 5


def data():
    return (t.to(torch.get_default_dtype()) for t in (X, W, V))


def reference():
    x, w, v = data()
    w.requires_grad_()
    y = F.linear(torch.relu(x @ w), v.T, torch.ones(5))
    loss = F.cross_entropy(y, LABELS, reduction="sum")
    loss.backward()
    return {"loss": loss.detach(), "y": y.detach(), "w": w.grad}


def program(fault, at=0):
    """The same over dp 2; the fault stands on a line that ends with its name."""

    def step(rank):
        dp = rank.group("dp")
        here = fault if dp.rank == at else ""
        x, w, v = data()
        x, w = x.chunk(2)[dp.rank], w.clone().requires_grad_()
        labels = LABELS.chunk(2)[0 if fault == "labels" else dp.rank]
        h = torch.relu(x @ w).clone()
        if here == "moved":
            h = h + 0.25  # moved
        if here == "some zeros":
            with torch.no_grad():
                h[1, :].zero_()  # some zeros
        if here == "infinite":
            with torch.no_grad():
                h[0, 0].fill_(torch.inf)  # infinite
        y = h @ v + torch.ones(5)
        loss = F.cross_entropy(y, labels, reduction="sum")  # labels
        loss.backward()
        if here == "halved":
            w.grad.mul_(0.5)  # halved
        dp.all_reduce(w.grad)
        out = dp.all_gather(y.detach())
        if fault == "nan":
            w.grad[0, 0] = torch.nan  # nan
        if fault == "zeros at last":
            out[0].zero_()  # zeros at last
        if fault == "other order":
            out = out.flip(1)  # other order
        return {"loss": dp.all_reduce(loss.detach()), "y": out, "w": w.grad}

    return step


def told(fault, at=0):
    verdict = emu.check(program(fault, at), emu.Mesh(dp=2), reference, mutants="none", tier="float64")
    assert not verdict
    return verdict.divergence


def line_of(fault):
    with open(__file__) as lines:
        return next(i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {fault}"))


def test_without_a_fault_they_are_equal():
    assert emu.check(program(""), emu.Mesh(dp=2), reference, mutants="none", tier="float64")


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("fault", ["moved", "infinite", "halved"])
def test_a_fault_on_one_rank_is_told_of_that_rank(fault, at):
    found = told(fault, at)
    assert (found.ranks, found.line) == ((at,), f"test_bisection_told.py:{line_of(fault)}"), found.says


@pytest.mark.parametrize(
    ("fault", "op", "words"),
    [
        ("labels", "nll_loss_forward", "what it reads is in the reference"),
        ("nan", "copy_", "what it makes is in none of its tensors"),
        ("some zeros", "mm", "it reads zeros, made by zero_"),
        ("zeros at last", "zero_", "it writes zeros into a part of 'y'"),
        ("other order", "flip", "what it makes is in none"),
    ],
)
def test_numbers_that_are_written_over_or_belong_elsewhere(fault, op, words):
    found = told(fault)
    assert found.op == op and words in found.says, found.says
    assert str(line_of(fault)) in re.findall(r"told\.py:(\d+)", found.says), found.says


def test_a_loss_is_told_before_its_gradients():
    assert told("labels").direction == "forward"


def test_names_that_differ_and_rounding_diverge_nowhere():
    def other_names(rank):
        return {"z": torch.relu(rank.group("dp").all_reduce(torch.ones(2)))}

    assert emu.check(other_names, emu.Mesh(dp=2), lambda: {"y": torch.ones(2)}, mutants="none").divergence is None
    thirds = {"y": torch.ones(4) / 3 * 0.1}
    verdict = emu.check(lambda rank: {"y": torch.ones(4) * 0.1 / 3}, emu.Mesh(dp=2), lambda: thirds, mutants="none")
    assert verdict.equivalent or verdict.divergence is None


def test_a_bias_that_is_added_at_once_hides_no_missing_reduction():
    def split(rank):
        tp = rank.group("tp")
        x, w, v = data()
        part = torch.relu(x @ w.chunk(2, 1)[tp.rank]) @ v.chunk(2)[tp.rank]
        return {"y": part + torch.ones(5)}

    found = emu.check(split, emu.Mesh(tp=2), lambda: {"y": reference()["y"]}, mutants="none").divergence
    assert found.op == "add" and "still a part of a sum over 'tp', made by mm" in found.says


def test_blocks_of_attention_are_steps_on_the_way(monkeypatch):
    """As are tensors of one device in pieces that are put together right: no fault, though nothing has their numbers."""

    def twice(rank):
        group = rank.group("dp")
        half = X[:, :3] @ W[:3] if group.rank == 0 else X[:, 3:] @ W[3:]
        odd = torch.stack([half, half * 3]).sum(0)  # four times a part: in no tensor of the reference
        y = group.all_reduce(odd / 4)
        return {"y": torch.relu(y) + 1}

    def alone():
        y = X @ W
        return {"y": torch.relu(y)}

    found = emu.check(twice, emu.Mesh(dp=2), alone, mutants="none").divergence
    assert found.op == "add", found.says
    monkeypatch.setattr(Standings, "recovers", lambda self, made: False)
    assert emu.check(twice, emu.Mesh(dp=2), alone, mutants="none").divergence is not None


def test_what_read_a_part_too_early_is_told_what_computed_it_and_not_what_scaled_it():
    def program(rank):
        dp = rank.group("dp")
        part = (X.chunk(2)[dp.rank] @ W).sum(0)  # computed here
        return {"y": dp.all_reduce(torch.relu(part / torch.tensor(8.0)))}

    verdict = emu.check(program, emu.Mesh(dp=2), lambda: {"y": torch.relu((X @ W).sum(0) / 8)}, mutants="none")
    found = verdict.divergence
    assert found.op == "relu" and f"made by sum (test_bisection_told.py:{line_of('computed here')})" in found.says


def test_a_multiple_of_a_sum_is_told_as_one_and_what_is_linear_may_come_before_it():
    def twice(rank):
        dp = rank.group("dp")
        part = (X.chunk(2)[dp.rank] @ W).sum(0)
        part = part + part
        return {"y": dp.all_reduce(part)}

    found = emu.check(twice, emu.Mesh(dp=2), lambda: {"y": (X @ W).sum(0)}, mutants="none", tier="float64").divergence
    assert found.op == "add" and "summed over 'dp', it is 2 times what is there" in found.says
    assert "still a part of a sum" not in found.says


def test_rows_that_no_rank_takes_are_missed_where_they_were_left_out():
    def program(rank):
        tp = rank.group("tp")
        part = X[:5, 3 * tp.rank : 3 * tp.rank + 3] @ W[3 * tp.rank : 3 * tp.rank + 3]
        return {"y": torch.relu(tp.all_reduce(part)).sum(0)}

    verdict = emu.check(
        program, emu.Mesh(tp=2), lambda: {"y": torch.relu(X @ W).sum(0)}, mutants="none", tier="float64"
    )
    found = verdict.divergence
    assert found.op == "sum" and "all ranks together have only a part since mm" in found.says


def test_a_bound_that_bounds_nothing_is_told_and_not_what_comes_after():
    def program(rank):
        top = rank.group("dp").all_reduce(X.abs().amax(), op="sum")  # thrice the bound
        return {"y": torch.minimum(X, top / 2).sum(0)}

    def reference():
        return {"y": torch.minimum(X, X.abs().amax() / 2).sum(0)}

    found = emu.check(program, emu.Mesh(dp=3), reference, mutants="none", tier="float64").divergence
    assert found.op.startswith("all_reduce") and found.line.endswith(f":{line_of('thrice the bound')}"), found.says


def test_a_wrong_sign_is_told_as_one():
    found = emu.check(
        lambda rank: {"y": (X @ W).neg()}, emu.Mesh(dp=2), lambda: {"y": X @ W}, mutants="none"
    ).divergence
    assert found.op == "neg" and "it is -1 times what is there" in found.says


def test_numbers_that_always_come_out_right_clear_nobody():
    """A loss function counts its labels, whatever it is given: its count is right, and what it was given is not."""

    def program(rank):
        x, w, _ = data()
        return {"loss": F.cross_entropy(x @ w + 1 * x, LABELS, reduction="sum")}

    def reference():
        x, w, _ = data()
        return {"loss": F.cross_entropy(x @ w, LABELS, reduction="sum")}

    assert emu.check(program, emu.Mesh(dp=2), reference, mutants="none").divergence.op == "add"


def test_what_it_is_divided_by_does_not_hide_what_a_part_of_a_sum_was_made_by():
    def program(rank):
        dp = rank.group("dp")
        part = (X.chunk(2)[dp.rank] @ W).sum(0)  # the part
        return {"y": part / torch.tensor(8.0)}

    found = emu.check(program, emu.Mesh(dp=2), lambda: {"y": (X @ W).sum(0) / 8}, mutants="none").divergence
    assert f"made by sum (test_bisection_told.py:{line_of('the part')})" in found.says


@pytest.mark.parametrize("value", [True, "text", 2**60, 2**70, 3, 2.5, None])
def test_results_that_are_no_tensors_are_compared(value):
    other = {True: False, "text": "other", 2**60: 2**60 + 1, 2**70: 2**70 + 1, 3: 4, 2.5: 2.25, None: 1}[value]
    y = torch.ones(3)
    assert emu.check(lambda rank: {"y": y, "z": value}, emu.Mesh(dp=2), lambda: {"y": y, "z": value}, mutants="none")
    assert not emu.check(
        lambda rank: {"y": y, "z": other}, emu.Mesh(dp=2), lambda: {"y": y, "z": value}, mutants="none"
    )


def test_a_program_without_a_rank_is_refused():
    def step():
        return {"y": torch.ones(2)}

    for call in (lambda: emu.launch(step, emu.Mesh(dp=2)), lambda: emu.check(step, emu.Mesh(dp=2), step)):
        with pytest.raises(emu.EmuError, match=r"step cannot be called with a rank(.|\n)*write def step\(rank\)"):
            call()
