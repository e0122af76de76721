"""Wrong programs end with an error that says what is wrong, on every rank that is concerned, and never hang."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def told(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("wrong")
    done = launch("wrong.py", 2, directory)
    assert done.returncode == 0, done.output[-20000:]
    return [json.loads((directory / f"told{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("program", "field", "words"),
    [
        ("other_kind", "kind", ["all_reduce(float32[4], op=sum)", "broadcast(float32[4], root=0)", "number 1"]),
        ("other_shape", "shape", ["float32[4]", "float32[5]"]),
        ("other_dtype", "dtype", ["float32[4]", "float64[4]"]),
        ("other_op", "op", ["op=sum", "op=max"]),
        ("other_root", "root", ["root=0", "root=1"]),
        ("other_sizes", "sizes", ["sizes=[1, 3]", "sizes=[2, 2]"]),
        ("other_order", "name", ["name='a'", "name='b'"]),
    ],
)
def test_a_collective_that_differs_names_ranks_calls_and_lines(told: Any, program: str, field: str, words: Any) -> None:
    for rank in told:
        assert rank[program]["kind"] == "CollectiveMismatch"
        text = rank[program]["text"]
        assert f"in its {field}: rank 0 called" in text and "rank 1 called" in text and "(wrong.py:" in text
        assert all(word in text for word in words), text
        assert rank[program]["hint"] and rank[program]["seconds"] < 10


def test_splits_that_do_not_meet_name_the_pair(told: Any) -> None:
    for rank in told:
        assert rank["other_splits"]["kind"] == "CollectiveMismatch"
        assert "pair (1->0): rank 1 sent 1, rank 0 expected 1" not in rank["other_splits"]["text"]
        assert "(0->1)" in rank["other_splits"]["text"] or "(1->0)" in rank["other_splits"]["text"]


def test_halves_of_a_message_are_compared(told: Any) -> None:
    for rank in told:
        assert rank["other_message"]["kind"] == "CollectiveMismatch"
        assert "rank 0 sends float32[4]" in rank["other_message"]["text"]
        assert "rank 1 expects float32[3]" in rank["other_message"]["text"]


@pytest.mark.parametrize(("program", "operation"), [("leaves", "dp|world.all_reduce"), ("leaves_a_message", "recv")])
def test_a_rank_that_leaves_early_is_named(told: Any, program: str, operation: str) -> None:
    waits = told[0][program]
    assert waits["kind"] == "RankLeft" and "rank 1 finished while others still wait for it" in waits["text"]
    assert operation.split(".")[-1] in waits["text"] and "(wrong.py:" in waits["text"]
    assert waits["seconds"] < 10


@pytest.mark.parametrize("program", ["both_send", "two_orders", "other_members"])
def test_a_deadlock_is_found_within_seconds_and_shows_who_waits_for_whom(told: Any, program: str) -> None:
    assert "Deadlock" in {rank[program]["kind"] for rank in told}
    for rank in told:  # the slower one may find that the other has already given up
        assert rank[program]["kind"] in ("Deadlock", "RankLeft") and rank[program]["seconds"] < 10
    text = next(rank[program]["text"] for rank in told if rank[program]["kind"] == "Deadlock")
    assert "rank 0 waits in" in text and "for rank 1" in text and "rank 1 waits in" in text


def test_an_exception_ends_the_others_with_its_words(told: Any) -> None:
    for program in ("fails", "fails_late"):
        assert told[1][program]["kind"] == "KeyError"
        assert told[0][program]["kind"] == "RankLeft"
        assert "rank 1 failed" in told[0][program]["text"] and "no such token" in told[0][program]["text"]
        assert told[0][program]["seconds"] < 10


def test_a_mesh_of_another_size_is_refused_before_anything_runs(told: Any) -> None:
    for rank in told:
        assert rank["too_many_ranks"]["kind"] == "MeshError"
        assert "3 ranks" in rank["too_many_ranks"]["text"] and "2 processes" in rank["too_many_ranks"]["text"]
        assert "torchrun --nproc-per-node 3" in rank["too_many_ranks"]["hint"]


def test_a_slow_rank_is_not_wrong(told: Any) -> None:
    """Negative control: a wait that is only long ends well."""
    assert [rank["slow"]["kind"] for rank in told] == ["", ""]
    assert told[0]["slow"]["seconds"] > 1


def test_an_exception_in_one_process_ends_the_command_with_its_traceback(launch: Any) -> None:
    done = launch("fails.py", 3)
    assert done.returncode != 0
    assert "KeyError: 'b'" in done.output and "broken_line_of_rank_one = " in done.output
    assert "raised in rank Rank(1 of 3: dp=1)" in done.output
    assert done.seconds < 60
