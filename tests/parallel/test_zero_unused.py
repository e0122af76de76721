"""Parameters that some rows use and others do not, anywhere in a step: gradients of one device, and None where it has none."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import emu
from emu.parallel.gradients import Gradients
from emu.spmd import CollectiveMismatch

from . import training
from .training import ADAMW, SGD, accumulates, exactly, first_difference, same_on_grid

BRANCHES = 4


class Branching(nn.Module):
    """Rows with label i use branch i; some labels are 0, which uses none. x: [rows, 3]; y: [rows]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 3)
        self.branch = nn.ParameterList(torch.randn(2, 3) for _ in range(BRANCHES))

    def loss_sum(self, x, y):
        x = torch.tanh(self.trunk(x))
        loss = (x * x).sum()
        for i, weight in enumerate(self.branch, start=1):
            rows = (y == i).to(x.dtype)[:, None]
            if bool(rows.any()):
                loss = loss + ((nn.functional.linear(x, weight) * rows) ** 2).sum()
        return loss


class Labelled:
    """A Made of Branching, with these labels in every step."""

    of = ()

    def __init__(self, labels):
        self.labels = labels

    def model(self):
        return Branching()

    def names(self):
        return [name for name, _ in Branching().named_parameters()]

    def batch(self, step):
        labels = torch.tensor(self.labels[step])
        x = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return emu.Batch(x, labels)


def on_one(made, data, rule, steps):
    """As training.on_one_device, but gradients may be None."""
    model = made.model()
    parameters = dict(model.named_parameters())
    optimizer = rule.kind(model.parameters(), **rule.options)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss_sum(data[step].x, data[step].y)
        loss.backward()
        losses.append(loss.detach() / data[step].tokens)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(data[step].tokens)
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
    states = training.states_of(optimizer, parameters)
    values = {name: p.detach().clone() for name, p in parameters.items()}
    return {"loss": losses, "gradients": gradients, "values": values, "states": states}


@st.composite
def cases(draw):
    ranks, steps = draw(st.integers(1, 4)), 2
    sizes = [draw(st.integers(0, 3)) for _ in range(ranks)]
    sizes[0] += 0 if any(sizes) else 1
    labels = draw(
        st.lists(
            st.lists(st.integers(0, BRANCHES), min_size=sum(sizes), max_size=sum(sizes)), min_size=steps, max_size=steps
        )
    )
    made = Labelled(labels)
    how = draw(training.options(ranks, made.names()))
    how["find_unused"] = True
    syncs = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    return labels, sizes, how, draw(st.sampled_from([SGD, ADAMW])), syncs


def differs(case):
    labels, sizes, how, rule, syncs = case
    made = Labelled(labels)
    data = [made.batch(step) for step in range(len(labels))]
    right = exactly(on_one, 0, made, data, rule, len(labels))
    args = (made, data, rule, len(labels), sizes, how, 1, syncs, "both")
    return first_difference(exactly(accumulates, len(sizes), *args), right, loss=same_on_grid)


@given(cases())
@example(([[1, 0, 2], [2, 2, 2]], [2, 1], {"zero": 2, "find_unused": True}, ADAMW, [True, True]))
@example(([[1, 0, 2], [0, 0, 0]], [2, 1], {"zero": 0, "find_unused": True, "bucket_bytes": 1}, ADAMW, [False, True]))
@example(([[0], [0]], [1, 0, 0], {"zero": 1, "find_unused": True, "by_owner": True, "bucket_bytes": 1}, SGD, [True]))
@example(([[1, 0, 2], [3, 0, 0]], [2, 1], {"zero": 3, "find_unused": True, "by_owner": True}, SGD, [True, False]))
def test_what_is_used_now_and_then_has_one_devices_gradients_and_states(case):
    assert differs(case) is None


def test_a_gradient_of_zero_where_there_is_none_is_seen(monkeypatch):
    case = ([[1, 0, 2], [2, 2, 2]], [2, 1], {"zero": 2, "find_unused": True}, ADAMW, [True])
    assert differs(case) is None
    hand_over = Gradients.hand_over

    def hands_over_zeros(self):
        self.nowhere = set()
        return hand_over(self)

    monkeypatch.setattr(Gradients, "hand_over", hands_over_zeros)
    assert differs(case) is not None


class InUnits(Branching):
    """Its branches are modules in a list: units, if parameters are fully sharded."""

    def __init__(self):
        super().__init__()
        weights = list(self.branch)
        self.branch = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in weights)

    def loss_sum(self, x, y):
        x = torch.tanh(self.trunk(x))
        loss = (x * x).sum()
        for i, branch in enumerate(self.branch, start=1):
            rows = (y == i).to(x.dtype)[:, None]
            if bool(rows.any()):
                loss = loss + ((branch(x) * rows) ** 2).sum()
        return loss


class LabelledUnits(Labelled):
    def model(self):
        return InUnits()

    def names(self):
        return [name for name, _ in InUnits().named_parameters()]


@given(
    st.lists(st.lists(st.integers(0, BRANCHES), min_size=2, max_size=2), min_size=1, max_size=3),
    st.integers(0, 3),
    st.booleans(),
)
@example([[1, 2], [3, 4], [4, 1]], 1, True)
@example([[1, 2], [0, 0], [4, 1]], 2, False)
def test_units_may_be_left_out_of_a_step_and_come_back_if_ranks_do_alike(labels, prefetch, reshard):
    labels = [[*some, *some] for some in labels]  # both ranks have rows of the same kinds
    made = LabelledUnits(labels)
    data = [made.batch(step) for step in range(len(labels))]
    how = {"zero": 3, "find_unused": True, "prefetch": prefetch, "reshard_after_forward": reshard}
    right = exactly(on_one, 0, made, data, SGD, len(labels))
    ours = exactly(accumulates, 2, made, data, SGD, len(labels), [2, 2], how, 1, [True], "both")
    assert first_difference(ours, right, loss=same_on_grid) is None


@pytest.mark.parametrize("labels", [[[1, 2]], [[1, 0]], [[1, 1], [2, 1]]])
def test_units_that_only_some_ranks_use_are_told_and_never_gathered_wrongly(labels):
    made = LabelledUnits(labels)
    data = [made.batch(step) for step in range(len(labels))]
    with pytest.raises(CollectiveMismatch):
        args = (made, data, SGD, len(labels), [1, 1], {"zero": 3, "find_unused": True}, 1, [True], "both")
        exactly(accumulates, 2, *args)
