"""Offloading under every strategy, with checkpoints and without, dropout included: the same losses and gradients, to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
import emu.parallel.checkpointing.offload as offload
import emu.spmd.host as host
from emu.models import GPT, Config
from emu.parallel import DataParallel, Pipeline, shard_model
from emu.parallel.checkpointing import checkpointed
from emu.parallel.checkpointing.offload import offloaded
from emu.spmd import EmuError
from emu.trace.compare import first_difference
from emu.trace.events import HostCopy

from .layers import copied, on_link

CONFIG = Config(layers=4, width=16, heads=4, kv_heads=2, vocab=31, seq=12, dropout=0.1, positions="rotary", norm="rms")


class Case(NamedTuple):
    """A strategy: mesh, and options of Pipeline or DataParallel."""

    axes: dict[str, int]
    zero: int = 0
    schedule: str = ""
    chunks: int = 1

    def dist(self, model: Any, rank: Any) -> Any:
        sharding = shard_model(model, rank, sp=True) if "tp" in self.axes else None
        if self.schedule:
            how: dict[str, Any] = {"schedule": self.schedule, "microbatches": 4, "chunks": self.chunks}
            return Pipeline(model, rank, *(["dp"] if "dp" in self.axes else []), sharding=sharding, **how)
        return DataParallel(model, rank, "dp", zero=self.zero, sharding=sharding)


CASES = {
    "zero 0": Case({"dp": 2}),
    "zero 1": Case({"dp": 2}, zero=1),
    "zero 2": Case({"dp": 2}, zero=2),
    "zero 3": Case({"dp": 2}, zero=3),
    "tp+sp, zero 3": Case({"dp": 2, "tp": 2}, zero=3),
    "gpipe": Case({"pp": 2}, schedule="gpipe"),
    "1f1b": Case({"dp": 2, "pp": 2}, schedule="1f1b"),
    "zb-h1": Case({"pp": 2}, schedule="zb-h1"),
    "zb-h1, tp+sp": Case({"pp": 2, "tp": 2}, schedule="zb-h1"),
    "interleaved": Case({"pp": 2}, schedule="interleaved", chunks=2),
    "zb-v": Case({"pp": 2}, schedule="zb-v", chunks=2),
}


def batch(config: Config, rows: int) -> emu.Batch:
    tokens = torch.randint(0, config.vocab, (rows, config.seq + 1), generator=torch.Generator().manual_seed(3))
    return emu.Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tokens=rows * config.seq)


def trained(rank: emu.Rank, case: Case, policy: str | None, how: dict[str, Any] | None) -> Any:
    """Two steps: losses, gradients, and the next random number."""
    torch.manual_seed(5 + rank)
    model = GPT(CONFIG, seed=0)
    if policy is not None:
        checkpointed(model, policy)
    if how is not None:
        offloaded(model, rank, **how)
    dist = case.dist(model, rank)
    losses = [dist.backward(batch(CONFIG, 8)) for _ in range(2)]
    return losses, dict(dist.gather_gradients()), torch.rand(1)


def run(case: Case, policy: str | None, how: dict[str, Any] | None, **options: Any) -> emu.Run:
    mesh = emu.Mesh(**case.axes, on=emu.cluster("h100"))
    return emu.launch(trained, mesh, args=(case, policy, how), **options)


def peak(run: emu.Run) -> int:
    return max(max(run.memory.series(rank)[1]["activations"]) for rank in run.trace.ranks)


def same(a: emu.Run, b: emu.Run) -> bool:
    for (losses, grads, drawn), (losses_b, grads_b, drawn_b) in zip(a.results, b.results):
        assert grads.keys() == grads_b.keys() and len(grads) > 10
        pairs = [*zip(losses, losses_b), (drawn, drawn_b), *((g, grads_b[name]) for name, g in grads.items())]
        if not all(torch.equal(x, y) for x, y in pairs):
            return False
    return True


SAMPLE = [
    *((name, None) for name in ("zero 0", "zero 3", "tp+sp, zero 3", "1f1b", "zb-h1", "interleaved")),
    *((name, "full") for name in ("zero 2", "zb-h1")),
    *((name, "every:2") for name in ("zero 1", "gpipe")),
]
REST = [case for case in product(CASES, (None, "full", "every:2")) if case not in SAMPLE]


@pytest.mark.parametrize(
    ("name", "policy"), [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in REST)]
)
def test_losses_gradients_and_random_numbers_have_the_same_bits(name, policy):
    plain, moved = run(CASES[name], policy, None), run(CASES[name], policy, {})
    assert same(plain, moved)
    sent = [copied(moved, rank)["to_host"] for rank in moved.trace.ranks]
    assert (
        all(sent) if policy is None or not CASES[name].schedule else any(sent)
    )  # the last stage may have but one input
    assert peak(moved) < peak(plain) if policy is None else peak(moved) <= peak(plain)
    assert all(moved.memory.host_series(rank)[1][-1:] in ([], [0]) for rank in moved.trace.ranks)


def test_that_comparison_sees_one_bit(monkeypatch):
    """Negative control: the least change of anything that comes back."""
    case = CASES["zero 0"]
    plain, back = run(case, None, None), host.HostCopy.back
    monkeypatch.setattr(host.HostCopy, "back", lambda copy: _stretched(back(copy)))
    assert not same(plain, run(case, None, {}))


def _stretched(x):
    return x.mul_(1 + 2**-23) if x.is_floating_point() else x


@pytest.mark.parametrize("name", ["zero 3", "zb-h1"])
def test_shape_runs_leave_the_same_record(name):
    assert first_difference(run(CASES[name], None, {}).trace, run(CASES[name], None, {}, backend="shape").trace) is None


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_pipelines_take_no_longer_where_the_link_keeps_up(name, monkeypatch):
    """Their last layer's activations come back while they wait for the gradient: but for a trace of memory bandwidth."""
    there = on_link(1e10)
    plain_s = run(CASES[name], None, None).timeline(on=there).step_time_s
    assert run(CASES[name], None, {}).timeline(on=there).step_time_s == pytest.approx(plain_s, rel=1e-4)
    if name == "gpipe":  # the negative control: fetched when its backward begins, it is waited for
        monkeypatch.setattr(offload.Visit, "comes", lambda visit: None)
        assert run(CASES[name], None, {}).timeline(on=there).step_time_s > plain_s * 1.001


def test_checkpointed_layers_send_their_inputs_and_nothing_else():
    full = run(CASES["zero 0"], "full", {})
    activation = 4 * CONFIG.seq * CONFIG.width * 4  # four rows of float32
    sizes = [e.bytes for _, e in full.trace.of(HostCopy, rank=0) if e.kind == "to_host"]
    assert sizes == [activation] * (CONFIG.layers - 1) * 2
    halves = run(CASES["zero 0"], "every:2", {})  # of two segments the last one's input stays
    assert [e.bytes for _, e in halves.trace.of(HostCopy, rank=0) if e.kind == "to_host"] == [activation] * 2


def test_checkpointing_after_offloading_is_told():
    def program(rank):
        model = GPT(CONFIG, seed=0)
        offloaded(model, rank)
        checkpointed(model, "full")
        data = batch(CONFIG, 2)
        model.loss_sum(data.x, data.y)

    with pytest.raises(EmuError, match=r"blocks\.0 was checkpointed after it was offloaded"):
        emu.launch(program, emu.Mesh(dp=1))


def test_torchs_own_checkpoint_around_layers_goes_on_as_it_did():
    from torch.utils.checkpoint import checkpoint

    def program(rank, how):
        torch.manual_seed(0)
        model = GPT(CONFIG, seed=0)
        if how is not None:
            offloaded(model, rank, **how)
        x = torch.randn(2, CONFIG.seq, CONFIG.width).requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
        return emu.grads(model)

    plain, moved = (emu.launch(program, emu.Mesh(dp=1), args=(how,)) for how in (None, {}))
    assert all(torch.equal(g, moved.results[0][name]) for name, g in plain.results[0].items())
    assert not list(moved.trace.of(HostCopy))


configs = st.builds(
    Config,
    layers=st.integers(1, 3),
    width=st.sampled_from([8, 16]),
    heads=st.sampled_from([1, 2, 4]),
    ffn=st.integers(1, 20),
    vocab=st.just(11),
    seq=st.integers(1, 9),
    positions=st.sampled_from(["learned", "rotary"]),
    norm=st.sampled_from(["layer", "rms"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.2]),
    tied=st.booleans(),
    fused=st.booleans(),
)


def storages_kept(config: Config) -> list[int]:
    """Bytes of what plain torch saves in each layer and had not before: of no parameter, buffer, table or mask."""
    model, data = GPT(config, seed=0), batch(config, 2)
    not_ours = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}
    sizes: list[int] = []
    inside: list[bool] = []

    def pack(t):
        storage = t.untyped_storage()
        if inside and storage._cdata not in not_ours and storage._cdata not in seen and storage.nbytes():
            seen[storage._cdata] = storage  # alive, so that its address stays its own
            sizes[-1] += storage.nbytes()
        return t

    def enter(layer, args, kwargs):
        inside.append(True)
        sizes.append(0)
        for value in (*args, *kwargs.values()):
            for t in value if isinstance(value, tuple) else (value,):
                if isinstance(t, torch.Tensor) and not t.requires_grad:
                    not_ours.add(t.untyped_storage()._cdata)

    for block in model.blocks:
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.loss_sum(data.x, data.y)
    return sizes


@given(configs)
@settings(max_examples=12)
def test_decoders_send_what_torch_saves_once_a_storage(config):
    def program(rank, how):
        torch.manual_seed(1)
        model = GPT(config, seed=0)
        if how is not None:
            offloaded(model, rank)
        data = batch(config, 2)
        model.loss_sum(data.x, data.y).backward()
        return emu.grads(model)

    plain, moved = (emu.launch(program, emu.Mesh(dp=1), args=(how,)) for how in (None, {}))
    assert all(torch.equal(g, moved.results[0][name]) for name, g in plain.results[0].items())
    torch.manual_seed(1)
    kept = storages_kept(config)
    assert len(kept) == config.layers and min(kept) > 0
    assert copied(moved) == {"to_host": sum(kept[:-1]), "from_host": sum(kept[:-1])}
