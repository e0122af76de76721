"""What `until` waits for: names, scopes, phases, marks, ranks, functions of the step; and what it says if that never comes."""

from __future__ import annotations

import pytest
import torch
from step.stepped import MESH, ring, training
from torch import nn

import emu
from emu import EmuError


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("all_reduce", lambda op: op.name == "all_reduce"),
        ("dp.all_reduce", lambda op: op.label == "dp.all_reduce"),
        ("dp.*", lambda op: op.group == "dp"),
        ("begin", lambda op: op.kind == "mark" and op.name == "begin"),
        ("mark begin", lambda op: op.kind == "mark"),
        ("*addmm", lambda op: op.name == "addmm"),
        ("backward", lambda op: op.phase == "backward"),
        ("optimizer", lambda op: op.phase == "optimizer"),
        ("model.0", lambda op: op.scope == "model.0"),
        ("model", lambda op: op.scope.startswith("model")),
        ("model.*", lambda op: op.scope.startswith("model.")),
        ("fused", lambda op: op.kind == "kernel" and op.name == "fused"),
        ("wait", lambda op: op.kind == "wait"),
        ("event", lambda op: op.kind == "event"),
        ("rank 3", lambda op: op.rank == 3),
        (2, lambda op: op.rank == 2),
        (lambda op: "float32[8, 6]" in op.detail, lambda op: "float32[8, 6]" in op.detail),
    ],
)
def test_it_stands_before_the_first_step_of_that_kind(what, found):
    with emu.step(training, MESH) as s:
        start = s.index
        s.until(what)
        assert found(s.op) and not any(found(op) for op in s.history.ops[start + 1 : s.index])


def test_it_goes_on_to_the_next_one_each_time():
    with emu.step(training, MESH) as s:
        seen = [s.until("mark *").index for _ in range(4)]
        assert seen == sorted(set(seen)) and all(s.history.ops[i].kind == "mark" for i in seen)


def test_a_scope_is_reached_when_it_is_entered_and_not_at_every_step_in_it():
    def blocks(rank):
        layer = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
        rank.watch(layer, "block")
        x = torch.ones(1, 2)
        for _ in range(3):
            x = layer(x)
            x = x + 1
        return x

    with emu.step(blocks, emu.Mesh(dp=1)) as s:
        entered = [s.until("block").index for _ in range(3)]
        assert all(s.history.ops[i].scope == "block.0" and s.history.ops[i - 1].scope == "" for i in entered)
        with pytest.raises(EmuError, match="ended before 'block'"):
            s.until("block")


def test_what_never_comes_names_what_is_near():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        with pytest.raises(EmuError, match="the program ended before 'all_redcue'") as caught:
            s.until("all_redcue")
        assert "all_reduce" in caught.value.hint and s.ended
        s.goto(0)
        with pytest.raises(EmuError, match="what was asked for"):
            s.until(lambda op: False)


def test_a_mistake_in_the_function_is_the_callers():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        with pytest.raises(ZeroDivisionError):
            s.until(lambda op: 1 // 0)
        assert s.error is None and s.until("all_reduce").op.name == "all_reduce"


@pytest.mark.parametrize("what", ["", None, 1.5, True, ["all_reduce"]])
def test_what_is_none_of_these_is_refused(what):
    with emu.step(ring, emu.Mesh(dp=2)) as s, pytest.raises(EmuError, match="names nothing to wait for"):
        s.until(what)


def test_a_rank_that_is_not_there_is_refused():
    with emu.step(ring, emu.Mesh(dp=2)) as s, pytest.raises(EmuError, match="no rank 2"):
        s.until(2)
