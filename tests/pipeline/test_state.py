"""A pipeline's training is saved as one device has it, and goes on in any other layout."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import emu
from emu.equivalence.compare import whole_results
from emu.models import GPT, Config
from emu.parallel import Pipeline, shard_model
from emu.parallel.state import StateError, load, load_dcp, save, save_dcp

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage"),
]
CLOSE = 1e-9  # float64 against float64, in another order of sums; AdamW's steps are 0.01
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
SHAPE = {"layers": 4, "width": 4, "heads": 2, "ffn": 5, "vocab": 7, "seq": 3}
TIED = Config(**SHAPE, tied=True)
MOE = Config(**SHAPE, experts=4, balance=0.1)
ROWS = 5

# (axes, how): a layout. Without pp it is plain data parallelism.
LAYOUTS = {
    "pp=4": ({"pp": 4}, {}),
    "zb-h1": ({"pp": 3, "dp": 2}, {"schedule": "zb-h1", "zero": 1}),
    "zb-v": ({"pp": 2}, {"schedule": "zb-v"}),
    "zb-v, zero": ({"dp": 2, "pp": 2}, {"schedule": "zb-v", "zero": 3}),
    "dualpipe": ({"pp": 2, "dp": 2}, {"schedule": "dualpipe", "zero": 2}),
    "interleaved": ({"pp": 2}, {"schedule": "interleaved", "chunks": 2, "stages": [0, 2, 1, 1]}),
    "tp": ({"pp": 2, "tp": 2}, {"schedule": "zb-h2"}),
    "hybrid": ({"pp": 2, "dp": 4}, {"zero": 3, "replicate": 2, "recompute": True}),
    "dp=2": ({"dp": 2}, {}),
    "zero": ({"dp": 3}, {"zero": 3}),
    "one": ({"dp": 1}, {}),
}


def batch(config, step):
    g = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, config.vocab, (ROWS, config.seq), generator=g) for _ in "xy")
    return emu.Batch(x, y)


def made(rank, config, how, seed):
    model = GPT(config, seed=seed)
    axes = rank.mesh.axes
    sharding = shard_model(model, rank) if axes.get("tp", 1) > 1 else None
    data = [axis for axis in axes if axis == "dp"]
    if "pp" in axes:
        dist = Pipeline(model, rank, *data, microbatches=3, sharding=sharding, **how)
    else:
        dist = emu.DataParallel(model, rank, *data, sharding=sharding, **how)
    return dist, dist.optimizer(torch.optim.AdamW, **ADAMW)


def steps(dist, optimizer, config, some):
    for step in some:
        dist.backward(batch(config, step), microbatches=3)
        optimizer.step()


def saves(rank, config, how, path, write=save):
    dist, optimizer = made(rank, config, how, seed=0)
    steps(dist, optimizer, config, range(2))
    write(path, dist, optimizer)
    return dist.gather_parameters()


def moves(rank, config, how, path, onto=None, read=load):
    dist, optimizer = made(rank, config, how, seed=1)
    read(path, dist, optimizer)
    if onto is not None:
        save(onto, dist, optimizer)
    steps(dist, optimizer, config, range(2, 4))
    return dist.gather_parameters()


def forgets(rank, config, how, path):
    dist, optimizer = made(rank, config, how, seed=1)
    load(path, dist)
    steps(dist, optimizer, config, range(2, 4))
    return dist.gather_parameters()


def alone(rank, config, path):
    """All of the state, in a plain model on one rank."""
    dist, optimizer = made(rank, config, {}, seed=2)
    load(path, dist, optimizer)
    named = dict(dist.model.named_parameters())
    return {n: p.detach().clone() for n, p in named.items()}, {
        n: dict(optimizer.torch.state[p]) for n, p in named.items()
    }


def never_stopped(config, n=4):
    model = GPT(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(n):
        data = batch(config, step)
        optimizer.zero_grad()
        (model.loss_sum(data.x, data.y) / data.tokens).backward()
        optimizer.step()
    return dict(model.named_parameters()), {name: optimizer.state[p] for name, p in model.named_parameters()}


def launch(program, layout, config, *args):
    axes, how = LAYOUTS[layout]
    mesh = emu.Mesh(**axes)
    return whole_results(emu.launch(program, mesh, args=(config, how, *args)).results, mesh)


def near(some, others):
    return all(torch.allclose(some[name], others[name], rtol=CLOSE, atol=CLOSE) for name in others)


layouts = st.sampled_from(sorted(LAYOUTS))


@settings(max_examples=max(settings().max_examples // 5, 1), deadline=None)
@given(layouts, layouts, st.sampled_from([TIED, MOE]))
@example("pp=4", "dp=2", TIED)
@example("dp=2", "pp=4", TIED)
@example("zb-v", "pp=4", TIED)
@example("zb-v, zero", "dualpipe", TIED)
@example("dualpipe", "zb-h1", MOE)
@example("tp", "hybrid", TIED)
def test_it_is_saved_as_one_device_has_it_and_goes_on_in_any_other_layout(first, second, config):
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        saved = launch(saves, first, config, a)
        later = launch(moves, second, config, a, b)
        (parameters, states), (moved, moved_states) = (
            emu.launch(alone, emu.Mesh(dp=1), args=(config, path)).results[0] for path in (a, b)
        )
    assert saved.keys() == parameters.keys() == moved.keys()
    for name, p in parameters.items():
        assert torch.equal(saved[name], p) and torch.equal(moved[name], p), name
        assert states[name].keys() == moved_states[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moved_states[name][key], value) for key, value in states[name].items()), name
    expected, expected_states = never_stopped(config, 2)
    assert near(parameters, expected)
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert near({n: s[key] for n, s in states.items()}, {n: s[key] for n, s in expected_states.items()}), key
    assert near(later, never_stopped(config)[0])


def test_without_the_optimizers_states_it_would_go_elsewhere(tmp_path):
    """Negative control: what is near is told from what is not."""
    launch(saves, "pp=4", TIED, tmp_path)
    assert not near(launch(forgets, "zb-v", TIED, tmp_path), never_stopped(TIED)[0])


def test_every_element_is_written_once(tmp_path):
    """Copies on several stages, the tied table and what two ways of a pipeline both hold, do not count twice."""
    from safetensors import safe_open

    launch(saves, "dualpipe", TIED, tmp_path)
    found = 0
    for file in tmp_path.glob("save-*/*"):
        with safe_open(file, "pt") as held:
            names = [name for name in held.keys() if name.startswith("parameters")]  # noqa: SIM118
            found += sum(held.get_tensor(name).numel() for name in names)
    assert found == sum(p.numel() for p in GPT(TIED, seed=0).parameters())


def test_plain_torch_reads_what_was_exported_and_the_other_way(tmp_path):
    """Through torch.distributed.checkpoint: from four stages to plain torch, from there to ZB-V."""
    saved = launch(saves, "pp=4", TIED, tmp_path / "out", save_dcp)
    model = GPT(TIED, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    dcp.save(state, checkpoint_id=tmp_path / "back", no_dist=True)
    assert near(launch(moves, "zb-v", TIED, tmp_path / "back", None, load_dcp), never_stopped(TIED)[0])


@pytest.mark.parametrize("dropped", [0, 2])
def test_a_stage_that_is_not_saved_is_missed(tmp_path, dropped):
    """Negative control: a file without some stage's layers loads nowhere."""

    def saves_less(rank, config, how, path):
        dist, _ = made(rank, config, how, seed=0)
        if rank.coords["pp"] == dropped:
            dist.vectors = []
        save(path, dist)

    launch(saves_less, "pp=4", MOE, tmp_path)
    with pytest.raises(StateError, match=r"blocks|embedding"):
        launch(moves, "zb-v", MOE, tmp_path)
