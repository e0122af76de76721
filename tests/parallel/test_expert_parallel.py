"""Experts on other ranks compute, bit for bit, what one device computes: outputs, losses and all gradients."""

import pytest
import torch
from hypothesis import example, given
from torch import nn

import emu
from emu.equivalence import check
from emu.parallel.expert import ExpertParallel, become_expert_parallel, expert_layouts
from emu.spmd import EmuError

from .moe_programs import Case, cases, mesh_for, program, reference, shape

UNEVEN = Case(shape(experts=5), tokens=(3, 0, 7, 2))  # experts 3 and 2 a rank; a rank without tokens


@given(cases())
@example((UNEVEN, 2, 2))
@example((Case(shape(experts=8, top_k=1), (1, 0, 0, 0, 0, 0, 0, 0)), 8, 1))  # one token in all
@example((Case(shape(experts=8, top_k=8), (2, 1, 3, 1)), 4, 1))  # every token goes everywhere
def test_any_experts_on_any_ranks_equal_one_device_bit_for_bit(drawn):
    case, ep, etp = drawn
    verdict = check(program, mesh_for(case, ep, etp), reference, args=(case,), mutants="none")
    assert verdict, verdict.why


@pytest.mark.parametrize("ep, etp", [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_every_mutant_of_a_communication_is_noticed(ep, etp):
    verdict = check(program, mesh_for(UNEVEN, ep, etp), reference, args=(UNEVEN,), mutants="all")
    assert verdict and not verdict.survivors, verdict.why
    assert verdict.mutants_killed > 10


@pytest.mark.parametrize("over", [None, "ep", "dp"])
def test_experts_gradients_summed_over_other_ranks_than_those_that_hold_the_same_are_told(over):
    case = Case(shape(experts=4), (3, 0, 7, 2))
    assert check(program, mesh_for(case, 2), reference, args=(case,), mutants="none")
    verdict = check(program, mesh_for(case, 2), reference, args=(case, over), mutants="none")
    assert not verdict
    assert "experts" in verdict.why


def test_outputs_that_come_back_in_another_order_are_told():
    def forgets_the_order(rank, model):
        inner = model.experts.forward
        model.experts.forward = lambda x, expert, counts=None: inner(x, expert, counts).flip(0)

    args = (UNEVEN, "edp", forgets_the_order)
    assert not check(program, mesh_for(UNEVEN, 2), reference, args=args, mutants="none")


class Plain(nn.Module):
    """Stacked experts that know nothing but what `become_expert_parallel` asks of every module."""

    def __init__(self, n=4, width=3):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n, width, width, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, expert, counts=None):
        return torch.tanh(torch.einsum("ni,nio->no", x, self.w[expert]))


def test_any_module_of_stacked_experts_will_do():
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    expert = torch.tensor([3, 1, 1, 0, 2, 3, 0, 0, 1, 3])
    plain = Plain()
    right = plain(x, expert)
    right.square().sum().backward()

    def sharing(rank):
        model = Plain()
        become_expert_parallel(model, rank.group("ep"), rank.group("etp"))
        mine = slice(0, 7) if rank == 0 else slice(7, 10)
        y = model(x[mine], expert[mine])
        y.square().sum().backward()
        return y.detach(), model.w.grad

    (y0, g0), (y1, g1) = emu.launch(sharing, emu.Mesh(dp=2, ep=2)).results
    torch.testing.assert_close(torch.cat([y0, y1]), right.detach())
    torch.testing.assert_close(torch.cat([g0, g1]), plain.w.grad)


def test_a_module_keeps_what_it_is():
    def program(rank):
        model = Case(shape(), (1,)).model()
        before, calls = model.experts, []
        model.experts.register_forward_hook(lambda *_: calls.append(1))
        kind, names = type(model.experts), [n for n, _ in model.named_parameters()]
        become_expert_parallel(model.experts, rank.group("ep"), rank.group("etp"))
        model(torch.ones(1, 3, 4))
        assert model.experts is before and isinstance(before, kind) and isinstance(before, ExpertParallel)
        assert [n for n, _ in model.named_parameters()] == names
        return calls

    assert emu.launch(program, emu.Mesh(dp=2, ep=2)).results == [[1], [1]]


def test_one_rank_alone_talks_to_nobody():
    def program(rank):
        model = Case(shape(), (1,)).model()
        become_expert_parallel(model.experts, rank.group("ep"), rank.group("etp"))
        model(torch.ones(1, 3, 4)).sum().backward()

    assert not list(emu.launch(program, emu.Mesh(dp=2)).trace.of(emu.trace.events.Collective))


@pytest.mark.parametrize(
    "change, sizes, told",
    [
        ({}, (5, 1), "moe.experts has 4 experts, fewer than the 5 ranks"),
        ({}, (2, 7), "moe.experts.up has length 6 along dim 1, less than the 7 ranks of etp"),
        ({"columns": ("gate",)}, (2, 2), "moe.experts.up [4, 6, 4] cannot be cut over the 2 ranks of etp"),
    ],
)
def test_what_cannot_be_shared_out_is_one_line_that_names_the_module_and_the_numbers(change, sizes, told):
    experts = Case(shape(), (1,)).model().experts
    with pytest.raises(EmuError) as error:
        expert_layouts(experts, *sizes, where="moe.experts", **change)
    assert told in error.value.message and "\n" not in error.value.message and error.value.hint


def test_a_module_without_stacked_experts_is_refused():
    with pytest.raises(EmuError, match="no module of stacked experts"):
        expert_layouts(nn.Linear(3, 2), 2, 1)


def test_a_module_is_shared_out_once():
    def program(rank):
        model = Plain()
        for _ in range(2):
            become_expert_parallel(model, rank.group("ep"), rank.group("etp"))

    with pytest.raises(EmuError, match="already"):
        emu.launch(program, emu.Mesh(dp=2, ep=2))
