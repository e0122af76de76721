"""The pictures of attention across ranks show every pair that is attended to, once, where it is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.models import Config, Decoder
from emu.parallel.context import KINDS, make_cut
from emu.view import attended_work_figure, png_bytes, ring_figure
from emu.view.context import BEFORE, LATER, rank_colour
from emu.view.context_work import measured, planned, ring_of

FEW = settings(max_examples=10)  # figures take long


@st.composite
def cuts(draw, documents=True, ranks=6):
    kind, ranks, length = draw(st.sampled_from(KINDS)), draw(st.integers(1, ranks)), draw(st.integers(0, 40))
    if not documents or not draw(st.booleans()):
        return make_cut(kind, length, ranks)
    numbers = draw(st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=3))
    return make_cut(kind, length, ranks, torch.tensor(numbers, dtype=torch.int64).reshape(len(numbers), length))


def held(cut, rank):
    """Positions of every row that a place of the ring has, [rows, n]."""
    positions = cut.ring.tokens(rank).positions.numpy()
    rows = 1 if cut.documents is None else len(cut.documents)
    return positions if positions.ndim == 2 else np.repeat(positions[None], rows, 0)


def seen(cut, queries, keys, causal=True):
    """[rows, queries, keys], by the definition."""
    out = keys[:, None] <= queries[:, :, None] if causal else np.ones((*queries.shape, keys.shape[1]), dtype=bool)
    if cut.documents is not None:
        documents = cut.documents.numpy()
        of = [np.take_along_axis(documents, at, 1) for at in (queries, keys)]
        out = out & (of[0][:, :, None] == of[1][:, None])
    return out


def by_definition(cut, causal=True):
    everything = np.repeat(np.arange(cut.length)[None], 1 if cut.documents is None else len(cut.documents), 0)
    places = cut.ring.ranks
    found = []
    for i in range(places):
        steps = [everything] if cut.kind == "all-gather" else [held(cut, (i - s) % places) for s in range(places)]
        found.append([seen(cut, held(cut, i), keys, causal).sum() for keys in steps])
    return np.repeat(np.array(found), cut.ulysses, 0) / cut.ulysses


@given(cuts())
def test_work_is_what_the_definition_of_a_causal_mask_says(cut):
    assert (planned(cut) == by_definition(cut)).all()
    assert planned(cut).sum(1).tolist() == [cut.work(i) for i in range(cut.ranks)]


def test_the_definition_tells_masks_apart():
    """Negative control."""
    cut = make_cut("zigzag", 24, 4)
    assert (planned(cut) != by_definition(cut, causal=False)).all()
    other = make_cut("ring", 24, 4)
    assert (planned(cut) != planned(other)).any()


def panels(figure, cut):
    """(those of the score matrix, panels[place][step])."""
    places, steps = len(ring_of(cut)), len(ring_of(cut)[0])
    axes = [axes for axes in figure.axes if axes.get_title(loc="left")]
    return axes[:steps], [axes[steps + steps * i : steps + steps * (i + 1)] for i in range(places)]


def covered(axes, block, row):
    """[queries, keys] of a panel: how often something is drawn there."""
    height, width = axes.get_ylim()[0], axes.get_xlim()[1]
    out = np.zeros((round(height), round(width)), dtype=int)
    y, x = (np.arange(n) + 0.5 for n in out.shape)
    centres = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)
    for patch in axes.patches:
        if patch.get_facecolor()[3]:
            out += patch.get_path().contains_points(centres).reshape(out.shape)
    for image in axes.images:
        k0, k1, q1, q0 = map(round, image.get_extent())
        out[q0:q1, k0:k1] += (np.asarray(image.get_array())[..., :3] != 1).any(-1)
    return out


@FEW
@given(cuts(ranks=4), st.data())
def test_panels_show_all_that_is_seen_and_nothing_twice(cut, data):
    row = data.draw(st.integers(0, (1 if cut.documents is None else len(cut.documents)) - 1))
    _, drawn = panels(ring_figure(cut, row), cut)
    for i, line in enumerate(ring_of(cut)):
        for share, axes in zip(line, drawn[i]):
            keys = np.arange(cut.length)[None] if share.holder is None else held(cut, share.holder)
            keys = keys[[row % len(keys)]]
            only = make_cut(cut.kind, cut.length, cut.ranks, None if cut.documents is None else cut.documents[[row]])
            want = seen(only, held(cut, i)[[row]], keys)[0]
            if want.size:
                assert (covered(axes, share.block, row) == want).all()
            assert ("nothing" in [text.get_text() for text in axes.texts]) == (not share.block.pieces)


def test_keys_and_values_go_round():
    cut = make_cut("ring", 32, 4)
    _, drawn = panels(ring_figure(cut), cut)
    for i, line in enumerate(drawn):
        assert [axes.get_title(loc="left") for axes in line] == [f"K, V of {(i - step) % 4}" for step in range(4)]
    assert [text.get_text() for text in drawn[0][1].texts] == ["nothing"]  # of rank 3, all later
    assert not drawn[3][1].texts


@FEW
@given(cuts(documents=False, ranks=4).filter(lambda cut: cut.length))
def test_over_its_steps_the_score_matrix_fills_up(cut):
    """Each pair is coloured in one step, in the colour of the rank whose query it is; before it is pale, then grey."""
    above, _ = panels(ring_figure(cut), cut)
    images = [np.asarray(axes.images[0].get_array()) for axes in above]
    causal = np.tri(cut.length, dtype=bool)
    places = len(ring_of(cut))

    def like(image, colour):
        return np.isclose(image, [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)], atol=1e-6).all(-1)

    done = np.zeros_like(causal)
    for image in images:
        assert (image[~causal] == 1).all()
        now = np.zeros_like(causal)
        for place in range(places):
            rows = np.isin(np.arange(cut.length), held(cut, place)[0])[:, None]
            now |= like(image, rank_colour(place, places)) & rows
        assert (like(image, BEFORE) == done).all() and not (now & done).any()
        done |= now
        assert (like(image, LATER) == (causal & ~done)).all()
    assert (done == causal).all()


def numbers(axes):
    return [0.0 if text.get_text() == "–" else float(text.get_text()) for text in axes.texts]


@FEW
@given(st.lists(cuts(ranks=4), min_size=1, max_size=4))
def test_heat_maps_say_every_share_and_every_sum(some):
    axes = [axes for axes in attended_work_figure(some).axes if axes.axison]
    for cut, heat, bars in zip(some, axes[::2], axes[1::2], strict=True):
        shares = 100 * planned(cut) / max(planned(cut).sum(), 1)
        assert numbers(heat) == pytest.approx(shares.reshape(-1), abs=0.051)
        assert numbers(bars) == pytest.approx(shares.sum(1), abs=0.051)
        loads = planned(cut).sum(1)
        worst = loads.max() / loads.mean() if loads.any() else 1
        assert f"busiest rank: {worst:.2f} x mean" in heat.get_title(loc="left")


def launched(kind, checkpoint="none", documents=None, axes="dp=2,cp=4", seq=24, more=None):
    config = Config(layers=2, width=16, heads=4, kv_heads=2, vocab=16, seq=seq, document_end=documents)
    plan = emu.Plan(axes, context=kind, checkpoint=checkpoint, seq=seq, precision="fp32", **(more or {}))
    x = torch.randint(0, 16, (4, seq), generator=torch.Generator().manual_seed(0))
    batch = emu.Batch(x, x.roll(-1, 1))

    def step(rank):
        dist = emu.parallel.parallelize(Decoder(config, seed=0), plan, rank)
        dist.backward(batch)
        dist.backward(batch)  # of several steps everything is summed

    run = emu.launch(step, emu.parallel.mesh_of(plan))
    made = None if documents is None else Decoder(config, seed=0).documents(x[: 4 // run.mesh.axes.get("dp", 1)])
    return run, make_cut(kind, seq, 4, made)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_a_run_did_what_the_cut_says(kind):
    run, cut = launched(kind)
    a_pair = 4 * 16 * 2  # four for each number of all heads, in two layers
    rows, steps = 2, 2
    assert (measured(run) == planned(cut) * a_pair * rows * steps).all()
    assert (measured(run.timeline()) == measured(run.trace)).all()
    planned_heat, kernels_heat = [axes for axes in attended_work_figure(cut, run).axes if axes.axison][::2]
    assert numbers(planned_heat) == numbers(kernels_heat)


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "zigzag", "checkpoint": "full"},
        {"kind": "zigzag", "documents": 3},
        {"kind": "usp", "checkpoint": "full", "documents": 3},
        {"kind": "striped", "axes": "pp=2,cp=4", "more": {"microbatches": 2}},
    ],
    ids=lambda more: " ".join(map(str, more.values())),
)
def test_neither_recomputation_nor_documents_nor_a_pipeline_change_that(more):
    run, cut = launched(**more)
    flops, pairs = measured(run), planned(cut)
    assert flops / flops.sum() == pytest.approx(pairs / pairs.sum(), rel=1e-12)


def test_a_run_of_another_cut_is_told_apart():
    """Negative control."""
    run, _ = launched("zigzag")
    others = [planned(make_cut(kind, 24, 4)) for kind in ("ring", "striped")]
    assert all((measured(run) / measured(run).sum() - other / other.sum()).any() for other in others)


@pytest.mark.parametrize(
    ("kind", "length", "ranks"), [*((kind, 3, 4) for kind in KINDS), ("ring", 0, 2), ("usp", 1, 1), ("zigzag", 900, 9)]
)
def test_everything_is_drawn(kind, length, ranks):
    cut = make_cut(kind, length, ranks)
    for figure in (ring_figure(cut), attended_work_figure([cut, cut])):
        assert len(png_bytes(figure, dpi=30)) > 1000


def test_what_cannot_be_drawn_is_refused():
    cut = make_cut("ring", 8, 2)
    for wrong in ("ring", None, []):
        with pytest.raises(ValueError, match="is no cut"):
            attended_work_figure(wrong)
    with pytest.raises(ValueError, match="is no cut"):
        ring_figure("ring")
    with pytest.raises(ValueError, match="no row 1 among 1"):
        ring_figure(cut, row=1)
    empty = make_cut("ring", 8, 2, torch.zeros(0, 8, dtype=torch.int64))
    for row in (0, 1):
        with pytest.raises(ValueError, match="documents have no rows, so there is none to draw"):
            ring_figure(empty, row=row)
    run = emu.launch(lambda rank: rank.group("dp").all_reduce(torch.ones(1)), emu.Mesh(dp=2))
    with pytest.raises(ValueError, match="no kernel of attention across ranks"):
        attended_work_figure(cut, run)
