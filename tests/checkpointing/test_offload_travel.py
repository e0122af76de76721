"""Which tensors travel to the host, that all come back or are given up, and what is told of what goes wrong."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import emu
import emu.spmd.host as host
from emu.parallel.checkpointing.offload import offloaded
from emu.parallel.checkpointing.travelling import travels
from emu.spmd import BufferInFlight, EmuError, PlanError
from emu.trace.events import HostCopy

from .layers import KEPT, ROW, ROWS, WIDTH, Chain, Layer, copied, launched


@pytest.mark.parametrize("direction", [host.TO_HOST, host.FROM_HOST])
def test_a_wait_that_is_left_out_is_a_race(direction, monkeypatch):
    wait = host._Batch.wait

    def broken(batch, device, stream=None):
        if batch.stream.name != direction or stream is not None:
            wait(batch, device, stream)

    launched(4, {})
    monkeypatch.setattr(host._Batch, "wait", broken)
    with pytest.raises(BufferInFlight, match=f"on stream '{direction}'"):
        launched(4, {})


def test_nothing_is_left_on_the_device_or_the_host_after_backward():
    def program(rank, layers, how):
        model = Chain(layers)
        offloaded(model, rank, **how)
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH)).backward()
        model.zero_grad()
        rank.mark("end")
        return rank._device.ledger.by_category["activations"]

    for ahead in (1, 2, 3):
        run = launched(5, {"ahead": ahead}, program)
        assert run.results[0] == 0
        assert run.memory.host_series(0)[1][-1] == 0


def test_a_forward_without_a_backward_gives_all_back_too():
    def program(rank, layers, how):
        model = Chain(layers)
        offloaded(model, rank, **how)
        for _ in range(2):
            out = model(torch.randn(ROWS, WIDTH))
            del out
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH))
        rank.mark("end")
        return rank._device.ledger.by_category["activations"]

    run = launched(4, {}, program)
    assert run.memory.host_series(0)[1][-1] == 0 and run.results[0] == 0
    assert copied(run)["from_host"] == 0


def test_a_graph_that_is_kept_goes_back_twice():
    def program(rank, layers, how):
        torch.manual_seed(0)
        model = Chain(layers)
        if how is not None:
            offloaded(model, rank, **how)
        loss = model(torch.randn(ROWS, WIDTH))
        loss.backward(retain_graph=True)
        loss.backward()
        return emu.grads(model)

    plain, moved = launched(4, None, program).results[0], launched(4, {}, program).results[0]
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


class Sharing(nn.Module):
    """Layers that share a table and a mask, a buffer and a frozen weight; one keeps a transposed and a cast weight."""

    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Using() for _ in range(layers))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        table, mask = torch.linspace(0, 1, WIDTH), torch.ones(ROWS, WIDTH).tril() > 0
        for layer in self.layers:
            x = layer(x, table, mask=mask)
        return x.sum()


class Using(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.randn(WIDTH))

    def forward(self, x, table, mask):
        x = (
            x @ self.weight.t()
        ) * table  # keeps x, the weight's view, the table; table has no gradient: not the product
        x = x.where(mask, x.sin()) * self.scale * self.frozen  # keeps the mask, x, scale and frozen
        return x.view(2, -1).chunk(2)[0].sum() + x  # a part of a storage


def test_parameters_buffers_tables_and_masks_stay():
    def program(rank, layers, how):
        torch.manual_seed(0)
        model = Sharing()
        rank.watch(model)
        if how is not None:
            offloaded(model, rank, **how)
        model(torch.randn(ROWS, WIDTH)).backward()
        return emu.grads(model)

    plain, run = launched(3, None, program), launched(3, {}, program)
    assert all(torch.equal(g, run.results[0][name]) for name, g in plain.results[0].items())
    # Of each layer but the last: its input, and what sin reads. All else is anyone's, or of no gradient.
    assert [e.bytes for _, e in run.trace.of(HostCopy) if e.kind == "to_host"] == [ROW, ROW] * 2


def test_a_parameter_of_another_module_and_an_input_that_the_program_holds_stay():
    class Borrows(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.lender = [lender]  # no part of this module

        def forward(self, x):
            return x @ self.lender[0].weight.t()

    def program(rank, layers, how):
        model = nn.Module()
        model.lender = nn.Linear(WIDTH, WIDTH)
        model.layers = nn.ModuleList(Borrows(model.lender) for _ in range(3))
        offloaded(model, rank)
        x = given = torch.randn(ROWS, WIDTH, requires_grad=True)
        for layer in model.layers:
            x = layer(x)
        x.sum().backward()
        return given.grad

    # The second layer's input, and nothing else.
    assert copied(launched(3, {}, program)) == {"to_host": ROW, "from_host": ROW}


def test_what_a_layer_returns_and_the_next_keeps_travels_once():
    class Squares(nn.Module):
        def forward(self, x):
            return (x * x).sigmoid()  # sigmoid keeps what it returns, and the next product the same

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Squares() for _ in range(4))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    def program(rank, layers, how):
        torch.manual_seed(0)
        model = Model()
        if how is not None:
            offloaded(model, rank, **how)
        model(torch.randn(ROWS, WIDTH)).backward()
        return emu.grads(model)

    plain, run = launched(4, None, program), launched(4, {}, program)
    assert all(torch.equal(g, run.results[0][name]) for name, g in plain.results[0].items())
    # The first keeps its input and its output; each other's input is on its way already.
    assert copied(run) == {"to_host": 4 * ROW, "from_host": 4 * ROW}


def test_layers_may_be_chosen_and_small_storages_left():
    def program(rank, layers, how):
        model = Chain(layers)
        some = [model.layers[i] for i in how.pop("some")] if "some" in how else None
        offloaded(model, rank, some, **how)
        model(torch.randn(ROWS, WIDTH)).backward()

    run = launched(6, {"some": (1, 2)}, program)
    assert copied(run) == {"to_host": 2 * KEPT, "from_host": 2 * KEPT}
    assert {e.name for _, e in run.trace.of(HostCopy)} == {"layers.1", "layers.2"}
    small = ROWS * 4  # a mean or a deviation of each row
    run = launched(6, {"least_bytes": small + 1}, program)
    assert copied(run)["to_host"] == 5 * (KEPT - 2 * small)
    assert copied(launched(6, {"least_bytes": small}, program))["to_host"] == 5 * KEPT


def test_writing_in_place_into_what_is_kept_is_told_as_without_offloading():
    class Writes(nn.Module):
        def __init__(self, late):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.late = late

        def forward(self, x):
            x = x * 2
            kept = []
            for layer in self.layers:
                kept.append(x)
                x = layer(x)
            with torch.no_grad():
                if self.late == "activation":
                    kept[-1].zero_()  # the last layer's, which did not leave
                elif self.late == "parameter":
                    self.layers[1].down.weight.zero_()
            return x.sum()

    def program(rank, late, how):
        model = Writes(late)
        if how is not None:
            offloaded(model, rank, **how)
        model(torch.randn(ROWS, WIDTH).requires_grad_()).backward()

    launched("nothing", {}, program)
    for late in ("activation", "parameter"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            launched(late, None, program)
        with pytest.raises(EmuError, match=r"backward of layers\.[12] needs was overwritten in place"):
            launched(late, {}, program)


def test_what_cannot_be_is_refused():
    def refused(words, error=EmuError, **how):
        def program(rank):
            made = how.pop("model", None) or Chain(2)
            offloaded(made, how.pop("rank", rank), **how)

        with pytest.raises(error, match=words) as caught:
            emu.launch(program, emu.Mesh(dp=1))
        assert caught.value.hint

    refused("the rank is a int", rank=3)
    refused("has no list of layers", model=nn.Linear(2, 2))
    for ahead in (0, -1, 1.5, True):
        refused("ahead=.* is no whole number from 1", PlanError, ahead=ahead)
    refused("least_bytes=-1", PlanError, least_bytes=-1)

    def twice(rank):
        model = Chain(2)
        offloaded(model, rank)
        offloaded(model, rank)

    with pytest.raises(EmuError, match=r"layers\.0 is offloaded already"):
        emu.launch(twice, emu.Mesh(dp=1))


def test_a_copied_model_has_a_host_of_its_own():
    def program(rank):
        model = Chain(3)
        mine = offloaded(model, rank)
        other = deepcopy(model)
        assert other.layers[0]._offload[0] is not mine
        for each in (model, other):
            each(torch.ones(ROWS, WIDTH)).backward()
        return [torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters())]

    assert all(emu.launch(program, emu.Mesh(dp=1)).results[0])


class Conjugates(nn.Module):
    """Saves tensors whose bytes do not say that they are conjugate, or negative."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        z = torch.complex(self.map(x), x)
        return (z.conj() * z.exp()).imag + (z.conj().imag * self.map(x)).exp()


def test_conjugate_and_negative_tensors_stay():
    """Lazily conjugated or negated, a tensor's bytes are another's: it travels by no means."""
    x = torch.complex(torch.ones(3), torch.ones(3))
    assert travels(x) and x.conj().is_conj() and x.conj().imag.is_neg()
    assert not travels(x.conj()) and not travels(x.conj().imag)

    def program(rank, how):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList(Conjugates() for _ in range(4)))
        model.forward = lambda x: _through(model[0], x)
        if how is not None:
            offloaded(model, rank, layers="0", **how)
        x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) * 0.1
        model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    (right,) = emu.launch(program, emu.Mesh(dp=1), args=(None,)).results
    for how in ({}, {"ahead": 3}, {"least_bytes": 1}):
        (found,) = emu.launch(program, emu.Mesh(dp=1), args=(how,)).results
        assert all(map(torch.equal, found, right))


def _through(layers, x):
    for layer in layers:
        x = layer(x) * 0.1
    return x
