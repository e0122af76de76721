"""What the demo says and draws. Every number comes from its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emu.cost import Metrics
from emu.demo.batch_size import RANKS as RANKS_OF_SIZES
from emu.demo.findings import RANKS, ROWS, SEQ, Demo
from emu.demo.training import MEANING, STRATEGIES
from emu.run import Run
from emu.trace.events import Kernel

OTHER_CHIP = "a100-8"  # the same trace priced there shows whether the chip matters
SCALED = f"{RANKS} scaled-down H100s"
STATES = ("parameters", "gradients", "optimizer")
LLAMA = "Llama 3 8B"


def summary(demo: Demo) -> Any:
    """One device, eight, and eight on which the toy behaves as a real model."""
    from emu.view.tables import comparison_table

    single = demo.single.window(f"step {len(demo.single.results[0]) - 1}", "end")
    return comparison_table(
        {
            "1 H100": _row(single, single.metrics),
            f"{RANKS} H100s": _row(demo.first.window, demo.first.metrics),
            SCALED: _row(demo.first.window, demo.first.scaled.metrics()),
        },
        f"One training step of {demo.model} ({ROWS} sequences of {SEQ} tokens), {demo.first.name}",
        f"{SCALED}: the same step on chips and links as much slower as {demo.model} is smaller than {LLAMA}, so that a "
        f"matrix product lasts as long as Llama's on a real H100.",
    )


def strategies_table(demo: Demo) -> Any:
    """Every strategy: whether it is right, what it holds, what it sends, how long it takes."""
    from emu.view.tables import Table
    from emu.view.units import bytes_text, percent_text, time_text

    rows = []
    for shown in demo.strategies.values():
        scaled = shown.scaled.metrics()
        peak = sum(shown.window.memory.at_peak(0).values())
        rows.append(
            (
                shown.name,
                "bit for bit" if shown.exact else "NO",
                bytes_text(sum(shown.states[kind] for kind in STATES)),
                bytes_text(peak),
                bytes_text(sum(shown.metrics.comm_bytes.values())),
                time_text(scaled.step_time_s),
                percent_text(scaled.exposed_comm_s / scaled.comm_s if scaled.comm_s else 0.0),
                MEANING[shown.name],
            )
        )
    headers = ("", "equals 1 device", "states", "peak", "sent", "step", "in sight", "what it is")
    note = (
        "states: parameters, gradients and optimizer states of one device before the optimizer's step, in float32; peak: the "
        "most that it holds in a step; sent: by it in a step; step, and the share of communication that no kernel hides: on "
        f"{SCALED}"
    )
    return Table(headers, rows, f"Data parallelism on {RANKS} devices", note, left=(0, 1, 7))


def _row(run: Run, metrics: Metrics) -> dict[str, Any]:
    """What the table shows. TFLOP/s would mean nothing on a scaled-down chip, and HFU and dtype say nothing new."""
    values = metrics.as_dict()
    for key in ("tflops_per_device", "hfu", "dtype"):
        del values[key]
    values["peak_hbm_bytes"] = [run.memory.peak_bytes(rank) for rank in run.trace.ranks]
    return values


def explain(demo: Demo) -> list[str]:
    """What the tables show, in sentences."""
    from emu.view.units import percent_text, time_text

    first = demo.first
    step, eight, scaled = first.window, first.metrics, first.scaled.metrics()
    one = demo.single.window(f"step {len(demo.single.results[0]) - 1}", "end").metrics
    launch_s, other_s = step.cluster.host.launch_s, step.timeline(OTHER_CHIP).step_time_s
    kernels = sum(type(event) is Kernel for event in step.trace.events[0])
    said = [f"Right, {shown.name}: {shown.exact}." for shown in demo.strategies.values()]
    said += [
        f"Right, {first.name}: {demo.float32}.",
        f"The loss curves of 1 and {RANKS} devices lie within a relative {demo.loss_gap:.1e} of each other.",
        f"A model this small leaves an H100 idle: kernels run for {percent_text(one.busy_fraction)} of a step of "
        f"{time_text(one.step_time_s)} on one device. {RANKS} devices take {time_text(eight.step_time_s)}: the host launches "
        f"{kernels} kernels one by one, {time_text(launch_s)} each, and the device waits for it. So another chip changes "
        f"little: {time_text(other_s)} on {OTHER_CHIP}.",
        f"On {SCALED} a matrix product lasts as long as one of {LLAMA} does on a real H100, so the chip matters: MFU "
        f"{percent_text(scaled.mfu)}. Buckets of gradients are summed while backward goes on: of {time_text(scaled.comm_s)} "
        f"of communication {time_text(scaled.exposed_comm_s)} are not hidden by kernels.",
    ]
    if len(demo.strategies) > 1:
        said.append(_stages(demo))
    if demo.batch_sizes is not None:
        sizes = demo.batch_sizes
        (small, many), *_, (large, few) = sizes.steps.items()
        said.append(
            f"More devices help as long as a larger batch does. A noisy quadratic reaches its goal in {many} steps with a batch "
            f"of {small} and in {few} with {large}: up to a batch of about {sizes.tradeoff.critical:.0f} steps fall as the batch "
            f"grows, beyond it hardly. The gradient noise scale, measured on the way from what {RANKS_OF_SIZES} ranks have "
            f"anyway, predicts that: {sizes.noise_scale:.0f}."
        )
    return said


def _stages(demo: Demo) -> str:
    from emu.view.units import bytes_text

    states = {name: sum(shown.states[kind] for kind in STATES) for name, shown in demo.strategies.items()}
    sent = {name: sum(shown.metrics.comm_bytes.values()) for name, shown in demo.strategies.items()}
    each = ", ".join(f"{name} {bytes_text(n)}" for name, n in states.items())
    return (
        f"Parameters, gradients and optimizer states of one device, before its optimizer's step: {each}. Of these, dp "
        f"sends {bytes_text(sent['dp'])} a step and zero1 and zero2 the same; zero3, which gathers parameters twice, sends "
        f"{bytes_text(sent['zero3'])}."
    )


def write_demo_report(demo: Demo, path: str | Path) -> None:
    """One self-contained HTML file: what was trained, proved, priced, and its pictures."""
    from emu.view import Heading, Picture, Text, loss_figure, memory_figure, timeline_figure, write_report
    from emu.view.units import time_text

    first, curves = demo.first, {"1 device": demo.single, f"{RANKS} devices": demo.distributed}
    sections = [
        Heading("What happened"),
        Text("\n\n".join(explain(demo))),
        strategies_table(demo),
        summary(demo),
        Heading("The loss is the same"),
        Picture(
            loss_figure({name: run.results[0].tolist() for name, run in curves.items()}),
            "Above: both curves; the second lies on the first. Below: how far they lie apart.",
        ),
        Heading("One step over time"),
        Picture(
            timeline_figure(first.window.timeline(), ranks=[0, 1]),
            f"Ranks 0 and 1 of {RANKS} H100s during {first.step[0]}: short kernels with idle time between them, while the "
            f"host launches the next.",
        ),
        Picture(
            timeline_figure(
                first.scaled,
                ranks=[0, 1],
                title=f"{first.name}: {time_text(first.scaled.step_time_s)} on {SCALED}, 2 of {RANKS} ranks shown",
            ),
            f"The same step on {SCALED}: now kernels fill the time, and the second stream of each rank sums gradients "
            f"while the first computes more of them.",
        ),
        *_sharding_pictures(demo),
        *_batch_size_picture(demo),
        Heading("Memory of one device"),
        Picture(
            memory_figure(demo.distributed.memory, rank=0),
            "Bytes that tensors hold, by category, over the whole run in program order: activations rise in forward and fall in "
            "backward; optimizer states stay.",
        ),
    ]
    write_report(path, f"emu demo: {demo.model} on {RANKS} virtual H100s", sections)


def _batch_size_picture(demo: Demo) -> list[Any]:
    from emu.view import Heading, Picture, batch_size_figure

    if demo.batch_sizes is None:
        return []
    picture = batch_size_figure(demo.batch_sizes.steps, demo.batch_sizes.noise_scale, width=11)
    about = "A noisy quadratic, trained to the same goal with the best learning rate for each batch size."
    return [Heading("How far a larger batch helps"), Picture(picture, about)]


def _sharding_pictures(demo: Demo) -> list[Any]:
    from emu.view import Heading, Picture, memory_bars_figure, memory_figure, timeline_figure
    from emu.view.units import time_text

    out: list[Any] = []
    if len(demo.strategies) > 1:
        bars = {name: shown.window.memory.at_peak(0) for name, shown in demo.strategies.items()}
        out += [
            Heading("What every stage leaves on a device"),
            Picture(
                memory_bars_figure(bars, f"memory of rank 0 of {RANKS} at the peak of a step"),
                "From left to right: everything everywhere; optimizer states sharded; gradients, too; parameters, too; the "
                "same in two groups. What is left of parameters in zero3 are shards and the units in use just then.",
            ),
        ]
    sharded = next((s for name, s in demo.strategies.items() if STRATEGIES[name].get("zero") == 3), None)
    if sharded is not None:
        run = demo.teeth if demo.teeth is not None else sharded.run
        ahead = "nothing gathered ahead" if demo.teeth is not None else "one unit gathered ahead"
        out += [
            Heading("Gather, use, free"),
            Picture(
                memory_figure(
                    run.window(*sharded.step).memory,
                    rank=0,
                    only=("parameters", "gradients"),
                    title=f"{sharded.name}, {ahead}: parameters and gradients of rank 0 in {sharded.step[0]}",
                ),
                "Every tooth is a unit: its parameters are gathered before it computes and freed after, once in forward and "
                "once in backward, where its gradients come, are summed over ranks, and leave a shard.",
            ),
            Picture(
                timeline_figure(
                    sharded.scaled,
                    ranks=[0],
                    title=f"{sharded.name}: {time_text(sharded.scaled.step_time_s)} on {SCALED}, rank 0",
                ),
                "Two streams, one unit gathered ahead: while one computes, the next is gathered; in backward gradients are "
                "scattered, too.",
            ),
        ]
    return out
