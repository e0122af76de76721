"""What travels between experts' ranks: one dispatch and one combine each way, of as many bytes as the routing says."""

import pytest
import torch
from hypothesis import example, given

import emu
from emu.cost import sent_bytes
from emu.models import Config, Decoder
from emu.parallel.expert import Routing, RoutingStatistics, gathered, keep_routing, routing_of
from emu.spmd import EmuError
from emu.trace.events import Collective, HostWait, Kernel

from .moe_programs import Case, cases, mesh_for, shape, spread

ELEMENT_BYTES = 4


def routed(case, ep, etp=1):
    """One step in float32. Returns the run, and every rank's statistics, its own and those of its ep group."""

    def program(rank):
        model = case.model()
        spread(rank, model)
        model.experts.keeps_routing = True
        x, c = (t.split(case.tokens, 1)[rank] for t in case.data())
        y = model(x.clone().requires_grad_())
        (y * c).sum().backward()
        rank.mark("statistics")
        return model.experts.routing, gathered(model.experts.routing, rank.group("ep"))

    return emu.launch(program, mesh_for(case, ep, etp))


def communications(run, rank, name):
    step = [e for _, e in run.trace.of(Collective, rank=rank) if e.name != "routing"]
    return [e for e in step if e.name == name]


def row_bytes(case):
    return case.config.width * ELEMENT_BYTES


@given(cases(most_ranks=8))
@example((Case(shape(experts=5), (3, 0, 7, 2)), 2, 2))
def test_dispatch_and_combine_move_what_the_routing_sends_away_forward_and_backward(drawn):
    case, ep, etp = drawn
    run = routed(case, ep, etp)
    each = row_bytes(case)
    for rank, (mine, group) in enumerate(run.results):
        here = run.mesh.members(rank, "ep").index(rank)
        assert group.sent[here] == mine.sent
        sent, received = (sum(n for i, n in enumerate(way) if i != here) for way in (mine.sent, mine.received))
        dispatched = [sent_bytes(e, rank) for e in communications(run, rank, "dispatch")]
        combined = [sent_bytes(e, rank) for e in communications(run, rank, "combine")]
        # Rows go out as they were chosen, and come back as they were received; gradients go the other way.
        assert dispatched == ([sent * each, received * each] if ep > 1 else [])
        assert combined == ([received * each, sent * each] if ep > 1 else [])
        assert mine.received == tuple(line[here] for line in group.sent)
        assert sum(mine.experts) == sum(mine.sent) == case.tokens[rank] * case.config.top_k
    away = sum(n for mine, _ in run.results for n in mine.sent) - sum(
        mine.sent[run.mesh.members(r, "ep").index(r)] for r, (mine, _) in enumerate(run.results)
    )
    in_all = sum(sent_bytes(e, r) for r, e in run.trace.of(Collective) if e.name in ("dispatch", "combine"))
    assert in_all == 4 * away * each


@given(cases(most_ranks=8).filter(lambda drawn: drawn[2] > 1))
@example((Case(shape(experts=5), (3, 0, 7, 2)), 2, 2))
def test_over_etp_every_rank_gets_all_tokens_of_the_same_experts(drawn):
    case, ep, etp = drawn
    run = routed(case, ep, etp)
    for rank in range(run.mesh.size):
        members = run.mesh.members(rank, "etp")
        pieces = [sum(run.results[r][0].received) * row_bytes(case) for r in members]
        gathers = communications(run, rank, "expert tokens")
        scatters = communications(run, rank, "expert outputs")
        # A gather forward has a reduce-scatter as backward, and the other way round.
        assert [e.kind for e in gathers] == ["all_gather", "reduce_scatter"]
        assert [e.kind for e in scatters] == ["reduce_scatter", "all_gather"]
        for e in (*gathers, *scatters):
            assert list(e.sizes or [e.bytes // etp] * etp) == pieces


def test_counts_travel_before_the_tokens_and_the_host_waits_for_them_once():
    run = routed(Case(shape(experts=4), (3, 2)), 2)
    said = ["host waits" if type(e) is HostWait else e.name for _, e in run.trace.of(Collective, HostWait, rank=0)]
    before = said.index("routing")
    assert said[:before] == ["counts", "host waits", "dispatch", "combine", "combine", "dispatch"]


def test_tokens_whose_experts_are_at_home_do_not_travel():
    def program(rank, stay):
        model = Case(shape(experts=4, top_k=1), ()).model()
        spread(rank, model)
        first = 2 * (rank if stay else 1 - rank)
        x = torch.ones(6, 4, requires_grad=True)
        model.experts(x, torch.tensor([first, first + 1] * 3)).sum().backward()

    def moved(stay):
        run = emu.launch(program, emu.Mesh(dp=2, ep=2), args=(stay,))
        return sum(sent_bytes(e, r) for r, e in run.trace.of(Collective) if e.name != "counts")

    assert moved(stay=True) == 0
    assert moved(stay=False) == 4 * 2 * 6 * 4 * ELEMENT_BYTES


def test_shape_runs_take_the_declared_routing_and_move_the_same_bytes():
    config = shape(experts=4, top_k=1, routing="uniform")

    def program(rank):
        model = Case(config, (8, 8)).model()
        spread(rank, model)
        x = torch.zeros(8, 4, requires_grad=True)
        model.experts(x, torch.arange(8) % 4).sum().backward()

    def moved(**how):
        run = emu.launch(program, emu.Mesh(dp=2, ep=2), **how)
        return list(run.trace.of(Collective)), list(run.trace.of(Kernel))

    real, shapes = moved(), moved(backend="shape")
    assert real[0] == shapes[0] and len(real[0]) == 2 * 5
    assert real[1] == shapes[1] and len(real[1]) > 100


def test_a_declared_skew_shows_in_what_travels():
    def program(rank):
        model = Case(shape(experts=4, top_k=1, routing="zipf:1.5"), ()).model()
        spread(rank, model)
        model.experts.keeps_routing = True
        model.experts(torch.zeros(100, 4), torch.empty(100, dtype=torch.int64))
        return model.experts.routing

    first, second = emu.launch(program, emu.Mesh(dp=2, ep=2), backend="shape").results
    assert first.sent == second.sent and first.sent[0] > 3 * first.sent[1]
    assert first.received == (first.sent[0],) * 2 and second.received == (first.sent[1],) * 2


def test_imbalance_is_the_most_over_the_mean():
    routing = Routing(sent=((1, 3), (0, 4)), experts=(1, 0, 7, 0), dropped=2)
    assert routing.loads == (1, 7)
    assert routing.imbalance == 7 / 4 and routing.expert_imbalance == 7 / 2
    assert Routing(((0, 0), (0, 0)), (0, 0), 0).imbalance == 1


def test_what_a_capacity_drops_is_counted():
    case = Case(shape(experts=4, capacity=0.5), (6, 5))

    def program(rank):
        model = case.model()
        spread(rank, model)
        model.experts.keeps_routing = True
        x, _ = (t.split(case.tokens, 1)[rank] for t in case.data())
        kept = model.capacity(model.router(x).experts)
        model(x)
        return int((~kept).sum()), model.experts.routing, gathered(model.experts.routing, rank.group("ep"))

    (some, mine, together), (others, _, same) = emu.launch(program, emu.Mesh(dp=2, ep=2)).results
    assert some and mine.dropped == some
    assert together == same and together.dropped == some + others
    assert sum(together.experts) == sum(map(sum, together.sent)) == 2 * 11 - some - others


def test_one_rank_keeps_statistics_where_asked():
    def program(rank):
        model = Case(shape(), ()).model()
        spread(rank, model)
        model(torch.ones(1, 3, 4))
        before = model.experts.routing
        model.experts.keeps_routing = True
        model(torch.ones(1, 3, 4))
        return before, model.experts.routing

    before, after = emu.launch(program, emu.Mesh(dp=1)).results[0]
    assert before is None and isinstance(after, RoutingStatistics)
    assert after.sent == after.received == (6,) and sum(after.experts) == 6


def test_statistics_that_are_none_are_told():
    with pytest.raises(EmuError, match="keep_routing"):
        emu.launch(lambda rank: gathered(None, rank.group("dp")), emu.Mesh(dp=2))


def test_a_models_mixtures_tell_what_they_routed_by_name():
    def program(rank):
        config = Config(layers=2, width=8, heads=2, vocab=11, seq=6, ffn=4, experts=4, top_k=2)
        dist = emu.parallelize(Decoder(config), emu.Plan("dp=4", ep=2, precision="fp32"), rank)
        keep_routing(dist.model)
        x = torch.arange(24).view(4, 6) % 11
        dist.backward((x, x))
        keep_routing(dist.model, False)
        return routing_of(dist.model, rank.group("dp"))

    results = emu.launch(program, emu.Mesh(dp=4, ep=2)).results
    assert all(found == results[0] for found in results)
    assert list(results[0]) == ["blocks.0.moe.experts", "blocks.1.moe.experts"]
    for routing in results[0].values():
        assert len(routing.sent) == 4 and sum(routing.loads) == sum(routing.experts) == 2 * 24


def test_a_model_without_experts_that_are_shared_out_has_no_routing():
    with pytest.raises(EmuError, match="Linear has no experts that are shared out"):
        keep_routing(torch.nn.Linear(2, 2))
