"""A program that fails in the middle of a check: the error says where the tensors of that line were made."""

import sys

import pytest
import torch

import emu
from emu.equivalence import check
from emu.spmd import CollectiveError, CollectiveMismatch, Deadlock

MESH = emu.Mesh(tp=2)
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors carry notes since Python 3.11")


def notes(program, error=RuntimeError):
    with pytest.raises(error) as caught:
        check(program, MESH, lambda: {"x": torch.ones(2)})
    return [note for note in getattr(caught.value, "__notes__", []) if "was made by" in note], caught.traceback


def line_of(text):
    """ "test_failing.py:12", of the line of this file that has the text."""
    with open(__file__, encoding="utf-8") as file:
        return f"test_failing.py:{next(i for i, line in enumerate(file, 1) if line.strip().startswith(text))}"


def shapes_do_not_fit(rank):
    up = torch.ones(2, 5).split([3, 2], 1)[rank.group("tp").rank]
    down = (torch.ones(5, 2) * 2).split([4, 1])[rank.group("tp").rank]
    hidden = torch.ones(4, 2) @ up
    return {"x": hidden @ down}


def test_the_tensors_of_a_line_whose_shapes_do_not_fit_are_told_with_the_lines_that_made_them():
    (note,), _ = notes(shapes_do_not_fit)
    assert f"hidden [4, 3] was made by mm ({line_of('hidden = ')})" in note
    assert f"down [4, 2] was made by mul ({line_of('down = ')})" in note
    failing = line_of('return {"x": hidden')
    assert f"what is read at {failing}: " in note


def an_empty_piece(rank):
    down = (torch.ones(3, 2) * 2).split([3, 0])[1]
    return {"x": torch.ones(4, 1) @ down}


def test_an_empty_piece_was_made_with_the_whole_that_it_is_a_piece_of():
    (note,), _ = notes(an_empty_piece)
    assert "down [0, 2] was made by mul" in note


def gradients_do_not_fit(rank):
    weight = torch.ones(3 + rank, requires_grad=True)
    (weight * 2).sum().backward()
    rank.group("tp").all_reduce(weight.grad)


def test_gradients_and_calls_that_differ_between_ranks_are_told_too():
    (note,), _ = notes(gradients_do_not_fit, CollectiveMismatch)
    assert "weight.grad [4] was made by" in note


def wrong_sizes(rank):
    mine = torch.ones(2) * 3
    return rank.group("tp").all_gather(mine, sizes=[1, 3])


def test_a_call_that_cannot_be_right_is_told_with_what_made_its_tensor():
    (note,), _ = notes(wrong_sizes, CollectiveError)
    assert f"mine [2] was made by mul ({line_of('mine = ')})" in note


def never_meets(rank):
    if rank == 0:
        rank.group("tp").all_reduce(torch.ones(2))


def raises_alone(rank):
    raise ValueError("no tensor has a part in this")


def test_errors_that_name_their_lines_or_have_no_tensors_stay_as_they_are():
    """Negative control."""
    assert not notes(never_meets, Deadlock)[0] and not notes(raises_alone, ValueError)[0]
