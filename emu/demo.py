"""The demo: a GPT trains on real text on one device and on eight that do not exist, and everything is shown.

What it prints, draws and reports is computed here and now; nothing in it is told beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from emu.cost import Metrics, Timeline
from emu.equivalence import Verdict
from emu.hardware import Workload
from emu.models import Config, Decoder, config
from emu.models.text import batches
from emu.parallel import Batch, DataParallel
from emu.run import Run, launch
from emu.spmd import EmuError, Mesh, Rank, grads
from emu.trace.events import Kernel

STEPS, QUICK_STEPS = 40, 10
ROWS, SEQ = 16, 64  # sequences in a step, tokens in each
RANKS = 8
NAMES = ("dp",)
OTHER_CHIP = "a100-8"  # the same trace priced there shows whether the chip matters
SCALED = f"{RANKS} scaled-down H100s"
# What the toy stands for when it is priced on chips that are scaled down with it: Llama 3 8B, sequences of 8,192 tokens.
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
        scaled: the step priced on chips that are scaled down with the model.
    """

    single: Run
    distributed: Run
    step: tuple[str, str]
    exact: Verdict
    float32: Verdict
    scaled: Timeline
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

    tick = stage("price the step and draw it", 2)
    tokens = ROWS * SEQ // RANKS
    toy = Workload(n_params=model_config.n_params(), width=model_config.width, tokens=tokens)
    last = (f"step {steps - 1}", "end")
    scaled = distributed.window(*last).timeline(distributed.cluster.similar(toy, to=REAL))
    demo = Demo(single, distributed, last, *verdicts, scaled=scaled, model=model_name)
    tick(1)
    write_demo_report(demo, report)
    tick(2)
    demo.report = str(Path(report).resolve())
    return demo


def summary(demo: Demo) -> Any:
    """The table at the end: one device, eight, and eight on which the toy behaves as a real model."""
    from emu.view.tables import comparison_table

    return comparison_table(
        {
            "1 H100": _row(demo.single, demo.metrics(demo.single)),
            f"{RANKS} H100s": _row(demo.distributed, demo.metrics(demo.distributed)),
            SCALED: _row(demo.distributed, demo.scaled.metrics()),
        },
        f"One training step of {demo.model} ({ROWS} sequences of {SEQ} tokens)",
        f"{SCALED}: the same step on chips and links as much slower as {demo.model} is smaller than Llama 3 8B, so that a "
        f"matrix product lasts as long as Llama's on a real H100.",
    )


def _row(run: Run, metrics: Metrics) -> dict[str, Any]:
    """What the table shows. TFLOP/s would mean nothing on a scaled-down chip, and HFU and dtype say nothing new."""
    values = metrics.as_dict()
    for key in ("tflops_per_device", "hfu", "dtype"):
        del values[key]
    values["peak_hbm_bytes"] = [run.memory.peak_bytes(rank) for rank in run.trace.ranks]
    return values


def explain(demo: Demo) -> list[str]:
    """What the table shows, in sentences whose numbers come from the run."""
    from emu.view.units import percent_text, time_text

    one, eight, scaled = demo.metrics(demo.single), demo.metrics(demo.distributed), demo.scaled.metrics()
    step = demo.distributed.window(*demo.step)
    launch_s, other_s = step.cluster.host.launch_s, step.timeline(OTHER_CHIP).step_time_s
    kernels = sum(type(event) is Kernel for event in step.trace.events[0])
    return [
        f"Right: {demo.exact}.",
        f"Right: {demo.float32}.",
        f"The loss curves of 1 and {RANKS} devices lie within a relative {demo.loss_gap:.1e} of each other.",
        f"A model this small leaves an H100 idle: kernels run for {percent_text(one.busy_fraction)} of a step of "
        f"{time_text(one.step_time_s)} on one device. {RANKS} devices do not help: {time_text(eight.step_time_s)}, of which "
        f"{time_text(eight.exposed_comm_s)} are all-reduces so small that they are nearly all latency.",
        f"Such a step is host-bound: the host launches {kernels} kernels one by one, {time_text(launch_s)} each, and the "
        f"device waits for it. So another chip changes little: {time_text(other_s)} on {OTHER_CHIP}.",
        f"On {SCALED} a matrix product lasts as long as one of Llama 3 8B does on a real H100, so the chip matters: MFU "
        f"{percent_text(scaled.mfu)}, and {percent_text(scaled.exposed_comm_fraction)} of the step is communication that no "
        f"kernel hides. Plain data parallelism communicates only after backward is done; hiding it is the next lesson.",
    ]


def write_demo_report(demo: Demo, path: str | Path) -> None:
    """One self-contained HTML file: what was trained, proved, priced, and its pictures."""
    from emu.view import Heading, Picture, Text, loss_figure, memory_figure, timeline_figure, write_report
    from emu.view.units import time_text

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
            f"Ranks 0 and 1 of {RANKS} H100s during {demo.step[0]}: short kernels with idle time between them, while the "
            f"host launches the next; then one all-reduce for every gradient, nearly all latency; then the optimizer.",
        ),
        Picture(
            timeline_figure(
                demo.scaled,
                ranks=[0, 1],
                title=f"{time_text(demo.scaled.step_time_s)} on {SCALED}: 2 of {RANKS} ranks shown",
            ),
            f"The same step on {SCALED}: now kernels fill the time; the all-reduces between backward and optimizer are "
            f"what nothing hides.",
        ),
        Heading("Memory of one device"),
        Picture(
            memory_figure(demo.distributed.memory, rank=0),
            "Bytes that tensors hold, by category, over the whole run in program order: activations rise in forward and fall in "
            "backward; gradients come and go with each step; optimizer states stay.",
        ),
    ]
    write_report(path, f"emu demo: {demo.model} on {RANKS} virtual H100s", sections)
