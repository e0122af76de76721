"""Who holds what: the picture's parts are what the ranks of a real run have."""

import pytest
import torch

import emu
from emu import EmuError, Plan, PlanError, parallelize
from emu.models import GPT, config
from emu.parallel import Batch, mesh_of
from emu.view import holding_figure, png_bytes, shares_of
from emu.view.holding import layer_cells, token_cells
from emu.view.shares import ranges

ROWS, SEQ = 6, 32
PLANS = {
    "dp": Plan("dp=3", zero=0, dtype="fp32", seq=SEQ, global_batch=ROWS),
    "zero 1, tp": Plan("dp=2,tp=2", zero=1, dtype="fp32", seq=SEQ, global_batch=ROWS),
    "zero 2, pp": Plan("dp=2,pp=2", zero=2, dtype="fp32", seq=SEQ, global_batch=ROWS, microbatches=3),
    "zero 3, sp": Plan("cp=2,tp=2", zero=3, sp=True, dtype="fp32", seq=SEQ, global_batch=ROWS),
    "hsdp": Plan("dp=4", zero=3, replicate=2, dtype="fp32", seq=SEQ, global_batch=ROWS),
    "ulysses, more ranks than rows": Plan("dp=4,cp=2", context="ulysses", dtype="fp32", seq=SEQ, global_batch=3),
}


def train(plan):
    """One step of gpt-tiny in which every token of the batch is another one, so that ranks can say which they see."""
    tokens = torch.arange(plan.global_batch * SEQ).reshape(plan.global_batch, SEQ)

    def program(rank):
        model = GPT(config("gpt-tiny"))
        seen, between = [], []
        model.embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten().tolist()))
        for block in model.blocks:
            block.norm1.register_forward_pre_hook(lambda _, given: between.append(given[0].shape[1]))
        dist = parallelize(model, plan, rank)
        optimizer = dist.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        dist.backward(Batch(tokens, tokens % 7), microbatches=plan.accumulated())
        pieces = [(piece.name, piece.start, piece.tensor.numel()) for piece in dist.pieces()]
        optimizer.step()
        rank.mark("held")
        return {"seen": sorted(t for some in seen for t in some), "between": between, "pieces": pieces}

    return emu.launch(program, mesh_of(plan))


@pytest.fixture(scope="module", params=list(PLANS))
def both(request):
    """(who holds what, a run), of one plan."""
    plan = PLANS[request.param]
    return shares_of(plan, "gpt-tiny"), train(plan)


def tokens_of(share):
    rows = [row for a, b in share.rows for row in range(a, b)]
    return sorted(row * SEQ + token for row in rows for a, b in share.tokens for token in range(a, b))


def test_rows_and_tokens_are_those_that_the_model_sees(both):
    shares, run = both
    first = [rank for rank in shares.shares if not run.mesh.coords(rank).get("pp", 0)]
    assert first
    for rank in first:
        assert run.results[rank]["seen"] == tokens_of(shares.shares[rank])


def test_layers_and_what_lies_between_them_are_those_that_run(both):
    shares, run = both
    for rank, share in shares.shares.items():
        between = run.results[rank]["between"]
        n_between = sum(b - a for a, b in share.between_tokens)
        if share.rows:
            assert between == [n_between] * len(share.layers) * shares.plan.accumulated()


def test_states_are_as_large_as_the_memory_of_ranks_says(both):
    shares, run = both
    held = run.memory.window("held").held
    for rank in shares.shares:
        for kind in ("parameters", "gradients", "optimizer"):
            drawn = 4 * shares.held(kind, rank)
            # Shards are padded: at most an element a vector.
            assert 0 <= held[rank][kind] - drawn <= 4 * 16, (rank, kind)


def test_parts_of_the_optimizer_are_those_that_it_steps(both):
    shares, run = both
    for rank in shares.shares:
        drawn = {}
        for piece in shares.pieces["optimizer"]:
            if rank in piece.ranks:
                drawn.setdefault(piece.name, []).append((piece.at, piece.at + piece.elements))
        stepped = {name: [(start, start + n)] for name, start, n in run.results[rank]["pieces"] if n}
        joined = {name: [(min(a for a, _ in some), max(b for _, b in some))] for name, some in drawn.items()}
        assert joined == stepped
        assert all(sum(b - a for a, b in drawn[name]) == joined[name][0][1] - joined[name][0][0] for name in drawn)


def test_together_ranks_hold_every_element(both):
    shares, _ = both
    for kind, pieces in shares.pieces.items():
        whole = {}
        for piece in pieces:
            whole[piece.name] = whole.get(piece.name, 0) + piece.elements
        assert whole == shares.elements, kind


def test_cells_are_the_shares_with_all_their_ranks(both):
    shares, _ = both
    cells = token_cells(shares, 0)
    area = sum((c.columns[1] - c.columns[0]) * (c.rows[1] - c.rows[0]) for c in cells)
    assert area == shares.plan.global_batch * SEQ
    own = sum((c.columns[1] - c.columns[0]) * (c.rows[1] - c.rows[0]) for c in cells if c.own)
    assert own == len(tokens_of(shares.shares[0]))
    layers = layer_cells(shares, 0)
    assert sum((c.columns[1] - c.columns[0]) * (c.rows[1] - c.rows[0]) for c in layers) == len(shares.layers) == 4


def test_a_plan_alone_has_the_same_tokens_and_stages_for_layers(both):
    shares, _ = both
    alone = shares_of(shares.plan)
    assert not alone.pieces
    for rank, share in shares.shares.items():
        assert alone.shares[rank][:3] == share[:3]
        assert alone.shares[rank].width == share.width


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_kinds_that_are_held_alike_are_drawn_once(both):
    shares, _ = both
    figure = holding_figure(shares, rank=1)
    zero = shares.plan.zero
    expected = {
        0: ["parameters, gradients and optimizer states"],
        1: ["parameters and gradients", "optimizer states"],
        2: ["parameters", "gradients and optimizer states"],
        3: ["parameters, gradients and optimizer states"],
    }[zero]
    assert titles(figure)[-len(expected) :] == expected
    assert ("the same between cut modules (sp)" in titles(figure)) == shares.plan.sp
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_a_plan_alone_says_how_to_see_its_states_and_where_its_batch_is_from(both):
    plan = both[0].plan
    states = 'holding_figure(plan, "gpt-tiny")'
    for shares, alone in (both[0], False), (shares_of(plan), True):
        figure = holding_figure(shares)
        title, note = figure._suptitle.get_text(), " ".join(figure._supxlabel.get_text().split())
        assert (f"zero={plan.zero}" in title) == (bool(plan.zero) and not alone)
        assert (states in note) == alone and (f"which zero={plan.zero} cuts" in note) == (alone and bool(plan.zero))
        assert f"global_batch={plan.global_batch}, seq={SEQ}" in note


def test_ranks_without_rows_are_named():
    figure = holding_figure(PLANS["ulysses, more ranks than rows"])
    assert "no rows for 6, 7" in figure._supxlabel.get_text()


def test_the_chosen_rank_is_dark_and_all_others_are_labelled():
    figure = holding_figure(Plan("dp=2,tp=2", seq=SEQ, global_batch=ROWS), rank=3)
    tokens, layers = figure.axes
    assert [text.get_text() for text in tokens.texts] == ["0, 1", "2, 3"]
    assert [text.get_text() for text in layers.texts] == ["0, 2", "1, 3"]
    for axes in (tokens, layers):
        pale, dark = (patch.get_facecolor() for patch in axes.patches)
        assert sum(dark[:3]) < 1 < sum(pale[:3])


def test_a_schedule_with_chunks_gives_a_rank_several_stages():
    shares = shares_of(Plan("pp=2", schedule="interleaved", chunks=2, microbatches=2))
    assert [shares.shares[rank].layers for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert len(layer_cells(shares, 0)) == 4


def test_experts_lie_on_the_ranks_of_ep():
    shares = shares_of(Plan("dp=4", ep=2, zero=1, seq=SEQ, global_batch=4), "moe-tiny")
    ranks = {piece.ranks for piece in shares.pieces["parameters"] if "experts" in piece.name}
    assert ranks == {(0, 2), (1, 3)}
    stepped = [piece for piece in shares.pieces["optimizer"] if "experts" in piece.name]
    assert all(len(piece.ranks) == 1 for piece in stepped)
    for pieces in shares.pieces.values():
        assert sum(piece.elements for piece in pieces) == sum(shares.elements.values())


def test_a_mesh_is_drawn_as_a_plan_of_it_and_a_thousand_ranks_are_drawn():
    assert png_bytes(holding_figure(emu.Mesh(dp=2, tp=2)))
    assert png_bytes(holding_figure(Plan("dp=128,tp=8", seq=8, global_batch=128), rank=1000))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(EmuError, match="128 ranks"):
        holding_figure(Plan("dp=128"), "gpt-tiny")
    with pytest.raises(EmuError, match="is a Linear"):
        holding_figure(Plan("dp=2"), torch.nn.Linear(2, 2))
    with pytest.raises(PlanError):
        holding_figure("dp=2")
    with pytest.raises(EmuError):
        holding_figure(Plan("dp=2"), rank=2)


def test_numbers_become_ranges():
    assert ranges([3, 0, 1, 7]) == ((0, 2), (3, 4), (7, 8)) and ranges([]) == ()
