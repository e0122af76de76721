"""State that was saved in one layout is the same, bit for bit, in any other."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import emu
from emu.parallel.state import Piece, StateError, load_state, save_state
from emu.trace.events import Collective, HostWait

from .layouts import cuts, differences, everything, load, pieces, random_bits, save, wholes

PLAIN = {"parameters": {"w": random_bits((6, 5), torch.float32, 0), "b": random_bits((3,), torch.float64, 1)}}
HALVES = {("parameters", "w"): [(0, 13, [0]), (13, 30, [1])], ("parameters", "b"): [(0, 3, [0, 1])]}
blocks = st.sampled_from([64, 128, 1 << 18])  # small ones, so that small tensors span some


@given(st.data(), wholes(), blocks, st.booleans())
def test_any_layout_loads_in_any_other_bit_for_bit(data, tensors, block_bytes, track):
    saved, wanted = data.draw(cuts(tensors)), data.draw(cuts(tensors))
    with tempfile.TemporaryDirectory() as folder, patch("emu.parallel.state.blocks.BLOCK_BYTES", block_bytes):
        save(folder, tensors, *saved, track=track)
        results = load(folder, tensors, *wanted, track=track)
    for mine, _ in results:
        assert not differences(tensors, mine)


def test_a_wrong_bit_would_be_seen(tmp_path):
    """Negative control of the comparison."""
    save(tmp_path, PLAIN)
    other = {"parameters": {**PLAIN["parameters"], "w": random_bits((6, 5), torch.float32, 7)}}
    assert differences(other, load(tmp_path, PLAIN)[0][0]) == ["parameters: w from 0"]


@given(st.data(), wholes())
def test_every_element_is_written_once(data, tensors):
    n, held = data.draw(cuts(tensors))
    with tempfile.TemporaryDirectory() as folder:
        save(folder, tensors, n, held)
        index = json.loads((Path(folder) / "emu-state.json").read_text())["index"]
        files = sorted(Path(folder).glob("save-*/*.safetensors"))
        assert len(files) == n
        stored = [t for file in files for name, t in load_file(file).items() if name != "random generators"]
    assert sum(t.nbytes for t in stored) == sum(t.nbytes for of_kind in tensors.values() for t in of_kind.values())
    for kind, of_kind in tensors.items():
        for name, whole in of_kind.items():
            shape, _, ranges = index["tensors"][kind][name]
            assert shape == list(whole.shape)
            assert [r[0] for r in ranges] == [0, *[r[1] for r in ranges[:-1]]][: len(ranges)]
            assert not ranges or ranges[-1][1] == whole.numel()


def test_replicas_are_written_by_the_lowest_rank_alone(tmp_path):
    save(tmp_path, PLAIN, 3, {("parameters", "w"): [(0, 30, [1, 2])], ("parameters", "b"): [(0, 3, [0, 1, 2])]})
    files = [load_file(f).keys() - {"random generators"} for f in sorted(tmp_path.glob("save-*/*"))]
    assert files == [{"parameters/b"}, {"parameters/w"}, set()]


def test_a_whole_tensor_is_an_ordinary_entry_of_a_safetensors_file(tmp_path):
    save(tmp_path, PLAIN)
    stored = load_file(tmp_path / "save-000001" / "rank-00000.safetensors")
    assert stored["parameters/w"].shape == (6, 5)
    assert torch.equal(stored["parameters/b"].view(torch.uint8), PLAIN["parameters"]["b"].view(torch.uint8))


def test_extra_data_and_the_mesh_come_back(tmp_path):
    extra = {"step": 3, "losses": [1.5, None], "name": "é"}
    save(tmp_path, PLAIN, 2, HALVES, extra)
    for _, loaded in load(tmp_path, PLAIN):
        assert loaded.extra == extra
        assert loaded.mesh["axes"] == {"dp": 2}


@pytest.mark.parametrize("extra", [{"t": (1, 2)}, {1: 2}, {"t": torch.ones(1)}, {"x": float("nan")}])
def test_extra_data_that_would_not_come_back_is_refused(tmp_path, extra):
    with pytest.raises(StateError, match="extra cannot be saved") as caught:
        save(tmp_path / "new", PLAIN, extra=extra)
    assert "lists and dicts" in caught.value.hint
    assert not (tmp_path / "new").exists()


def test_a_save_replaces_the_one_before_and_leaves_nothing_of_it(tmp_path):
    save(tmp_path, PLAIN, 2, HALVES)
    other = {"parameters": {"w": random_bits((2, 2), torch.float32, 3)}}
    save(tmp_path, other)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["emu-state.json", "rank-00000.safetensors", "save-000002"]
    assert not differences(other, load(tmp_path, other)[0][0])


def test_a_kind_that_nobody_asks_for_stays_in_the_file(tmp_path):
    save(tmp_path, {**PLAIN, "exp_avg": PLAIN["parameters"]})
    assert not differences(PLAIN, load(tmp_path, PLAIN)[0][0])


WANTED = {
    "lacks v": {"v": torch.ones(2), **PLAIN["parameters"]},
    "nobody asks for its b": {"w": PLAIN["parameters"]["w"]},
    r"w is \[6, 5\] there and \[5, 6\] here": {**PLAIN["parameters"], "w": torch.ones(5, 6)},
    "w is F32 there and BF16 here": {**PLAIN["parameters"], "w": torch.ones(6, 5, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("message", WANTED)
def test_state_of_another_model_is_refused_in_words_and_changes_nothing(tmp_path, message):
    save(tmp_path, PLAIN, 2, HALVES)
    wanted = {"parameters": WANTED[message]}
    mine = []

    def program(rank):
        mine.append(pieces(rank, wanted, {k: [(0, r[0][1], [0, 1])] for k, r in everything(wanted).items()}, fill=1))
        load_state(tmp_path, rank, mine[-1])

    with pytest.raises(StateError, match=message) as caught:
        emu.launch(program, emu.Mesh(dp=2), backend="virtual")
    assert caught.value.hint
    assert all((p.tensor == 1).all() for ps in mine for p in ps["parameters"])


def test_a_kind_that_was_not_saved_is_refused(tmp_path):
    save(tmp_path, PLAIN)
    with pytest.raises(StateError, match="has no exp_avg: it holds parameters"):
        load(tmp_path, {"exp_avg": PLAIN["parameters"]})


def test_dtypes_are_converted_only_when_asked(tmp_path):
    values = torch.randn(6, 5)
    save(tmp_path, {"parameters": {"w": values}})
    halves = {"parameters": {"w": torch.ones(6, 5, dtype=torch.bfloat16)}}

    def program(rank):
        mine = pieces(rank, halves, everything(halves))
        load_state(tmp_path, rank, mine, convert=True)
        return mine["parameters"][0].tensor

    assert torch.equal(emu.launch(program, emu.Mesh(dp=1)).results[0], values.flatten().bfloat16())
    with pytest.raises(StateError, match="other dtypes"):
        load(tmp_path, halves)


BAD = {
    "no piece": lambda: "w",
    "no kind": None,
    "has 4 elements": lambda: Piece("w", (2, 2), 2, torch.ones(3)),
    "one-dimensional": lambda: Piece("w", (2, 2), 0, torch.ones(2, 2)),
    "does not hold": lambda: Piece("w", (2,), 0, torch.ones(2, dtype=torch.complex128)),
    "no values": lambda: Piece("w", (2,), 0, torch.ones(2, device="meta")),
    "some elements of parameters: w": lambda: Piece("w", (2, 2), 1, torch.ones(3)),
}


@pytest.mark.parametrize("message", BAD)
def test_pieces_that_cannot_be_right_are_refused(tmp_path, message):
    def program(rank):
        made = BAD[message]
        save_state(tmp_path / "new", rank, {"parameters": [made()]} if made else {"a/b": []})

    with pytest.raises(StateError, match=message) as caught:
        emu.launch(program, emu.Mesh(dp=2), backend="virtual", track=False)
    assert caught.value.hint
    assert not (tmp_path / "new").exists()


def test_ranks_that_disagree_on_a_tensor_are_told(tmp_path):
    def program(rank):
        save_state(tmp_path, rank, {"parameters": [Piece("w", (2 + rank,), 0, torch.ones(2 + rank))]})

    with pytest.raises(StateError, match=r"'w' is F32\[3\] on rank 1, and F32\[2\] on a lower one"):
        emu.launch(program, emu.Mesh(dp=2), backend="virtual")


def test_the_record_shows_host_waits_and_named_communication(tmp_path):
    def program(rank):
        mine = pieces(rank, PLAIN, HALVES)
        save_state(tmp_path, rank, mine)
        load_state(tmp_path, rank, mine)

    events = emu.launch(program, emu.Mesh(dp=2), backend="virtual").trace.events[0]
    assert {e.name for e in events if isinstance(e, Collective)} == {"checkpoint"}
    assert any(isinstance(e, HostWait) for e in events)
