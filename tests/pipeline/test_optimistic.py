"""Steps of a pipeline that nobody waits for: the next batch's first forwards run before the last step is known to hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.equivalence.compare import whole_results
from emu.models import Decoder
from emu.models.config import Config
from emu.parallel import Pipeline
from emu.parallel.optimistic import OptimisticStep
from emu.parallel.pipeline.lowering import lowered
from emu.parallel.pipeline.running.executor import may_start_again, warm_up_of
from emu.parallel.pipeline.schedules import SCHEDULES, make

CONFIG = Config(layers=4, width=8, heads=2, vocab=16, seq=4, tied=True)
STEPS = 3


DRAWN = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randint(0, 16, (4, 4), generator=DRAWN), torch.randint(0, 16, (4, 4), generator=DRAWN)) for _ in range(STEPS)
]


def train(rank: emu.Rank, schedule: str, microbatches: int, clip: float, optimistic: bool) -> dict[str, object]:
    pipe = Pipeline(Decoder(CONFIG), rank, "dp", schedule=schedule, microbatches=microbatches, zero=1)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05, clip=clip)
    optimist = OptimisticStep(optimizer) if optimistic else None
    losses, stale = [], 0
    for batch in BATCHES:
        losses.append(pipe.backward(batch, optimist=optimist))
        if optimist is None:
            optimizer.step()
        else:
            stale += optimist.stale
            optimist.step()
    if optimist is not None:
        optimist.validate()
    return {"losses": torch.stack(losses), "parameters": pipe.gather_parameters(), "stale": str(stale)}


@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h2", "zb-v", "interleaved"]),
    st.sampled_from([1, 2]),
    st.integers(1, 5),
    st.sampled_from([0.3, 3.0, 100.0]),
    st.sampled_from(["program", 0, 7]),
)
@settings(max_examples=12, deadline=None)
def test_steps_in_advance_end_in_the_same_bits(schedule, dp, microbatches, clip, order):
    mesh = emu.Mesh(pp=2, dp=dp)
    there = emu.launch(train, mesh, args=(schedule, microbatches, clip, False))
    here = emu.launch(train, mesh, args=(schedule, microbatches, clip, True), order=order)
    ours, theirs = whole_results(here.results, mesh), whole_results(there.results, mesh)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if clip != 3.0:
        assert {result["stale"] for result in here.results} == {"2" if clip < 1 else "0"}


def test_forwards_that_were_not_done_again_are_noticed(monkeypatch):
    """The control: a warm-up with parameters that were taken back gives other losses."""
    mesh = emu.Mesh(pp=2, dp=1)
    monkeypatch.setattr(OptimisticStep, "stale", property(lambda self: False, lambda self, value: None), raising=False)
    run = emu.launch(train, mesh, args=("1f1b", 4, 0.3, False))
    with pytest.raises((emu.EmuError, AssertionError)):
        wrong = emu.launch(train, mesh, args=("1f1b", 4, 0.3, True))
        assert torch.equal(run.results[0]["losses"], wrong.results[0]["losses"])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_a_warm_up_has_forwards_alone_and_may_start_again(name):
    schedule = lowered(make(name, 4, 8))
    assert may_start_again(schedule.rows)
    for row in schedule.rows:
        kinds = {part.kind for action in row[: warm_up_of(row)] for part in action.each()}
        assert "F" in kinds and not kinds & {"B", "I", "W"}


def test_no_stage_waits_between_two_steps():
    """ZB-H2 is a parallelogram: the first stage ends first, and goes on. A norm that all wait for makes it wait."""
    config = Config(layers=4, width=512, heads=4, vocab=64, seq=512)
    data = emu.Batch(*(torch.zeros(8, 512, dtype=torch.long, device="meta") for _ in range(2)), tokens=8 * 512)

    def program(rank: emu.Rank, optimistic: bool) -> None:
        with torch.device(rank.device):
            model = Decoder(config)
        pipe = Pipeline(model, rank, schedule="zb-h2", microbatches=8)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, clip=1.0)
        optimist = OptimisticStep(optimizer) if optimistic else None
        for _ in range(3):
            pipe.backward(data, optimist=optimist)
            optimizer.step() if optimist is None else optimist.step()
        if optimist is not None:
            optimist.validate()

    mesh = emu.Mesh(pp=4)
    took = [
        emu.launch(program, mesh, backend="shape", launch_mode="graph", args=(o,)).metrics.step_time_s
        for o in (False, True)
    ]
    assert took[1] < took[0]
