"""Running the demo, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emu.cost import Metrics, Timeline
from emu.demo.batch_size import BATCHES, BatchSizes, measure
from emu.demo.training import STRATEGIES, alone, one_step, train
from emu.equivalence import Verdict
from emu.hardware import Workload
from emu.models import config
from emu.models.text import batches
from emu.parallel import Batch
from emu.run import Run, launch
from emu.spmd import EmuError, Mesh

STEPS, QUICK_STEPS = 40, 10
FEW_STEPS = 3  # of the strategies whose loss curve is not drawn
ROWS, SEQ = 16, 64  # sequences in a step, tokens in each
RANKS = 8
NAMES = ("all", *STRATEGIES)
MUTANTS, FEW_MUTANTS = 8, 4
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
    """

    name: str
    run: Run
    step: tuple[str, str]
    exact: Verdict
    scaled: Timeline

    @property
    def states(self) -> dict[str, int]:
        """Category -> bytes that rank 0 holds between backward and the optimizer's step."""
        return dict(self.run.memory.window(self.step[0].replace("step", "gradients")).held[0])

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
        teeth: a training whose units are gathered one at a time, nothing ahead; where all strategies were asked for.
        batch_sizes: how far a larger batch helps; where all strategies were asked for.
    """

    single: Run
    strategies: dict[str, Shown]
    float32: Verdict
    model: str
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
        a, b = self.single.results[0].double(), self.distributed.results[0].double()
        return float(((a - b).abs() / a.abs()).max())

    def as_dict(self) -> dict[str, Any]:
        losses = {"single": self.single, "distributed": self.distributed}
        return {
            "strategies": [self._strategy(shown) for shown in self.strategies.values()],
            "report": self.report,
            "critical_batch": self.batch_sizes and self.batch_sizes.tradeoff.critical,
            **{f"loss_{name}": float(run.results[0][-1]) for name, run in losses.items()},
            **{f"losses_{name}": run.results[0].tolist() for name, run in losses.items()},
        }

    def _strategy(self, shown: Shown) -> dict[str, Any]:
        priced = shown.metrics
        return {
            "name": shown.name,
            "equivalent": bool(shown.exact) and (shown is not self.first or bool(self.float32)),
            "tier": shown.exact.tier,
            "step_time_s": priced.step_time_s,
            "peak_hbm_bytes": max(priced.peak_hbm_bytes or [0]),
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
        name: a strategy, or "all"; quick: fewer steps.
        stage: announces a stage of so many parts, and returns what is called with the number of parts done.

    Raises:
        EmuError: no such demo.
    """
    if name not in NAMES:
        raise EmuError(f"there is no demo {name!r}", f"use one of {', '.join(NAMES)}")
    names = list(STRATEGIES) if name == "all" else [name]
    model_name, steps = "gpt-tiny", QUICK_STEPS if quick else STEPS
    model_config = config(model_name)
    data = [Batch(x, y) for x, y in batches(0, steps, ROWS, SEQ)]

    def trained(mesh: Mesh, text: str, n_steps: int, options: dict[str, Any]) -> Run:
        tick = stage(text, n_steps)
        args = (model_config, data[:n_steps], options, lambda step: tick(step + 1))
        return launch(train, mesh, args=args, backend="virtual")

    def checked(run: Run, options: dict[str, Any], text: str, tier: str, mutants: int) -> Verdict:
        tick, done = stage(text, mutants + 2), iter(range(1, mutants + 3))
        step = Run(one_step, run.mesh, run.cluster, [], run.trace, args=(model_config, data[0], options))
        return step.check(alone, tier, mutants, progress=lambda text: tick(next(done)))

    single = trained(Mesh(dp=1), "train on 1 virtual H100", steps, STRATEGIES[names[0]])
    strategies: dict[str, Shown] = {}
    toy = Workload(n_params=model_config.n_params(), width=model_config.width, tokens=ROWS * SEQ // RANKS)
    for i, one in enumerate(names):
        n_steps, mutants = (FEW_STEPS, FEW_MUTANTS) if i else (steps, MUTANTS)
        run = trained(Mesh(dp=RANKS), f"train on {RANKS} virtual H100s: {one}", n_steps, STRATEGIES[one])
        verdict = checked(run, STRATEGIES[one], f"check {one} against one device, tier exact", "exact", mutants)
        last = (f"step {n_steps - 1}", "end")
        scaled = run.window(*last).timeline(run.cluster.similar(toy, to=REAL))
        strategies[one] = Shown(one, run, last, verdict, scaled)
    first = strategies[names[0]]
    text = f"check {names[0]} against one device, tier float32"
    float32 = checked(first.run, STRATEGIES[names[0]], text, "float32", 0)
    sizes = (
        measure(stage(f"train a noisy quadratic at {len(BATCHES)} batch sizes", len(BATCHES)))
        if name == "all"
        else None
    )
    teeth = None
    if name == "all":
        nothing_ahead = {**STRATEGIES["zero3"], "prefetch": 0}
        teeth = trained(Mesh(dp=RANKS), "train once more, gathering nothing ahead", FEW_STEPS, nothing_ahead)
    return Demo(single, strategies, float32, model_name, teeth, sizes)
