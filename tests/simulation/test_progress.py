"""A simulation tells how much will run, and moves on with every pass of a microbatch through a layer."""

from __future__ import annotations

from typing import Any

import pytest

from emu.cli import main
from emu.parallel import Plan
from emu.simulation import program, simulate

from .small import LLAMA, MOE

CASES: list[tuple[Any, str, dict[str, Any], int, int]] = [  # ranks that run, and passes: each 4 layers, or 2 of them
    (LLAMA, "dp=2", {}, 1, 4 * (1 + 1)),  # one microbatch in either step
    (LLAMA, "dp=2,pp=2", {"microbatches": 4, "global_batch": 8}, 2, 2 * 2 * (4 + 1)),
    (LLAMA, "pp=2", {"schedule": "dualpipe", "microbatches": 8, "global_batch": 8}, 2, 2 * 2 * (8 + 2)),
    (MOE, "dp=2,cp=2", {"ep": 2}, 4, 4 * 4 * 2),
    (LLAMA, "dp=2", {"checkpoint": "full", "zero": 3, "microbatches": 2, "global_batch": 8}, 1, 4 * (2 + 1)),
    (LLAMA, "tp=2", {"checkpoint": "selective", "sp": True}, 1, 4 * 2),
    (LLAMA, "pp=2", {"checkpoint": "every:2", "microbatches": 4, "global_batch": 8}, 2, 2 * 2 * (4 + 1)),
]


@pytest.mark.parametrize(("config", "mesh", "more", "ranks", "passes"), CASES)
def test_every_pass_through_a_layer_is_told_once(
    config: Any, mesh: str, more: dict[str, Any], ranks: int, passes: int
) -> None:
    seen: list[tuple[int, int]] = []
    words: list[str] = []
    plan = Plan(mesh, **{"seq": 32, **more})
    run = simulate(config, plan, "h100-8", progress=lambda *at: seen.append(at), starting=words.append)
    # No pass is told at the end only, and what backward computes again is not counted.
    assert seen == [(done, passes) for done in (*range(passes + 1), passes)]
    assert words == [f"{ranks} of {run.mesh.size} ranks run, {passes} passes of microbatches through layers"]


def test_telling_changes_nothing_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("dp=2,pp=2", seq=32, microbatches=4, global_batch=8, zero=1, checkpoint="full")
    told = simulate(LLAMA, plan, "h100-8")
    monkeypatch.setattr(program, "layers_of", lambda model: [])
    assert simulate(LLAMA, plan, "h100-8").trace == told.trace


def test_a_long_run_says_so_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["simulate", "--model", "gpt-tiny", "--cluster", "h100-8", "--mesh", "dp=2", "--json"]
    with pytest.raises(SystemExit):
        main(argv)
    short = capsys.readouterr()
    assert "passes" not in short.err
    monkeypatch.setattr("emu.commands.simulate.LONG", 3)
    with pytest.raises(SystemExit):
        main(argv)
    long = capsys.readouterr()
    assert long.out == short.out
    assert long.err == "1 of 2 ranks run, 8 passes of microbatches through layers\n"
