"""Steps of a pipeline that nobody waits for: the next batch's first forwards run before the last step is known to hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.equivalence.compare import whole_results
from emu.models import Decoder
from emu.models.config import Config
from emu.parallel import LossScale, Pipeline
from emu.parallel.optimistic import OptimisticStep
from emu.parallel.pipeline import Action, Schedule
from emu.parallel.pipeline.lowering import lowered
from emu.parallel.pipeline.running.executor import may_start_again, warm_up_of
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.parallel.state import load, save

CONFIG = Config(layers=4, width=8, heads=2, vocab=16, seq=4, tied=True)
STEPS = 3


DRAWN = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randint(0, 16, (4, 4), generator=DRAWN), torch.randint(0, 16, (4, 4), generator=DRAWN)) for _ in range(STEPS)
]


def train(
    rank: emu.Rank, schedule: Any, microbatches: int, clip: float, optimistic: bool, config: Config = CONFIG
) -> dict[str, object]:
    torch.manual_seed(int(rank))
    pipe = Pipeline(Decoder(config), rank, "dp", schedule=schedule, microbatches=microbatches, zero=1)
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
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "stale")
    if clip != 3.0:
        assert {result["stale"] for result in here.results} == {"2" if clip < 1 else "0"}


def one_by_one(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Every microbatch alone: the second rank waits, before its first backward, for what comes after the first one's."""
    for m in range(microbatches):
        yield from (Action(rank, "F", m), Action(rank, "B", m))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", one_by_one])
def test_a_warm_up_done_again_draws_the_same_random_numbers(schedule, dropout):
    """Also where ranks cannot warm up before they validate. (Each rank has its own random numbers.)"""
    mesh = emu.Mesh(pp=2, dp=1)
    config = replace(CONFIG, dropout=dropout)
    there, here = (emu.launch(train, mesh, args=(schedule, 4, 0.3, o, config)) for o in (False, True))
    assert {result["stale"] for result in here.results} == {"2"}
    ours, theirs = whole_results(here.results, mesh), whole_results(there.results, mesh)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name != "stale")


def test_ranks_that_wait_for_what_comes_after_a_warm_up_may_not_start_again():
    assert not may_start_again(lowered(Schedule.of(one_by_one, 2, 4)).rows)


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
    """ZB-H2 is a parallelogram: the first stage ends first, and goes on. A norm that all wait for makes it wait.

    So does the sum of the loss over stages, which is left out here.
    """
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
        emu.launch(program, mesh, backend="shape", launch_mode="graph", args=(o,)).without("loss").metrics.step_time_s
        for o in (False, True)
    ]
    assert took[1] < 0.97 * took[0]


# What is refused while a step is pending, and what a call that fails leaves behind: nothing.


def pending(rank: emu.Rank, what, scale: LossScale | None = None) -> dict[str, object]:
    """A step in advance, then `what(pipe, optimist)`, and two more steps."""
    pipe = Pipeline(Decoder(CONFIG), rank, schedule="1f1b", microbatches=2)
    optimist = OptimisticStep(pipe.optimizer(torch.optim.SGD, lr=0.05, clip=0.3, scale=scale), rank.group("pp"))
    pipe.backward(BATCHES[0], scale=scale)
    optimist.step()
    what(pipe, optimist)
    losses = []
    for batch in BATCHES[1:]:
        losses.append(pipe.backward(batch, scale=scale, optimist=optimist))
        optimist.step()
    optimist.validate()
    return {"losses": torch.stack(losses), "parameters": pipe.gather_parameters()}


def refused_then(rank: emu.Rank, match: str, call, scale: LossScale | None = None) -> dict[str, object]:
    def what(pipe, optimist):
        with pytest.raises(emu.EmuError, match=match) as caught:
            call(pipe, optimist)
        assert caught.value.hint

    return pending(rank, what, scale)


def gathered(pipe) -> None:
    with pipe.gathered():
        pass


PENDING = {
    "evaluate": lambda pipe, optimist: pipe.evaluate(BATCHES[0]),
    "gather_parameters": lambda pipe, optimist: pipe.gather_parameters(),
    "gather_gradients": lambda pipe, optimist: pipe.gather_gradients(),
    "gathered": lambda pipe, optimist: gathered(pipe),
    "save": lambda pipe, optimist: save("never-written", pipe),
    "load": lambda pipe, optimist: load("never-read", pipe),
    "backward without the optimist": lambda pipe, optimist: pipe.backward(BATCHES[2]),
    "add_gradients": lambda pipe, optimist: pipe.add_gradients(BATCHES[2]),
    "zero_grad of the optimizer": lambda pipe, optimist: optimist.optimizer.zero_grad(),
}


def same(run, other) -> bool:
    """Whether two runs have the same losses and parameters, to the bit."""
    return all(
        torch.equal(a["losses"], b["losses"])
        and all(torch.equal(a["parameters"][name], b["parameters"][name]) for name in b["parameters"])
        for a, b in zip(run.results, other.results, strict=True)
    )


@pytest.mark.parametrize("name", PENDING)
def test_no_mixture_of_stages_is_read_while_a_step_is_pending(name, tmp_path, monkeypatch):
    """The refusal changes nothing: training goes on as if nobody had asked."""
    monkeypatch.chdir(tmp_path)
    mesh = emu.Mesh(pp=2)
    run = emu.launch(refused_then, mesh, args=(r"taken in advance.*\n.*validate\(\).*zero_grad", PENDING[name]))
    assert same(run, emu.launch(pending, mesh, args=(lambda pipe, optimist: None,)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in PENDING if name not in ("save", "load") and "backward" not in name])
def test_what_is_refused_while_a_step_is_pending_is_not_after_it(name):
    """The control."""
    skipped = name == "add_gradients"  # gradients of the step are there still

    def program(rank):
        pipe = Pipeline(Decoder(CONFIG), rank, schedule="1f1b", microbatches=2)
        optimist = OptimisticStep(pipe.optimizer(torch.optim.SGD, lr=0.05, clip=0.3))
        pipe.backward(BATCHES[0])
        optimist.step()
        optimist.validate()
        if skipped:
            pipe.zero_grad()
        PENDING[name](pipe, optimist)

    emu.launch(program, emu.Mesh(pp=2))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("scale=0.5 is a float", lambda pipe, optimist: pipe.backward(BATCHES[0], scale=0.5, optimist=optimist)),
        ("microbatches", lambda pipe, optimist: pipe.backward(BATCHES[0], microbatches=[9], optimist=optimist)),
        ("no OptimisticStep", lambda pipe, optimist: pipe.backward(BATCHES[0], optimist=True)),
    ],
    ids=["scale", "microbatches", "optimist"],
)
def test_after_a_call_that_was_wrong_the_next_batch_is_its_own(pp, match, call):
    """The first forwards of a batch whose backward never came are of no other batch."""
    mesh = emu.Mesh(pp=pp)
    scale = lambda: None if match.startswith("no") else LossScale(4.0)  # noqa: E731
    run = emu.launch(lambda rank: refused_then(rank, match, call, scale()), mesh)
    assert same(run, emu.launch(lambda rank: pending(rank, lambda pipe, optimist: None, scale()), mesh))


def test_a_batch_that_fails_after_its_warm_up_leaves_no_forwards(monkeypatch):
    """On one stage, where one can go on."""

    def fails(pipe, optimist):
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "finish", lambda self, tokens: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pipe.backward(BATCHES[0], optimist=optimist)
        pipe.zero_grad()

    def program(rank, what):
        pipe = Pipeline(Decoder(CONFIG), rank, microbatches=2)
        optimist = OptimisticStep(pipe.optimizer(torch.optim.SGD, lr=0.05, clip=0.3), rank.group("pp"))
        pipe.backward(BATCHES[0])
        optimist.step()
        what(pipe, optimist)
        return {"losses": pipe.backward(BATCHES[1]), "parameters": pipe.gather_gradients()}

    there = emu.launch(program, emu.Mesh(pp=1), args=(lambda pipe, optimist: optimist.validate(),))
    assert same(emu.launch(program, emu.Mesh(pp=1), args=(fails,)), there)


def test_a_step_that_cannot_be_validated_is_told_before_the_warm_up():
    """So no forwards of the batch are under way between stages, and the next one trains as usual."""

    def program(rank, wrong):
        pipe = Pipeline(Decoder(CONFIG), rank, microbatches=2)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05)
        optimist = OptimisticStep(optimizer)
        pipe.backward(BATCHES[0])
        optimist.step()
        if wrong:
            pipe.zero_grad()
            with pytest.raises(emu.EmuError, match="forgotten before it was validated"):
                pipe.backward(BATCHES[2], optimist=optimist)
            pipe.summing.unsettled = False  # a program that gives the optimist up
        else:
            optimist.validate()
        return {"losses": pipe.backward(BATCHES[1]), "parameters": pipe.gather_parameters()}

    right, wrong = (emu.launch(program, emu.Mesh(pp=2), args=(w,)) for w in (False, True))
    assert all(torch.equal(a["losses"], b["losses"]) for a, b in zip(right.results, wrong.results, strict=True))
