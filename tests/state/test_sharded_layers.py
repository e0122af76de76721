"""A training that is cut inside its layers is saved as one device has it, and goes on under any other cut."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import emu
from emu.models import GPT, Config
from emu.parallel import shard_model
from emu.parallel.state import StateError, load, load_dcp, save, save_dcp
from emu.parallel.tensor import pieces

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage"),
]
CLOSE = 1e-9  # float64 against float64, in another order of sums; AdamW's steps are 0.01


@st.composite
def models(draw):
    """Decoders that tp up to 4 can cut; vocabulary and MLP need not divide."""
    heads = draw(st.sampled_from([4, 12]))
    moe = draw(st.booleans())
    return Config(
        layers=1,
        width=draw(st.integers(3, 6)),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=2,
        ffn=draw(st.integers(4, 7)),
        vocab=draw(st.integers(3, 9)),
        seq=4,
        positions=draw(st.sampled_from(["learned", "rotary"])),
        norm=draw(st.sampled_from(["layer", "rms"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        tied=draw(st.booleans()),
        experts=4 if moe else 0,
        shared_ffn=draw(st.sampled_from([0, 5])) if moe else 0,
    )


@st.composite
def spreads(draw, moe):
    """A mesh, and how a model is spread over it."""
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    axes = {"dp": dp, "tp": tp}
    if moe:
        axes["ep"] = draw(st.sampled_from([n for n in (1, 2, 4) if not tp * dp % n]))
        axes["etp"] = draw(st.sampled_from([n for n in (1, 2) if not tp * dp % (n * axes["ep"])]))
    how = {"zero": draw(st.integers(0, 3))}
    if how["zero"] == 3:
        how["by_owner"] = draw(st.booleans())
    return axes, how, tp > 1 and draw(st.booleans())


@st.composite
def cases(draw):
    config = draw(models())
    return config, draw(spreads(config.experts > 0)), draw(spreads(config.experts > 0))


def batch(config, step):
    g = torch.Generator().manual_seed(step)
    x = torch.randint(0, config.vocab, (4, config.seq), generator=g)
    return emu.Batch(x, x.roll(1, 1))


def made(rank, config, how, sp, seed=0):
    model = GPT(config, seed=seed)
    dist = emu.DataParallel(model, rank, "dp", **how, sharding=shard_model(model, rank, sp=sp))
    return dist, dist.optimizer(torch.optim.AdamW, lr=0.01)


def steps(dist, optimizer, config, some):
    for step in some:
        dist.backward(batch(config, step))
        optimizer.step()


def saves(rank, config, how, sp, path):
    dist, optimizer = made(rank, config, how, sp)
    steps(dist, optimizer, config, range(2))
    save(path, dist, optimizer)
    return dist.gather_parameters()


def moves(rank, config, how, sp, path, onto):
    dist, optimizer = made(rank, config, how, sp, seed=1)
    load(path, dist, optimizer)
    save(onto, dist, optimizer)
    steps(dist, optimizer, config, range(2, 4))
    return dist.gather_parameters()


def alone(rank, config, path):
    """All of the state, in a plain model on one rank."""
    dist = emu.DataParallel(GPT(config, seed=2), rank, "dp")
    optimizer = dist.optimizer(torch.optim.AdamW, lr=0.01)
    load(path, dist, optimizer)
    parameters = {name: p.detach().clone() for name, p in dist.model.named_parameters()}
    named = {name: optimizer.torch.state[p] for name, p in dist.model.named_parameters()}
    return parameters, {name: dict(state) for name, state in named.items()}


def never_stopped(config, n=4):
    model = GPT(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(n):
        data = batch(config, step)
        optimizer.zero_grad()
        (model.loss_sum(data.x, data.y) / data.tokens).backward()
        optimizer.step()
    return dict(model.named_parameters()), {name: optimizer.state[p] for name, p in model.named_parameters()}


def launch(program, spread, config, *args):
    axes, how, sp = spread
    run = emu.launch(program, emu.Mesh(**axes), args=(config, how, sp, *args), backend="virtual")
    return wholes(run.results, emu.Mesh(**axes))


def wholes(results, mesh):
    layouts = results[0].layouts
    return {
        name: layouts.get(name, emu.Layout()).whole(
            {rank: found[name] for rank, found in enumerate(results)}, mesh, name
        )
        for name in results[0]
    }


def on_one(config, path):
    return emu.launch(alone, emu.Mesh(dp=1), args=(config, path), backend="virtual").results[0]


def near(some, others):
    return all(torch.allclose(some[name], others[name], rtol=CLOSE, atol=CLOSE) for name in others)


@settings(max_examples=max(settings().max_examples // 2, 1))  # each trains three times
@given(cases())
def test_it_is_saved_as_one_device_has_it_and_goes_on_under_any_other_cut(case):
    config, first, second = case
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        saved = launch(saves, first, config, a)
        later = launch(moves, second, config, a, b)
        parameters, states = on_one(config, a)
        moved, moved_states = on_one(config, b)
    assert saved.keys() == parameters.keys() == moved.keys()
    for name, p in parameters.items():
        assert torch.equal(saved[name], p), name
        assert torch.equal(moved[name], p), name
        assert states[name].keys() == moved_states[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moved_states[name][key], value) for key, value in states[name].items()), name
    expected, expected_states = never_stopped(config, 2)
    assert near(parameters, expected)
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert near({n: s[key] for n, s in states.items()}, {n: s[key] for n, s in expected_states.items()}), key
    assert near(later, never_stopped(config)[0])


CONFIG = Config(layers=1, width=6, heads=4, kv_heads=2, head_dim=2, ffn=5, vocab=7, seq=4, activation="swiglu")
TWO, FOUR = ({"dp": 2, "tp": 2}, {"zero": 1}, True), ({"dp": 1, "tp": 4}, {"zero": 0}, False)


def test_without_the_optimizers_states_it_would_go_elsewhere(tmp_path):
    """Negative control: what is near is told from what is not."""

    def forgets(rank, config, how, sp, path):
        dist, optimizer = made(rank, config, how, sp, seed=1)
        load(path, dist)
        steps(dist, optimizer, config, range(2, 4))
        return dist.gather_parameters()

    launch(saves, TWO, CONFIG, tmp_path)
    assert not near(launch(forgets, FOUR, CONFIG, tmp_path), never_stopped(CONFIG)[0])


def test_pieces_that_are_not_of_the_whole_are_refused(tmp_path):
    """Negative control: parts are not saved as if they were whole."""
    with (
        patch.object(pieces, "pieces_of_wholes", lambda parts, cut: parts),
        pytest.raises(StateError, match=r"'.*weight' is F64\[.*\] on rank 1, and F64\[.*\] on a lower one"),
    ):
        launch(saves, TWO, CONFIG, tmp_path)


def test_every_element_is_written_once(tmp_path):
    """By size of the files: replicas, and key and value heads that ranks share, do not count twice."""
    from safetensors import safe_open

    launch(saves, FOUR, CONFIG, tmp_path)
    found = 0
    for file in tmp_path.glob("save-*/*"):
        with safe_open(file, "pt") as held:
            names = [name for name in held.keys() if name.startswith("parameters")]  # noqa: SIM118
            found += sum(held.get_tensor(name).numel() for name in names)
    assert found == sum(p.numel() for p in GPT(CONFIG, seed=0).parameters())


def test_plain_torch_reads_what_was_exported_and_the_other_way(tmp_path):
    """Through torch.distributed.checkpoint: from tp=2 to plain torch, from there to tp=4."""

    def exports(rank, config, how, sp, path):
        dist, optimizer = made(rank, config, how, sp)
        steps(dist, optimizer, config, range(2))
        save_dcp(path, dist, optimizer)
        return dist.gather_parameters()

    def imports(rank, config, how, sp, path):
        dist, optimizer = made(rank, config, how, sp, seed=1)
        load_dcp(path, dist, optimizer)
        steps(dist, optimizer, config, range(2, 4))
        return dist.gather_parameters()

    saved = launch(exports, TWO, CONFIG, tmp_path / "out")
    model = GPT(CONFIG, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    dcp.save(state, checkpoint_id=tmp_path / "back", no_dist=True)
    assert near(launch(imports, FOUR, CONFIG, tmp_path / "back"), never_stopped(CONFIG)[0])


@pytest.mark.parametrize("before", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}, {"tp": 1}])
@pytest.mark.parametrize("after", [{"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 2, "tp": 4}])
def test_after_a_load_ranks_along_tp_draw_alike_and_others_do_not(tmp_path, before, after):
    def draws(rank, path, loads):
        torch.manual_seed(rank.id // rank.mesh.axes["tp"])
        dist, optimizer = made(rank, CONFIG, {}, False) if "dp" in rank.mesh.axes else without_dp(rank)
        load(path, dist, optimizer) if loads else save(path, dist, optimizer)
        return torch.randint(0, 1 << 40, (4,)).tolist()

    def without_dp(rank):
        model = GPT(CONFIG, seed=0)
        dist = emu.DataParallel(model, rank, sharding=shard_model(model, rank))
        return dist, dist.optimizer(torch.optim.AdamW, lr=0.01)

    saved = emu.launch(draws, emu.Mesh(**before), args=(tmp_path, False), backend="virtual").results
    loaded = emu.launch(draws, emu.Mesh(**after), args=(tmp_path, True), backend="virtual").results
    if before == after:
        assert loaded == saved
    tp = after["tp"]
    by_group = [loaded[i : i + tp] for i in range(0, len(loaded), tp)]
    assert all(draw == group[0] for group in by_group for draw in group)
    assert len({tuple(group[0]) for group in by_group}) == len(by_group)
