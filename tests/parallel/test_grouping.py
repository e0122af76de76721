"""What travels together: buckets by bytes, and units by module; every parameter is in one of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import emu
from emu.models import GPT
from emu.parallel.grouping import buckets, units

from . import training
from .programs import SMALL
from .training import Mlp

sizes = st.lists(st.integers(1, 50), max_size=12)


def of_sizes(some, dtype=torch.float32):
    return {f"p{i}": nn.Parameter(torch.zeros(n, dtype=dtype)) for i, n in enumerate(some)}


def assert_bucketed(parameters, found, least_bytes):
    """Backward order, nothing lost, no bucket larger than it must be and none but the last smaller than asked for."""
    assert [name for bucket in found for name in bucket] == list(reversed(parameters))
    for i, bucket in enumerate(found):
        held = [parameters[name].numel() * parameters[name].element_size() for name in bucket]
        assert bucket and sum(held[:-1]) < least_bytes
        assert sum(held) >= least_bytes or i == len(found) - 1


@given(sizes, st.integers(1, 400), st.sampled_from([torch.float32, torch.bfloat16]))
@example([], 10, torch.float32)
@example([10, 10], 40, torch.float32)  # a bucket is full to the byte
def test_buckets_are_in_backward_order_and_as_small_as_they_may_be(some, least_bytes, dtype):
    parameters = of_sizes(some, dtype)
    assert_bucketed(parameters, buckets(parameters, least_bytes), least_bytes)


def test_buckets_in_forward_order_or_counted_in_elements_are_seen():
    parameters = of_sizes([10, 20, 30])
    right = buckets(parameters, 50)
    assert_bucketed(parameters, right, 50)
    in_elements = [["p2", "p1"], ["p0"]]  # 30 + 20 elements make 50, but these are 200 bytes
    for wrong in (right[::-1], in_elements, right[:-1]):
        with pytest.raises(AssertionError):
            assert_bucketed(parameters, wrong, 50)


class Nested(nn.Module):
    """Lists within lists, an empty entry, a parameter of its own, and one that two blocks share."""

    def __init__(self, shared=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stack = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2), nn.Tanh()])
        self.body = nn.Module()
        self.body.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        if shared:
            self.body.layers[1].weight = self.stack[1].weight


def test_units_are_the_entries_of_the_outermost_lists_and_what_is_left_is_the_models():
    found = {unit.path: unit.names for unit in units(Nested())}
    assert list(found) == ["", "stack.0", "stack.1", "body.layers.0", "body.layers.1"]
    assert found[""] == ["scale"]
    assert found["stack.0"] == ["stack.0.0.weight", "stack.0.0.bias"]


def test_a_parameter_of_several_units_is_the_models():
    found = {unit.path: unit.names for unit in units(Nested(shared=True))}
    assert found[""] == ["scale", "stack.1.weight"]
    assert found["stack.1"] == ["stack.1.bias"] and "body.layers.1" not in found  # nothing of its own is left


def test_a_matrix_that_the_head_shares_is_the_models_even_if_only_one_of_its_users_is_a_unit():
    model = GPT(replace(SMALL, tied=True), seed=0)
    for chosen in (["embedding"], ["embedding", "head"], ["embedding", "blocks.0", "head"]):
        assert "embedding.weight" in units(model, chosen)[0].names
    assert units(GPT(SMALL, seed=0), ["embedding"])[1].names == ["embedding.weight"]


@given(training.models, st.randoms(use_true_random=False))
def test_every_parameter_is_in_one_unit(made, random):
    model = made.model()
    paths = [path for path, module in model.named_modules() if path and any(True for _ in module.parameters())]
    chosen: list[str] = []
    for path in random.sample(paths, len(paths)):
        if not any((path + ".").startswith(c + ".") or (c + ".").startswith(path + ".") for c in chosen):
            chosen.append(path)
    for some in (None, chosen[: len(chosen) // 2], chosen):
        found = units(model, some)
        names = [name for unit in found for name in unit.names]
        assert sorted(names) == sorted(made.names())
        assert found[0].path == "" and found[0].module is model
        for unit in found[1:]:
            assert unit.names and all(name.startswith(unit.path + ".") for name in unit.names)
            assert all(
                any(p is q for q in unit.module.parameters()) for n, p in model.named_parameters() if n in unit.names
            )


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (["blocks.9"], r"no module of Decoder is called 'blocks.9'\n.*its modules are "),
        (["blocks.0", "nothing*"], "is called 'nothing\\*'"),
        (["blocks.*"], r"unit 'blocks\.0\..*' lies inside unit 'blocks\.0'\n.*do not contain each other"),
        (["blocks.0.mlp", "blocks.0"], r"unit 'blocks.0.mlp' lies inside unit 'blocks.0'"),
    ],
)
def test_units_that_cannot_be_are_told(chosen, says):
    with pytest.raises(emu.EmuError, match=says):
        units(GPT(SMALL, seed=0), chosen)


def test_a_path_that_begins_like_another_is_not_inside_it():
    model = nn.Module()
    model.a, model.ab = nn.Linear(1, 1), nn.Linear(1, 1)
    assert [unit.path for unit in units(model, ["a", "ab"])] == ["", "a", "ab"]
    assert [unit.path for unit in units(Mlp([2, 2, 2]))] == ["", "layers.0", "layers.1"]
