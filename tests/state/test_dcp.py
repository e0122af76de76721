"""Stock torch.distributed.checkpoint reads what emu exports, and emu reads what it saved."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_state_dict

import emu
from emu.parallel.state import Piece, StateError, dcp_key, export_dcp, import_dcp
from emu.parallel.state.boxes import boxes

from .layouts import cuts, differences, everything, pieces, random_bits, shapes, wholes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
PLAIN = {"parameters": {"w": random_bits((6, 5), torch.float32, 0), "b": random_bits((3,), torch.float64, 1)}}
HALVES = {("parameters", "w"): [(0, 13, [0]), (13, 30, [1])], ("parameters", "b"): [(0, 3, [0, 1])]}


def exporting(rank, path, tensors, held, extra=None):
    export_dcp(path, rank, pieces(rank, tensors, held), extra)


def importing(rank, path, tensors, held, **options):
    mine = pieces(rank, tensors, held, fill=1)
    return mine, import_dcp(path, rank, mine, **options)


def export(path, tensors, n=1, held=None, extra=None, track=True):
    args = (path, tensors, held or everything(tensors), extra)
    emu.launch(exporting, emu.Mesh(dp=n), args=args, track=track, backend="virtual")


def imported(path, tensors, n=1, held=None, track=True):
    args = (path, tensors, held or everything(tensors))
    return list(emu.launch(importing, emu.Mesh(dp=n), args=args, track=track, backend="virtual").results)


def nested(tensors, made):
    """The state dict that holds the tensors where `dcp_key` puts them."""
    root = {}
    for kind, of_kind in tensors.items():
        for name, whole in of_kind.items():
            *path, last = dcp_key(kind, name)
            at = root
            for part in path:
                at = at.setdefault(part, {})
            at[last] = made(whole)
    return root


def stock_load(path, tensors):
    """What stock torch reads into ordinary tensors, as one piece each."""
    state = nested(tensors, torch.zeros_like)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    found = {kind: [] for kind in tensors}
    for kind, of_kind in tensors.items():
        for name, whole in of_kind.items():
            at = state
            for part in dcp_key(kind, name):
                at = at[part]
            found[kind].append(Piece(name, tuple(whole.shape), 0, at.flatten()))
    return found


@given(st.data(), shapes)
def test_a_run_of_elements_is_the_boxes_in_order(data, shape):
    count = prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    found = boxes(shape, start, stop)
    got = [n for box in found for n in numbers[tuple(slice(a, a + k) for a, k in zip(*box))].flatten().tolist()]
    assert got == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data(), wholes(), st.booleans())
def test_stock_torch_reads_what_any_layout_exported(data, tensors, track):
    n, held = data.draw(cuts(tensors))
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder) / "out", tensors, n, held, track=track)
        assert not differences(tensors, stock_load(Path(folder) / "out", tensors))


def test_a_wrong_bit_would_be_seen(tmp_path):
    """Negative control."""
    other = {"parameters": {**PLAIN["parameters"], "w": random_bits((6, 5), torch.float32, 7)}}
    export(tmp_path / "out", PLAIN, 2, HALVES)
    assert differences(other, stock_load(tmp_path / "out", PLAIN)) == ["parameters: w from 0"]


@given(st.data(), wholes(), st.booleans())
def test_what_stock_torch_saved_comes_into_any_layout(data, tensors, track):
    n, held = data.draw(cuts(tensors))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(nested(tensors, lambda t: t), checkpoint_id=folder, no_dist=True)
        for mine, extra in imported(folder, tensors, n, held, track):
            assert not differences(tensors, mine) and extra is None


@given(st.data(), wholes())
def test_an_export_is_imported_in_any_other_layout(data, tensors):
    (n, held), (m, wanted) = data.draw(cuts(tensors)), data.draw(cuts(tensors))
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder) / "out", tensors, n, held)
        for mine, _ in imported(Path(folder) / "out", tensors, m, wanted):
            assert not differences(tensors, mine)


EXTRA = {"step": 3, "plain": [1, 2], "deep": {"none": None, "list": [{"a": 1.5}, {"b": "é"}]}, "empty": {}}


def test_extra_data_goes_both_ways(tmp_path):
    export(tmp_path / "out", PLAIN, 2, HALVES, EXTRA)
    assert imported(tmp_path / "out", PLAIN)[0][1] == EXTRA
    state = {"extra": {"step": 0, "plain": [], "deep": {"none": 1, "list": [{"a": 0}, {"b": 0}]}}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["extra"] == {k: v for k, v in EXTRA.items() if k != "empty"}
    dcp.save({**nested(PLAIN, lambda t: t), "extra": EXTRA}, checkpoint_id=tmp_path / "in", no_dist=True)
    assert imported(tmp_path / "in", PLAIN)[0][1] == {k: v for k, v in EXTRA.items() if k != "empty"}


def test_torchs_own_state_dicts_of_model_and_optimizer(tmp_path):
    def train(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = train(2)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=tmp_path / "in", no_dist=True)
    tensors = {"parameters": {n: p.detach() for n, p in model.named_parameters()}}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        tensors[kind] = {n: optimizer.state[p][kind] for n, p in model.named_parameters()}
    assert not differences(tensors, imported(tmp_path / "in", tensors)[0][0])

    export(tmp_path / "out", tensors)
    other_model, other = train(1)
    state = dict(zip(("model", "optim"), get_state_dict(other_model, other)))
    state["optim"] = {"state": state["optim"]["state"]}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        for name, value in tensors[kind].items():
            assert torch.equal(state["optim"]["state"][name][kind], value)


def test_torchs_converter_reads_an_export(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    export(tmp_path / "out", PLAIN, 2, HALVES, {"step": 3})
    dcp_to_torch_save(tmp_path / "out", tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    assert state["extra"] == {"step": 3} and state["model"].keys() == {"w", "b"}


def test_an_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    left = tmp_path / ".out.emu-left"
    left.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StateError, match="Input/output error"):
            export(tmp_path / "out", PLAIN, 2, HALVES)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    export(tmp_path / "out", PLAIN)
    with pytest.raises(StateError, match="is there already"):
        export(tmp_path / "out", PLAIN)
    assert not differences(PLAIN, imported(tmp_path / "out", PLAIN)[0][0])


def test_two_tensors_of_one_place_are_refused(tmp_path):
    def program(rank):
        export_dcp(tmp_path / "out", rank, pieces(rank, PLAIN, everything(PLAIN)), key=lambda kind, name: ("x",))

    with pytest.raises(StateError, match="two tensors would be called x"):
        emu.launch(program, emu.Mesh(dp=1))
    assert not list(tmp_path.iterdir())


WRONG = {
    r"lacks model.v; it holds model.b, model.w": {"v": torch.ones(2)},
    r"model.w is \[6, 5\] there and \[5, 6\] here": {"w": torch.ones(5, 6)},
    r"model.w is torch.float32 there and torch.float64 here": {"w": torch.ones(6, 5, dtype=torch.float64)},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, message):
    export(tmp_path / "out", PLAIN)
    with pytest.raises(StateError, match=message) as caught:
        imported(tmp_path / "out", {"parameters": WRONG[message]}, 1)
    assert caught.value.hint


def test_a_key_says_where_tensors_stand_and_dtypes_are_converted_when_asked(tmp_path):
    dcp.save({"net": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    wanted = {"parameters": {"w": torch.ones(6, dtype=torch.float64)}}

    def program(rank):
        return importing(
            rank, tmp_path / "in", wanted, everything(wanted), key=lambda kind, name: ("net", name), convert=True
        )

    mine, _ = emu.launch(program, emu.Mesh(dp=1)).results[0]
    assert torch.equal(mine["parameters"][0].tensor, torch.arange(6.0).double())
