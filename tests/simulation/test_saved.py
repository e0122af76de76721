"""A simulated step that is saved, or priced elsewhere, keeps for how many ranks each one stands that ran."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import emu
from emu.cost import Metrics
from emu.parallel import Plan
from emu.simulation import Simulated, simulate
from emu.spmd import EmuError

from .small import LLAMA, cluster

OF_ALL = ("mfu", "hfu", "kernel_hfu", "tflops_per_device", "busy_fraction", "energy_j", "step_time_s")


def uneven(all_ranks: bool = False) -> Simulated:
    """Of 3, 2 and 2 sequences along dp: ranks that ran stand for one or for more."""
    plan = Plan("dp=3,tp=2", global_batch=7, seq=32, zero=1)
    return simulate("gpt-tiny", plan, "h100-8", all_ranks=all_ranks)


def close(some: Metrics, others: Metrics) -> bool:
    return all(getattr(some, key) == pytest.approx(getattr(others, key), rel=1e-12) for key in OF_ALL)


def test_a_loaded_step_has_the_figures_of_all_ranks(tmp_path: Path) -> None:
    run = uneven()
    assert 1 < len(run.trace.ranks) < run.mesh.size
    run.save(tmp_path / "step")
    back = emu.Run.load(tmp_path / "step")
    assert close(back.metrics, run.metrics) and close(back.metrics, uneven(all_ranks=True).metrics)
    unweighted = emu.cost.price(run.trace, run.cluster, run.launch_mode).metrics()
    assert unweighted.mfu > 1.01 * run.metrics.mfu  # the negative control: weights matter here
    assert f"{len(run.trace.ranks)} of 6 ranks ran" in repr(back)
    for rank in run.trace.ranks:  # what it held before the step began counts, too
        assert back.memory.series(rank) == run.memory.series(rank)
    assert back.metrics.peak_hbm_bytes == [run.memory.peak_bytes(rank) for rank in run.trace.ranks]
    back.save(tmp_path / "again")
    assert close(emu.Run.load(tmp_path / "again").metrics, run.metrics)


def test_a_part_of_it_and_what_if_weigh_alike() -> None:
    some, everyone = uneven(), uneven(all_ranks=True)
    assert close(some.without("dp.*").metrics, everyone.without("dp.*").metrics)
    a100s = emu.cluster("a100-8")
    assert close(some.timeline(a100s).metrics(), everyone.timeline(a100s).metrics())


def test_where_groups_lie_otherwise_it_is_not_priced(tmp_path: Path) -> None:
    plan = Plan("pp=2,dp=2,tp=3", global_batch=4, microbatches=2, seq=36)
    shape = emu.models.Config(layers=2, width=48, heads=6, ffn=96, vocab=66, seq=36)
    (tmp_path / "file").mkdir()
    on, other = cluster(tmp_path, nodes=2, devices=12), cluster(tmp_path / "file", nodes=4, devices=4)
    run = simulate(shape, plan, on)
    assert len(run.trace.ranks) < run.mesh.size
    run.save(tmp_path / "step")
    with pytest.raises(EmuError, match=r"what ran on .* is of 2 ranks that stand for all 12;.*\n.*all_ranks=True"):
        run.timeline(other)
    with pytest.raises(EmuError, match=r"step is of 2 ranks that stand for all 12;.*\n.*all_ranks=True"):
        emu.Run.load(tmp_path / "step", on=other)
    assert emu.Run.load(tmp_path / "step", on=on).metrics.mfu == run.metrics.mfu
    assert simulate(shape, plan, on, all_ranks=True).timeline(other).step_time_s > 0  # every rank is there


def test_on_other_nodes_in_which_groups_lie_alike_it_is_priced() -> None:
    run, sixteen = simulate(LLAMA, Plan("dp=4,tp=2", seq=32), "h100-8"), emu.cluster("a100-16")
    everyone = simulate(LLAMA, Plan("dp=4,tp=2", seq=32), "h100-8", all_ranks=True)
    assert close(run.timeline(sixteen).metrics(), everyone.timeline(sixteen).metrics())


def test_what_is_reserved_is_of_the_fullest_stage() -> None:
    wide = replace(LLAMA, layers=3, width=512, heads=8, ffn=4096)  # two layers on one stage, one on the other
    metrics = simulate(wide, Plan("pp=2", seq=32, microbatches=2), "h100-8").metrics
    peaks = metrics.peak_hbm_bytes
    assert peaks is not None and 1.5 * min(peaks) < max(peaks) <= metrics.reserved_hbm_bytes


def too_many(head: dict[str, Any]) -> None:
    head["standing"]["counts"]["0"] += 1


def of_nobody(head: dict[str, Any]) -> None:
    head["standing"]["counts"]["99"] = 1


def no_number(head: dict[str, Any]) -> None:
    head["standing"]["counts"]["0"] = "1"


def no_table(head: dict[str, Any]) -> None:
    head["standing"] = 3


def less_than_nothing(head: dict[str, Any]) -> None:
    head["held"]["0"]["parameters"] = -1


def unknown_memory(head: dict[str, Any]) -> None:
    head["held"]["0"]["spam"] = 1


def no_bytes(head: dict[str, Any]) -> None:
    head["held_by_host"] = [0]


@pytest.mark.parametrize(
    "damage", [too_many, of_nobody, no_number, no_table, less_than_nothing, unknown_memory, no_bytes]
)
def test_a_file_that_says_it_wrongly_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], None]) -> None:
    path = tmp_path / "step"
    simulate(LLAMA, Plan("dp=2", seq=16), "h100-8").save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    head = json.loads(parts["run.json"])
    damage(head)
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in {**parts, "run.json": json.dumps(head).encode()}.items():
            archive.writestr(name, part)
    with pytest.raises(EmuError, match="cannot be read as a saved run"):
        emu.Run.load(path)
