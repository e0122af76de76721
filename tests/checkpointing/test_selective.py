"""Selective checkpointing by module and by operator: nothing changes but what is kept, and what runs again."""

from collections import Counter

import pytest
import torch

import emu
from emu.models import Decoder
from emu.parallel.checkpointing import checkpointed, checkpointed_modules, operators
from emu.spmd import EmuError
from emu.trace.events import Kernel

from .models import Mlp, Model, step
from .programs import GPT, LLAMA, launched, same

PRODUCTS = ("mm", "addmm", "bmm")


@pytest.mark.parametrize("config", [GPT, LLAMA])
def test_the_insides_of_attention_alone_run_again(config):
    axes = (("dp", 2),)
    run = launched(config, "selective", axes)
    assert same(run, config, axes)
    scopes = {e.scope.split(".", 2)[2] for e in run.trace[0] if isinstance(e, Kernel) and e.phase == "recompute"}
    assert all(scope.startswith("attention.core") for scope in scopes)


def test_modules_by_any_pattern_and_any_number_of_tensors():
    class Core(torch.nn.Module):
        def forward(self, q, k, *, v):
            return torch.softmax(q @ k.mT, -1) @ v

    class Attention(Mlp):
        def __init__(self, p):
            super().__init__(p)
            self.inside = Core()

        def forward(self, x, scale=None):
            q = self.norm(x)
            return x + self.inside(q, q, v=self.down(self.up(q))) * scale

    def made(pattern):
        torch.manual_seed(3)
        model = Model(["mlp"] * 3)
        model.layers = torch.nn.ModuleList(Attention(0.1) for _ in range(3))
        if pattern:
            assert checkpointed_modules(model, pattern) == [f"layers.{i}.inside" for i in range(3)]
        return step(model, ["F0", "F1", "B0", "B1"])

    for pattern in ("*.inside", "layers.?.inside"):
        assert made(pattern).same(made(None))


def test_attention_within_layers_that_are_checkpointed_themselves():
    for policy in ("full", "every:2", "naive"):
        plain, changed = Decoder(GPT, seed=0), Decoder(GPT, seed=0)
        checkpointed_modules(changed)
        checkpointed(changed, policy)
        x = torch.zeros(2, GPT.seq, dtype=torch.int64)
        for model in (plain, changed):
            torch.manual_seed(4)
            model.loss_sum(x, x).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), changed.parameters(), strict=True))


# By operator.


@pytest.mark.parametrize("policy", ["full", "naive"])
@pytest.mark.parametrize("kept", [PRODUCTS, (*PRODUCTS, "aten.native_dropout", "aten::gelu")])
def test_operators_whose_results_are_kept_do_not_run_again(kept, policy):
    axes = (("dp", 1),)
    run, all_of_it = launched(GPT, policy, axes, operators=kept), launched(GPT, policy, axes)
    assert same(run, GPT, axes)
    names = {name.rpartition(".")[2].rpartition(":")[2] for name in kept}

    def again(of):
        return Counter(e.name for e in of.trace[0] if isinstance(e, Kernel) and e.phase == "recompute")

    # On the way to an earlier segment they run by nobody, either.
    assert not names & set(again(run))
    assert again(run) == Counter({k: n for k, n in again(all_of_it).items() if k not in names})


def test_under_pipelines_and_shards():
    for axes, how in [
        ((("dp", 2),), (("zero", 3),)),
        ((("pp", 2),), (("schedule", "zb-h1"), ("microbatches", 3))),
    ]:
        run = launched(GPT, "every:2", axes, how=how, operators=PRODUCTS)
        assert same(run, GPT, axes, how=how)


def test_kept_results_take_their_bytes_and_save_their_flops():
    """Of one linear map a layer, [tokens, width] -> [tokens, 2 width]: 4 bytes a number, 2 flops a product."""

    def program(rank, kept):
        model = Model(["mlp"] * 4, p=0.0)
        checkpointed(model, "full", operators=kept)
        x = torch.ones(4, 6)
        rank.mark("forward")
        loss = model.loss_sum(x, 1.0)
        rank.mark("forward is over")
        loss.backward()

    def taken(kept):
        run = emu.launch(program, emu.Mesh(), args=(kept,))
        totals = run.memory.window("forward", "forward is over").totals(0)
        return totals[-1] - totals[0], run.trace.flops(0, "recompute")

    (bytes_without, flops_without), (bytes_with, flops_with) = taken(()), taken(("addmm",))
    tokens, width = 4, 6
    assert bytes_with - bytes_without == 4 * 4 * tokens * (2 * width + width)
    assert flops_without - flops_with == 4 * 2 * (2 * tokens * width * 2 * width)


def test_an_operator_that_comes_in_another_order_is_named():
    class Changing(Mlp):
        calls = 0

        def forward(self, x, scale=None):
            Changing.calls += 1
            if Changing.calls > 4:
                torch.mm(x.detach(), self.up.weight[:6].detach())
            return super().forward(x, scale)

    model = Model(["mlp"] * 4)
    for layer in model.layers:
        layer.__class__ = Changing
    checkpointed(model, "full", operators=["addmm", "mm"])
    with pytest.raises(
        EmuError, match=r"layers\.3 computes something else the second time: kept operator 0 is aten::mm"
    ):
        step(model)


def test_random_numbers_that_a_kept_operator_drew_are_not_drawn_by_another(monkeypatch):
    class Two(Mlp):
        def forward(self, x, scale=None):
            x = torch.native_dropout(x, 0.5, True)[0]
            return super().forward(x * torch.rand_like(x), scale)

    def made(kept):
        model = Model(["mlp"] * 4)
        for layer in model.layers:
            layer.__class__ = Two
        checkpointed(model, "every:2", operators=kept)
        return step(model)

    right = made(())
    assert made(["native_dropout"]).same(right)
    monkeypatch.setattr(operators.RandomState, "now", classmethod(lambda cls: None))
    with pytest.raises(Exception, match=r"'NoneType'|same"):
        made(["native_dropout"])
