"""Expert against tensor parallelism for a mixture of experts of equal memory: "EP over TP", in bytes and in time.

A study of one Mixtral-shaped layer on the 8 H100 of a node, in shapes, priced. What holds, and where it does not:

* bytes: fewer if and only if k < n. With top-2 on 2 ranks, or top-8 on 8, the saving is gone.
* time, even routing: faster wherever k < n, and more than its bytes say, since a rank handles its own tokens' copies, and
  not those of all n ranks; and because whole experts' products are wider, and so reach more, than parts of them.
* skew: a step waits for the busiest rank. The bytes alone pay for an imbalance of 1.14, all in all of about 1.5.
* few tokens: its communication takes longer although it moves less; it has one more exchange, of counts.
* across nodes: an exchange sends every copy through its own rank's card, a ring crosses once: k < n is not enough.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

import emu
from emu.cost import moe as closed
from emu.cost import sent_bytes
from emu.models import Config
from emu.models.routing import declared
from emu.spmd import gather_shards, reduce_to_shards
from emu.trace.events import Collective, Kernel

from .moe_programs import Case, shape, spread

MIXTRAL = closed.MIXTRAL_8X7B
TOKENS = 4096  # of each rank


def config(layer, routing="uniform"):
    return Config(
        layers=1, width=layer.width, heads=1, head_dim=2, vocab=2, seq=1, ffn=layer.ffn, bias=False, activation="swiglu",
        experts=layer.experts, top_k=layer.top_k, routing=routing,
    )  # fmt: skip


def step(rank, model, tokens, forward):
    x = torch.randn(1, tokens, model.router.weight.shape[1], requires_grad=True)
    rank.mark("step")
    y = forward(x)
    y.backward(torch.ones_like(y))
    return {name: p.numel() for name, p in model.named_parameters()}


def expert_parallel(rank, shaped, tokens):
    """Whole experts on ranks (ep), or parts of them (etp)."""
    model = Case(shaped, ()).model()
    spread(rank, model)
    return step(rank, model, tokens, model)


def cut(model, group):
    """This rank's part of every expert."""
    experts = model.experts
    for p, dim in ((experts.gate, 1), (experts.up, 1), (experts.down, 2)):
        p.data = p.data.chunk(group.size, dim)[group.rank].clone()


def tensor_parallel(rank, shaped, tokens):
    """The whole layer within one gather and one reduction, as an MLP's, which moves tokens, not copies."""
    model, group = Case(shaped, ()).model(), rank.group("dp")
    cut(model, group)
    return step(
        rank,
        model,
        tokens,
        lambda x: reduce_to_shards(model(gather_shards(x, group, 1, name="tokens")), group, 1, name="outputs"),
    )


@cache
def run_of(how, layer=MIXTRAL, tokens=TOKENS, ranks=8, routing="uniform", nodes=1):
    program = tensor_parallel if how == "tp" else expert_parallel
    mesh = emu.Mesh(dp=ranks, on=emu.cluster("h100", nodes=nodes), **({} if how == "tp" else {how: ranks}))
    args = (config(layer, routing), tokens)
    return emu.launch(program, mesh, backend="shape", precision="bf16-mixed", args=args).window("step")


def moved_bytes(run):
    """By each rank, without the counts of tokens."""
    return [
        sum(sent_bytes(e, rank) for _, e in run.trace.of(Collective, rank=rank) if e.name != "counts")
        for rank in run.trace.ranks
    ]


def communication_s(run, rank=0):
    """Time that collectives move data."""
    return sum(s.end_s - s.moves_s for s in run.timeline().spans[rank] if s.kind == "collective")


def products_s(run, rank=0):
    """Time of matrix products."""
    events = run.trace.events[rank]
    spans = [s for s in run.timeline().spans[rank] if s.kind == "kernel"]
    return sum(s.end_s - s.start_s for s in spans if events[s.index].dims)


def large_products_s(run, rank=0):
    """The same if all were large: as the closed form has it, which knows no shapes."""
    flops = sum(e.flops for e in run.trace.events[rank] if isinstance(e, Kernel) and e.dims)
    return flops / emu.cluster("h100-8").chip.flops_per_s("bfloat16")


def step_s(*how, **options):
    return run_of(*how, **options).metrics.step_time_s


def imbalance(routing, layer=MIXTRAL):
    counts = declared(routing, TOKENS * layer.top_k, layer.experts, TOKENS)
    return max(counts) * len(counts) / sum(counts)


# The programs that are compared are right, and hold the same.


def test_tensor_parallel_experts_compute_what_one_device_computes():
    case = Case(shape(experts=4, width=6, ffn=8, activation="swiglu"), (3, 5))

    def program(rank):
        model, group = case.model(), rank.group("dp")
        cut(model, group)
        x = case.data()[0].split(case.tokens, 1)[rank]
        y = reduce_to_shards(model(gather_shards(x, group, 1, case.tokens)), group, 1, case.tokens)
        return group.all_gather(y.detach(), 1, case.tokens)

    found = emu.launch(program, emu.Mesh(dp=2)).results[0]
    torch.testing.assert_close(found, case.model()(case.data()[0]).detach())


def test_all_ways_hold_equally_many_weights():
    held = [{name: n for name, n in run_of(how).results[0].items() if "experts" in name} for how in ("ep", "etp", "tp")]
    assert held[0] == held[1] == held[2]
    assert sum(held[0].values()) == 3 * 4096 * 14336


def test_activations_take_no_more_memory_with_whole_experts():
    peaks = {how: run_of(how).metrics.peak_hbm_bytes[0] for how in ("ep", "etp", "tp")}
    assert peaks["ep"] < peaks["etp"] < peaks["tp"]


# Bytes.


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_bytes_are_the_closed_forms_and_fewer_only_if_fewer_choices_than_ranks(ranks, top_k):
    layer = closed.MoeLayer(width=64, ffn=32, experts=8, top_k=top_k)
    tokens = 16  # whose choices 8 experts share evenly
    ep, tp, etp = (moved_bytes(run_of(how, layer, tokens, ranks)) for how in ("ep", "tp", "etp"))
    assert set(ep) == {closed.expert_parallel_bytes(layer, tokens, ranks)}
    assert set(tp) == {closed.tensor_parallel_bytes(layer, tokens, ranks)}
    assert set(etp) == {closed.expert_tensor_bytes(layer, tokens, ranks)}
    assert (ep[0] < tp[0]) == closed.moves_less(layer, ranks) == (top_k < ranks)


def test_mixtral_moves_a_quarter_with_whole_experts():
    ep, tp, etp = (moved_bytes(run_of(how))[0] for how in ("ep", "tp", "etp"))
    assert (ep, tp, etp) == (
        4 * 2 * 4096 * 4096 * 2 * 7 // 8,
        4 * 8 * 4096 * 4096 * 2 * 7 // 8,
        16 * 4096 * 4096 * 2 * 7 // 2,
    )
    assert (ep * 4, ep * 8) == (tp, etp)


# Time.


def test_with_even_routing_whole_experts_are_faster_by_more_than_their_bytes():
    ep, tp, etp = (step_s(how) for how in ("ep", "tp", "etp"))
    assert ep < 0.7 * tp and ep < 0.7 * etp
    saved = communication_s(run_of("tp")) - communication_s(run_of("ep"))
    assert 0 < saved < 0.3 * (tp - ep)  # most of the rest: rows of all ranks' tokens, copied, activated and added up
    # The products are the same work, but for the router's, which sees all tokens where they are gathered first.
    assert large_products_s(run_of("ep")) == pytest.approx(large_products_s(run_of("etp")), rel=1e-6)
    assert large_products_s(run_of("ep")) == pytest.approx(large_products_s(run_of("tp")), rel=0.03)
    # But an eighth of an expert is narrow: more of it is the start and the end of tiles.
    for how in ("etp", "tp"):
        assert 1.02 * products_s(run_of("ep")) < products_s(run_of(how)) < 1.25 * products_s(run_of("ep"))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_fewer_choices_than_ranks_mean_less_time_to_communicate_and_a_faster_step(top_k):
    layer = replace(MIXTRAL, top_k=top_k)
    assert communication_s(run_of("ep", layer)) < communication_s(run_of("tp", layer))
    assert step_s("ep", layer) < step_s("tp", layer)


@pytest.mark.parametrize("ranks, top_k", [(2, 2), (8, 8), (2, 4)])
def test_with_as_many_choices_as_ranks_nothing_is_saved_on_links(ranks, top_k):
    layer = replace(MIXTRAL, top_k=top_k)
    ep, tp = run_of("ep", layer, ranks=ranks), run_of("tp", layer, ranks=ranks)
    assert not closed.moves_less(layer, ranks)
    # As many bytes or more, and the counts besides; with equal bytes, a gather around a ring of 8 has more steps.
    assert communication_s(ep) > (0.95 if (ranks, top_k) == (8, 8) else 1.0) * communication_s(tp)
    assert closed.break_even_imbalance(layer, ranks, emu.cluster("h100-8")) <= 1


SKEWS = {"zipf:0.05": 1.07, "zipf:0.15": 1.21, "zipf:0.3": 1.46, "zipf:0.4": 1.64, "zipf:1.2": 3.43}


@pytest.mark.parametrize("routing", SKEWS)
def test_products_and_bytes_alone_pay_for_the_imbalance_of_the_closed_form(routing):
    p = imbalance(routing)
    assert p == pytest.approx(SKEWS[routing], abs=0.01)
    ep, tp = run_of("ep", routing=routing), run_of("tp", routing=routing)
    limit = closed.break_even_imbalance(MIXTRAL, 8, emu.cluster("h100-8"))
    assert limit == pytest.approx(1.14, abs=0.02)
    faster = large_products_s(ep) + communication_s(ep) < large_products_s(tp) + communication_s(tp)
    assert faster == (p < limit)


def test_all_in_all_whole_experts_lose_to_skew_at_half_as_much_again():
    """Handling rows counted, too: the crossing lies between imbalances of 1.46 and 1.64."""
    tp = step_s("tp")
    # Tensor parallelism hardly feels it: experts' rows fill other numbers of tiles.
    assert step_s("tp", routing="zipf:1.2") == pytest.approx(tp, rel=0.02)
    assert step_s("ep", routing="zipf:0.3") < tp < step_s("ep", routing="zipf:0.4")
    assert step_s("ep", routing="zipf:1.2") > 2 * tp


def test_the_busiest_rank_moves_and_computes_its_share_more():
    p = imbalance("zipf:0.4")
    even, skewed = run_of("ep"), run_of("ep", routing="zipf:0.4")
    sends, receives = (
        [sum(e.sizes or (e.bytes,)) for _, e in skewed.trace.of(Collective, rank=0) if e.name == name]
        for name in ("dispatch", "combine")
    )
    own = TOKENS * 2 * 4096 * 2
    assert sends[0] == receives[1] == own and receives[0] == sends[1] == pytest.approx(p * own, rel=1e-3)
    assert products_s(skewed) == pytest.approx(p * products_s(even), rel=0.02)
    assert 1.35 * communication_s(even) < communication_s(skewed) < p * communication_s(even)  # latency stays


def test_few_tokens_communicate_longer_although_they_move_less():
    few = closed.break_even_tokens(MIXTRAL, 8, emu.cluster("h100-8"))
    assert 16 < few < 128
    for tokens in (16, 128):
        ep, tp = run_of("ep", tokens=tokens), run_of("tp", tokens=tokens)
        assert moved_bytes(ep)[0] < moved_bytes(tp)[0]
        assert (communication_s(ep) > communication_s(tp)) == (tokens < few)


def test_across_nodes_fewer_choices_than_ranks_do_not_suffice():
    """Fine-grained experts, top-8 of 16 on 16 GPUs of two nodes: half the bytes, and more time on links."""
    layer = closed.MoeLayer(width=7168, ffn=2048, experts=16, top_k=8)
    ep, tp = (run_of(how, layer, ranks=16, nodes=2) for how in ("ep", "tp"))
    assert moved_bytes(ep)[0] * 2 == moved_bytes(tp)[0]
    assert communication_s(ep) > communication_s(tp)
    assert closed.break_even_imbalance(layer, 16, emu.cluster("h100", nodes=2)) < 1
    assert closed.break_even_imbalance(replace(layer, top_k=2), 16, emu.cluster("h100", nodes=2)) > 1
