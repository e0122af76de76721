"""A checkpoint that somebody made up and sealed: what it says of the optimizer is looked at before anything is taken over."""

from __future__ import annotations

import pytest
import torch

import emu
from emu.parallel.state import StateError, load

from .test_damage import _set, sealed_as
from .training import made, saves

HOW, KIND = {"zero": 1}, "AdamW"


@pytest.fixture
def path(tmp_path):
    emu.launch(saves, emu.Mesh(dp=2), args=(HOW, KIND, 1, tmp_path / "c"))
    return tmp_path / "c"


def loaded(path):
    """Loads into another training on two ranks; returns every rank's error, or None."""

    def state(dist, optimizer):
        tensors = [p.tensor for some in (dist.pieces(), *optimizer.pieces().values()) for p in some]
        return [t.clone() for t in tensors], repr(optimizer.torch.param_groups)

    def program(rank):
        dist, optimizer = made(rank, HOW, KIND, seed=7)
        before, groups = state(dist, optimizer)
        try:
            load(path, dist, optimizer)
        except StateError as error:
            after, groups_after = state(dist, optimizer)
            assert groups == groups_after and all(map(torch.equal, before, after))
            return str(error)
        assert not all(map(torch.equal, before, state(dist, optimizer)[0]))
        return None

    return emu.launch(program, emu.Mesh(dp=2)).results


def option(key, to):
    return _set("extra", "optimizer", "groups", 0, key, to=to)


STRANGE = {
    "a number": _set("extra", "optimizer", to=5),
    "no groups": _set("extra", "optimizer", to={}),
    "None as groups": _set("extra", "optimizer", "groups", to=None),
    "text as groups": _set("extra", "optimizer", "groups", to="x"),
    "too few groups": _set("extra", "optimizer", "groups", to=[]),
    "a group that is none": _set("extra", "optimizer", "groups", to=[3]),
    "a group with parameters": _set("extra", "optimizer", "groups", to=[{"params": "x"}]),
    "a text as rate": option("lr", "x"),
    "no rate": option("lr", None),
    "a list as rate": option("lr", [0.1]),
    "one beta": option("betas", {"tuple": [0.9]}),
    "betas that are none": option("betas", {"tuple": ["a", {}]}),
    "a tuple of no list": option("betas", {"tuple": 5}),
    "a tensor of another thing": option("lr", {"tensor": "x", "dtype": "float32"}),
    "a tensor of no dtype": option("lr", {"tensor": 1.0, "dtype": "save"}),
    "a tensor of half a form": option("new", {"tensor": 1.0}),
    "a dict": option("new", [{"a": 1}]),
    "a scale that is none": _set("extra", "optimizer", "scale", to=3),
    "a scale of text": _set("extra", "optimizer", "scale", to={"value": "x", "since": 0}),
    "a scale below zero": _set("extra", "optimizer", "scale", to={"value": -1.0, "since": 0}),
    "other fields": _set("extra", to=5),
}


@pytest.mark.parametrize("what", STRANGE)
def test_plain_data_that_was_made_up_is_refused_before_anything_changes(path, what):
    sealed_as(path, STRANGE[what])
    first, second = loaded(path)
    assert first == second and str(path) in first


FINE = {
    "nothing": lambda index: None,
    "a rate of a schedule": option("initial_lr", 0.5),
    "a rate that is a tensor": option("lr", {"tensor": 0.25, "dtype": "float32"}),
    "a whole number as rate": option("lr", 1),
    "a scale": _set("extra", "optimizer", "scale", to={"value": 8.0, "since": 3}),
}


@pytest.mark.parametrize("what", FINE)
def test_plain_data_that_fits_is_taken(path, what):
    """Negative control: it is neither the sealing nor the change that is refused above."""
    sealed_as(path, FINE[what])
    assert loaded(path) == [None, None]
