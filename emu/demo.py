"""The demo: a GPT trains on real text on one device and on eight that do not exist, and everything is shown.

What it prints, draws and reports is computed here and now; nothing in it is told beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from emu.cost import Metrics
from emu.equivalence import Verdict
from emu.hardware import Workload
from emu.models import Config, Decoder, config
from emu.models.text import batches
from emu.parallel import Batch, DataParallel
from emu.run import Run, launch
from emu.spmd import EmuError, Mesh, Rank, grads

STEPS, QUICK_STEPS = 40, 10
ROWS, SEQ = 16, 64  # sequences in a step, tokens in each
RANKS = 8
NAMES = ("dp",)
# What the toy stands for when it is priced on a cluster that is shrunk with it: Llama 3 8B, sequences of 8,192 tokens.
REAL = Workload(n_params=8.03e9, width=4096, tokens=8192)


def train(rank: Rank, model_config: Config, data: Sequence[Batch], tick: Callable[[int], None]) -> torch.Tensor:
    """An ordinary training loop; every rank runs it. Returns the loss of every step."""
    model = Decoder(model_config, seed=0)
    ddp = DataParallel(model, rank, "dp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    losses = []
    for step, batch in enumerate(data):
        rank.mark(f"step {step}")
        losses.append(ddp.backward(batch))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            tick(step)
    rank.mark("end")
    return torch.stack(losses)


def one_step(rank: Rank, model_config: Config, batch: Batch) -> Any:
    """The loss and gradients of one distributed step."""
    ddp = DataParallel(Decoder(model_config, seed=0), rank, "dp")
    return {"loss": ddp.backward(batch), "parameters": grads(ddp.model)}


def alone(model_config: Config, batch: Batch) -> Any:
    """The same by plain torch, on one device: nothing of emu's is in it but the names it returns."""
    model = Decoder(model_config, seed=0)
    loss = model.loss_sum(batch.x, batch.y)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(batch.tokens)
    return {"loss": loss.detach() / batch.tokens, "parameters": grads(model)}


@dataclass
class Demo:
    """What the demo found.

    Attributes:
        single, distributed: the runs on one device and on eight.
        step: (first mark, last mark) of the step that is priced and drawn.
        exact, float32: the verdicts of two tiers.
        similar: the priced step on a cluster that is shrunk with the model.
    """

    single: Run
    distributed: Run
    step: tuple[str, str]
    exact: Verdict
    float32: Verdict
    similar: Metrics
    model: str
    report: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def loss_gap(self) -> float:
        """The largest relative distance of the two loss curves."""
        a, b = self.single.results[0].double(), self.distributed.results[0].double()
        return float(((a - b).abs() / a.abs()).max())

    def metrics(self, run: Run) -> Metrics:
        return run.window(*self.step).metrics

    def as_dict(self) -> dict[str, Any]:
        priced = self.metrics(self.distributed)
        peaks = [self.distributed.memory.peak_bytes(rank) for rank in self.distributed.trace.ranks]
        losses = {"single": self.single, "distributed": self.distributed}
        return {
            "strategies": [
                {
                    "name": "dp",
                    "equivalent": bool(self.exact) and bool(self.float32),
                    "tier": self.exact.tier,
                    "step_time_s": priced.step_time_s,
                    "peak_hbm_bytes": max(peaks),
                    "comm_bytes": priced.comm_bytes,
                    "mfu": priced.mfu,
                }
            ],
            "report": self.report,
            **{f"loss_{name}": float(run.results[0][-1]) for name, run in losses.items()},
            **{f"losses_{name}": run.results[0].tolist() for name, run in losses.items()},
        }


def run_demo(
    name: str = "dp",
    quick: bool = False,
    report: str | Path = "emu-report.html",
    stage: Callable[[str, int], Callable[[int], None]] = lambda text, total: lambda done: None,
) -> Demo:
    """Trains, checks, prices and draws; writes the HTML report.

    Args:
        stage: announces a stage of so many parts, and returns what is called with the number of parts done.

    Raises:
        EmuError: no such demo.
    """
    if name not in NAMES:
        raise EmuError(f"there is no demo {name!r}", f"use one of {', '.join(NAMES)}")
    steps, model_name = QUICK_STEPS if quick else STEPS, "gpt-tiny"
    model_config = config(model_name)
    data = [Batch(x, y) for x, y in batches(0, steps, ROWS, SEQ)]

    def trained(mesh: Mesh, text: str) -> Run:
        tick = stage(text, steps)
        return launch(train, mesh, args=(model_config, data, lambda step: tick(step + 1)), backend="virtual")

    single = trained(Mesh(dp=1), "train on 1 virtual H100")
    distributed = trained(Mesh(dp=RANKS), f"train on {RANKS} virtual H100s")

    verdicts = []
    for tier, mutants in (("exact", 8), ("float32", 0)):
        tick, done = stage(f"check against one device, tier {tier}", mutants + 2), iter(range(1, mutants + 3))
        step = Run(one_step, distributed.mesh, distributed.cluster, [], distributed.trace, args=(model_config, data[0]))

        def progress(text: str, tick: Callable[[int], None] = tick, done: Any = done) -> None:
            tick(next(done))

        verdicts.append(step.check(alone, tier, mutants, progress=progress))

    stage("price the step and draw it", 1)
    tokens = ROWS * SEQ // RANKS
    toy = Workload(n_params=model_config.n_params(), width=model_config.width, tokens=tokens)
    last = (f"step {steps - 1}", "end")
    shrunk = distributed.cluster.similar(toy, to=REAL)
    similar = distributed.window(*last).timeline(shrunk).metrics()
    demo = Demo(single, distributed, last, *verdicts, similar=similar, model=model_name)
    write_demo_report(demo, report)
    demo.report = str(Path(report).resolve())
    return demo


def summary(demo: Demo) -> Any:
    """The table at the end: one device, eight, and eight on which the toy behaves as a real model."""
    from emu.view.tables import comparison_table

    return comparison_table(
        {
            "1 H100": _with_peak(demo, demo.single),
            f"{RANKS} H100s": _with_peak(demo, demo.distributed),
            f"{RANKS} shrunk": _with_peak(demo, demo.distributed, demo.similar),
        },
        f"One training step of {demo.model} ({ROWS} sequences of {SEQ} tokens)",
    )


def _with_peak(demo: Demo, run: Run, metrics: Metrics | None = None) -> dict[str, Any]:
    values = (metrics or demo.metrics(run)).as_dict()
    values["peak_hbm_bytes"] = [run.memory.peak_bytes(rank) for rank in run.trace.ranks]
    return values


def explain(demo: Demo) -> list[str]:
    """What the table shows, in sentences whose numbers come from the run."""
    from emu.view.units import percent_text, time_text

    one, eight = demo.metrics(demo.single), demo.metrics(demo.distributed)
    shrunk = demo.similar
    return [
        f"Right: {demo.exact}.",
        f"Right: {demo.float32}.",
        f"The loss curves of 1 and {RANKS} devices lie within a relative {demo.loss_gap:.1e} of each other.",
        f"A model this small leaves an H100 idle: a step is mostly launches ({time_text(one.step_time_s)} on one device, "
        f"MFU {percent_text(one.mfu)}), so {RANKS} devices do not help ({time_text(eight.step_time_s)}).",
        f"'{RANKS} shrunk' is the same trace priced on H100s scaled down with the model, so that it behaves as Llama 3 8B "
        f"does on real ones: MFU {percent_text(shrunk.mfu)}, {percent_text(shrunk.exposed_comm_fraction)} of the step is "
        f"communication that nothing hides. Plain data parallelism talks only after backward is done; hiding it is the "
        f"next lesson.",
    ]


def write_demo_report(demo: Demo, path: str | Path) -> None:
    """One self-contained HTML file: what was trained, proved, priced, and its pictures."""
    from emu.view import Heading, Picture, Text, loss_figure, memory_figure, timeline_figure, write_report

    window = demo.distributed.window(*demo.step)
    curves = {
        f"{n} device{'s' * (n > 1)}": run.results[0].tolist()
        for n, run in ((1, demo.single), (RANKS, demo.distributed))
    }
    sections = [
        Heading("What happened"),
        Text("\n\n".join(explain(demo))),
        summary(demo),
        Heading("The loss is the same"),
        Picture(
            loss_figure(curves), "Above: both curves; the second lies on the first. Below: how far they lie apart."
        ),
        Heading("One step over time"),
        Picture(
            timeline_figure(window.timeline(), ranks=[0, 1]),
            f"Every stream of ranks 0 and 1 during {demo.step[0]}: kernels by phase, then the all-reduces of the gradients.",
        ),
        Heading("Memory of one device"),
        Picture(
            memory_figure(demo.distributed.memory, rank=0),
            "Requested bytes by category over the whole run, in program order: activations rise in forward and fall in "
            "backward; gradients come and go with each step; optimizer states stay.",
        ),
    ]
    write_report(path, f"emu demo: {demo.model} on {RANKS} virtual H100s", sections)
