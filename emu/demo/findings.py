"""Running the demo, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from emu.cost import Metrics, Timeline
from emu.demo.batch_size import BATCHES, BatchSizes, measure
from emu.demo.training import ALONE, RANKS, STRATEGIES, Strategy, alone, one_step, train
from emu.equivalence import Verdict
from emu.hardware import Workload
from emu.models import config
from emu.models.text import batches
from emu.parallel import Batch
from emu.run import Run, launch
from emu.spmd import EmuError
from emu.trace.events import Mark

STEPS, QUICK_STEPS = 40, 10
FEW_STEPS = 2  # of the strategies whose loss curve is not drawn
ROWS, SEQ = 16, 64  # sequences in a step, tokens in each
NAMES = ("all", *STRATEGIES)
STATES = ("parameters", "gradients", "optimizer")
MUTANTS, FEW_MUTANTS = 8, 3
QUICK_MUTANTS, FEW_QUICK_MUTANTS = 4, 2
# What the toy stands for when it is priced on chips that are scaled down with it: Llama 3 8B, sequences of 8,192 tokens.
REAL = Workload(n_params=8.03e9, width=4096, tokens=8192)


@dataclass
class Shown:
    """One strategy.

    Attributes:
        run: its training on eight devices.
        step: (first mark, last mark) of the step that is priced and drawn.
        exact: whether its step is one device's, bit for bit.
        scaled: the step priced on chips that are scaled down with the model.
        actions: the same with the marks of a pipeline's actions; None where there is no pipeline.
    """

    name: str
    run: Run
    step: tuple[str, str]
    exact: Verdict
    scaled: Timeline
    actions: Timeline | None = None

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.name]

    @property
    def states(self) -> dict[str, int]:
        """Category -> bytes that the rank with most of them holds between backward and the optimizer's step."""
        held = self.run.memory.window(self.step[0].replace("step", "gradients")).held
        return dict(max(held.values(), key=lambda one: sum(one[kind] for kind in STATES)))

    @property
    def peak_bytes(self) -> int:
        """The most that the fullest rank holds in the step."""
        return self.window.memory.peak_bytes()

    @property
    def window(self) -> Run:
        return self.run.window(*self.step)

    @property
    def metrics(self) -> Metrics:
        return self.window.metrics


@dataclass
class Demo:
    """What the demo found.

    Attributes:
        single: the training on one device; distributed: on eight, under the first strategy.
        float32: whether that one's step is one device's, in float32.
        strategies: all that were asked for, the first of them included.
        whole_tokens_bytes: what sp is for: the peak of the same step under tp alone; where sp was asked for.
        kept_bytes: what checkpointing is for: the most activations that the same step holds under dp; where it was asked for.
        teeth: a training whose units are gathered one at a time, nothing ahead; where all strategies were asked for.
        batch_sizes: how far a larger batch helps; where all strategies were asked for.
    """

    single: Run
    strategies: dict[str, Shown]
    float32: Verdict
    model: str
    whole_tokens_bytes: int | None = None
    kept_bytes: int | None = None
    teeth: Run | None = None
    batch_sizes: BatchSizes | None = None
    report: str = ""

    @property
    def first(self) -> Shown:
        return next(iter(self.strategies.values()))

    @property
    def distributed(self) -> Run:
        return self.first.run

    @property
    def exact(self) -> bool:
        return all(bool(shown.exact) for shown in self.strategies.values())

    @property
    def loss_gap(self) -> float:
        """The largest relative distance of the two loss curves."""
        a, b = self.single.results[0].losses.double(), self.distributed.results[0].losses.double()
        return float(((a - b).abs() / a.abs()).max())

    def as_dict(self) -> dict[str, Any]:
        losses = {"single": self.single, "distributed": self.distributed}
        return {
            "strategies": [self._strategy(shown) for shown in self.strategies.values()],
            "report": self.report,
            "critical_batch": self.batch_sizes and self.batch_sizes.tradeoff.critical,
            **{f"loss_{name}": float(run.results[0].losses[-1]) for name, run in losses.items()},
            **{f"losses_{name}": run.results[0].losses.tolist() for name, run in losses.items()},
        }

    def _strategy(self, shown: Shown) -> dict[str, Any]:
        priced = shown.metrics
        return {
            "name": shown.name,
            "equivalent": bool(shown.exact) and (shown is not self.first or bool(self.float32)),
            "tier": shown.exact.tier,
            "step_time_s": priced.step_time_s,
            "peak_hbm_bytes": shown.peak_bytes,
            "comm_bytes": priced.comm_bytes,
            "mfu": priced.mfu,
        }


def find(
    name: str,
    quick: bool,
    stage: Callable[[str, int], Callable[[int], None]],
) -> Demo:
    """Trains, checks and prices.

    Args:
        name: a strategy, or "all"; quick: fewer steps and mutants.
        stage: announces a stage of so many parts, and returns what is called with the number of parts done.

    Raises:
        EmuError: no such demo.
    """
    if name not in NAMES:
        raise EmuError(f"there is no demo {name!r}", f"use one of {', '.join(NAMES)}")
    names = list(STRATEGIES) if name == "all" else [name]
    steps = QUICK_STEPS if quick else STEPS
    data = [Batch(x, y) for x, y in batches(0, steps, ROWS, SEQ)]

    def trained(text: str, n_steps: int, strategy: Strategy) -> Run:
        tick = stage(text, n_steps)
        args = (config(strategy.model), data[:n_steps], strategy, lambda step: tick(step + 1))
        return launch(train, strategy.mesh, args=args, backend="virtual")

    def checked(run: Run, strategy: Strategy, text: str, tier: str, mutants: int) -> Verdict:
        tick, done = stage(text, mutants + 2), iter(range(1, mutants + 3))
        args = (config(strategy.model), data[0], strategy)
        step = Run(one_step, run.mesh, run.cluster, [], run.trace, args=args)
        return step.check(alone, tier, mutants, progress=lambda text: tick(next(done)))

    first = STRATEGIES[names[0]]
    single = trained("train on 1 virtual H100", steps, replace(ALONE, model=first.model))
    strategies: dict[str, Shown] = {}
    for i, one in enumerate(names):
        strategy, last_step = STRATEGIES[one], (FEW_STEPS if i else steps) - 1
        run = trained(f"train on {RANKS} virtual H100s: {one}", last_step + 1, strategy)
        mutants = (FEW_QUICK_MUTANTS if i else QUICK_MUTANTS) if quick else (FEW_MUTANTS if i else MUTANTS)
        verdict = checked(run, strategy, f"check {one} against one device, tier exact", "exact", mutants)
        last = (f"step {last_step}", "end")
        chips = run.cluster.similar(_toy(strategy.model), to=REAL)
        scaled = _unmarked(run.window(*last)).timeline(chips)
        actions = run.window(*last).timeline(chips) if strategy.schedule else None
        strategies[one] = Shown(one, run, last, verdict, scaled, actions)
    text = f"check {names[0]} against one device, tier float32"
    float32 = checked(strategies[names[0]].run, first, text, "float32", 0)
    sizes = (
        measure(stage(f"train a noisy quadratic at {len(BATCHES)} batch sizes", len(BATCHES)))
        if name == "all"
        else None
    )
    teeth = None
    if name == "all":
        zero3 = STRATEGIES["zero3"]
        nothing_ahead = replace(zero3, options={**zero3.options, "prefetch": 0})
        teeth = trained("train once more, gathering nothing ahead", FEW_STEPS, nothing_ahead)
    whole_tokens_bytes = None
    if "sp" in strategies:
        tp = strategies.get("tp")
        whole_tokens_bytes = (
            tp.peak_bytes if tp is not None else _by_shapes(STRATEGIES["tp"], data[:FEW_STEPS]).memory.peak_bytes()
        )
    kept_bytes = None
    if "checkpoint" in strategies:
        dp = strategies.get("dp")
        kept_bytes = most_activations(dp.window if dp is not None else _by_shapes(STRATEGIES["dp"], data[:FEW_STEPS]))
    return Demo(single, strategies, float32, first.model, whole_tokens_bytes, kept_bytes, teeth, sizes)


def most_activations(run: Run) -> int:
    """Bytes of activations, at the time when the rank with most of them has most."""
    return max(max(run.memory.series(rank)[1]["activations"]) for rank in run.trace.ranks)


def _by_shapes(strategy: Strategy, data: list[Batch]) -> Run:
    """The last step, from shapes alone."""
    args = (config(strategy.model), data, strategy, lambda step: None)
    return launch(train, strategy.mesh, args=args, backend="shape").window(f"step {len(data) - 1}", "end")


def _unmarked(run: Run) -> Run:
    """The same without marks: the host of a scaled-down chip is far ahead of it, so its marks would stand at odd places."""
    events = {rank: [e for e in events if type(e) is not Mark] for rank, events in run.trace.events.items()}
    return Run(run.program, run.mesh, run.cluster, run.results, replace(run.trace, events=events), run.launch_mode)


def _toy(model: str) -> Workload:
    """What is scaled to REAL: a step's tokens, shared out evenly. So all strategies meet the same chips and links."""
    shape = config(model)
    return Workload(n_params=shape.n_params(), width=shape.width, tokens=ROWS * SEQ // RANKS)
