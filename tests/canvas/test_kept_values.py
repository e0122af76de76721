"""What a file keeps of tensors and collectives is what the stepper shows; what it does not keep, it says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from canvas.reader import Reader, carried
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import MESH, ring, steppers_threads, stuck, to_end, training, wrong

import emu
from emu import EmuError, testing
from emu.stepping import WentAnotherWay
from emu.stepping.keeping import recorded
from emu.stepping.values import plain_values


def alike(kept: Any, t: torch.Tensor) -> bool:
    """Whether plain values are a tensor's, bit for bit in its own dtype; but for the sign of zero and of NaN."""
    if t.dtype == torch.bool or not t.dtype.is_floating_point:
        return kept == t.tolist()
    dtype = np.float64 if t.dtype == torch.float64 else np.float32
    found = np.asarray(kept, dtype=object).astype(dtype).reshape(tuple(t.shape))
    return np.array_equal(found, t.to(torch.float64).numpy().astype(dtype), equal_nan=True)


def agree(record: Any, s: emu.Stepper, every: int) -> None:
    reader = Reader(carried(record.whole()))
    for index in range(0, reader.head["known"] + 1, every):
        moment = s.at(index)
        for rank in s.history.ranks:
            kept, held = reader.tensors(rank, index), moment.rank(rank).tensors()
            assert {name: about for name, (about, _) in kept.items()} == {
                name: {key: value for key, value in each.as_dict().items() if key != "name"}
                for name, each in held.items()
            }, (index, rank)
            for name, (about, values) in kept.items():
                if values is not None:
                    assert alike(values, moment.rank(rank).tensor(name)), (index, rank, name)
                else:
                    assert about["bytes"] == 0 or int(np.prod(about["shape"])) > 1024, (index, rank, name)


PROGRAMS = [(training, MESH), (ring, emu.Mesh(dp=3)), (stuck, emu.Mesh(dp=2)), (wrong, emu.Mesh(dp=2))]


@pytest.mark.parametrize("program", PROGRAMS, ids=["training", "ring", "stuck", "wrong"])
def test_tensors_at_every_step_are_those_that_are_held(program):
    with emu.step(*program) as s:
        agree(recorded(s), s, 41 if program[0] is training else 3)


def in_shards(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    dist = emu.DataParallel(model, rank, zero=3)
    dist(torch.ones(2, 4)).sum().backward()
    return dist


def test_parameters_that_are_whole_only_for_a_while_have_values_only_then():
    with emu.step(in_shards, emu.Mesh(dp=2)) as s:
        agree(recorded(s), s, 7)


@settings(max_examples=6)
@given(testing.programs(max_ranks=4))
def test_tensors_of_any_program_are_those_that_are_held(written):
    with emu.step(written.program, written.mesh) as s:
        agree(recorded(s), s, 19)


def test_a_collective_is_kept_chunk_by_chunk_by_every_algorithm():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        reader = Reader(carried(recorded(s).whole()))
        to_end(s)
        first = s.history.ops.index(next(op for op in s.history.ops if op.kind == "collective"))
        assert reader.walks(first) is None
        walks = reader.walks(len(s.history))
        assert walks is not None and next(iter(walks)) == "ring" and set(walks) == {"ring", "tree", "group order"}
        for algorithm, walk in walks.items():
            real = s.at(len(s.history) - 1).collective(algorithm)
            assert [hop["says"] for hop in walk["hops"]] == [hop.says for hop in real]
            assert walk["cuts"] == list(real.cuts)
            for hop, shown in zip(real, walk["hops"], strict=True):
                assert all(alike(shown["held"][str(rank)], x) for rank, x in hop.held.items())
                for move, drawn in zip(hop.moves, shown["moves"], strict=True):
                    assert (drawn["src"], drawn["dst"], drawn["does"]) == (move.src, move.dst, move.does)
                    assert alike(drawn["values"], move.values)


@pytest.mark.parametrize("budget", [0, 4000])
def test_values_fit_a_budget_and_what_is_left_out_is_said(budget):
    with emu.step(training, MESH) as s:
        whole, part = recorded(s).whole(), recorded(s, budget_bytes=budget).whole()
        values = sum(len(json.dumps(each)) for each in part["values"])
        walks = sum(len(json.dumps(walk)) for step in part["walks"].values() for walk in step.values())
        assert values <= budget / 2 and walks <= budget / 2
        assert any("tensors from step" in note for note in part["notes"])
        a, b = Reader(carried(whole)), Reader(carried(part))
        for index in (0, 100, 300):
            assert {n: about for n, (about, _) in a.tensors(0, index).items()} == {
                n: about for n, (about, _) in b.tensors(0, index).items()
            }


def test_large_tensors_and_shapes_alone_have_no_values_and_that_is_said():
    def program(rank):
        large = torch.zeros(9000)
        rank.group("dp").all_reduce(large)
        return large

    with emu.step(program, emu.Mesh(dp=2)) as s:
        notes = recorded(s).notes
        assert any("more than 1,024 elements" in note for note in notes) and any(
            "chunk by chunk" in note for note in notes
        )
    with emu.step(training, MESH, backend="shape") as s:
        record = recorded(s).whole()
        assert any("shapes alone" in note for note in record["notes"])


def test_recording_leaves_the_stepper_where_it_is():
    before = steppers_threads()
    with emu.step(training, MESH) as s:
        s.next(50)
        shown, known = s.rank(1).state(), s.rank(1).tensors()
        record = recorded(s)
        assert s.index == 50 and record.ended and record.known == len(s.history)
        assert s.rank(1).state(times=False) == {**shown, "host_s": None, "streams": s.rank(1).state(False)["streams"]}
        assert s.rank(1).tensors() == known
        s.next(10**6)
        results = s.results
    assert [t.name for t in steppers_threads()] == [t.name for t in before]
    run = emu.launch(training, MESH)
    assert all(torch.equal(a, b) for r in range(4) for a, b in zip(results[r][0], run.results[r][0]))


def test_a_closed_stepper_keeps_what_it_has_seen():
    with emu.step(training, MESH) as s:
        s.next(20)
    record = recorded(s)
    assert 20 <= record.known < 30 and not record.ended and any("closed" in note for note in record.notes)


def test_a_program_that_goes_another_way_when_it_runs_again_is_told():
    runs = []

    def strays(rank):
        if rank == 0:
            runs.append(1)
        x = torch.ones(2)
        return x + 1 if len(runs) == 1 else x.exp()

    with emu.step(strays, emu.Mesh(dp=1)) as s:
        s.next(2)
        with pytest.raises(WentAnotherWay):
            recorded(s)


@given(
    st.lists(st.floats(width=32), min_size=0, max_size=20),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_numbers_are_kept_to_the_last_bit(numbers, dtype):
    t = torch.tensor(numbers).to(dtype)
    kept = carried({"": plain_values(t)})[""]
    assert alike(kept, t)


def put_off(rank):
    """Tensors that torch conjugates, negates and zeroes only once they are used, beside those that they are views of."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, minus = z.conj(), z.conj().imag
    plus, nothing = z.imag.clone(), torch._efficientzerotensor(2)
    held = rank.group("dp").all_reduce(torch.ones(2))
    return z, conjugate, minus, plus, nothing, held


def test_values_that_torch_puts_off_are_those_that_are_read():
    with emu.step(put_off, emu.Mesh(dp=2)) as s:
        reader = Reader(carried(recorded(s).whole()))
        to_end(s)
        at = next(i for i, op in enumerate(s.history.ops) if op.kind == "collective")
        held = {name: value for name, (_, value) in reader.tensors(0, at).items()}
        assert held["z"] == ["(1+2j)", "(3-4j)"] and held["conjugate"] == ["(1-2j)", "(3+4j)"]
        assert held["minus"] == [-2.0, 4.0] and held["plus"] == [2.0, -4.0] and held["nothing"] == [0.0, 0.0]
        assert plain_values(s.at(at).rank(0).tensor("minus")) == [-2.0, 4.0]


def test_numbers_that_are_not_in_json_are_text():
    assert plain_values(torch.tensor([float("nan"), float("inf"), -float("inf")])) == ["NaN", "Infinity", "-Infinity"]
    assert plain_values(torch.tensor([2**60, 3])) == [str(2**60), 3]
    assert plain_values(torch.tensor([True, False])) == [True, False]
    assert plain_values(torch.tensor([0.1, 1 / 3])) == [0.1, 0.33333334]
    assert plain_values(torch.tensor(1 + 2j)) == "(1+2j)"
    assert plain_values(torch.zeros(3), most=2) is None


def test_a_budget_that_is_no_size_is_refused(tmp_path):
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        for budget in (-1, 1.5, True):
            with pytest.raises(EmuError, match="budget"):
                s.save_html(tmp_path / "page.html", budget_bytes=budget)  # type: ignore[arg-type]
