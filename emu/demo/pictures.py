"""What the demo draws: the pictures of its report. Every number comes from its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emu.demo.findings import Demo
from emu.demo.telling import SCALED, cut_of, explain, filling, schedule_of, sharing, strategies_table, summary
from emu.demo.training import RANKS


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
            loss_figure({name: run.results[0].losses.tolist() for name, run in curves.items()}),
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
            f"The same step on {SCALED}: {filling(first)}. {sharing(first)}",
        ),
        *_sharding_pictures(demo),
        *_inside_pictures(demo),
        *_pipeline_pictures(demo),
        *_long_sequence_pictures(demo),
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
        bars = {
            name: shown.window.memory.at_peak(0)
            for name, shown in demo.strategies.items()
            if shown.strategy.model == demo.model
        }
        out += [
            Heading("What every strategy leaves on a device"),
            Picture(
                memory_bars_figure(bars, f"memory of rank 0 of {RANKS} at the peak of a step"),
                "From left to right: everything everywhere; optimizer states sharded; gradients, too; parameters, too; the "
                "same in two groups; layers cut over 4 devices; what lies between the cut matrices by tokens, too; whole layers "
                "over 4, in two schedules; sequences over 4; and layers computed again, whose peak comes in the optimizer's "
                "step. What is left of parameters in zero3 are shards and the units in use just then.",
            ),
        ]
    sharded = next((s for s in demo.strategies.values() if s.strategy.options.get("zero") == 3), None)
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


def _pipeline_pictures(demo: Demo) -> list[Any]:
    from emu.view import Heading, Picture, activations_figure, side_by_side

    out: list[Any] = []
    for shown in demo.strategies.values():
        if shown.actions is None:
            continue
        out += [] if out else [Heading("A pipeline")]
        name = f"{shown.name}: {shown.strategy.schedule}"
        out += [
            Picture(
                side_by_side(schedule_of(shown), shown.actions, title=name),
                "Above what the schedule says, with the times that each stage takes below; below one pipeline of the run, "
                "transfers and all. The last stage has the head besides its layer, so all others wait for it.",
            ),
            Picture(
                activations_figure(shown.window, timeline=shown.actions, title=name),
                "What each stage keeps for its backwards: the earlier it is, the more microbatches are under way.",
            ),
        ]
    return out


def _long_sequence_pictures(demo: Demo) -> list[Any]:
    from emu.view import Heading, Picture, attended_work_figure, ring_figure, timeline_figure
    from emu.view.units import time_text

    out: list[Any] = []
    cp, checkpoint = (demo.strategies.get(name) for name in ("cp", "checkpoint"))
    if cp is not None:
        cut = cut_of(cp)
        out += [
            Heading("Sequences over devices"),
            Picture(
                ring_figure(cut, width=8.5),
                "A column for every step of the ring: which keys and values lie with which device, and which of them its queries "
                "see. The two pieces of each make the areas alike.",
            ),
            Picture(
                attended_work_figure(cut, run=cp.window),
                f"Left what the cut says, right what the kernels of {cp.step[0]} did: shares of all, by device and step.",
            ),
        ]
    if checkpoint is not None and checkpoint is not demo.first:
        out += [
            Heading("Compute again"),
            Picture(
                timeline_figure(
                    checkpoint.scaled,
                    ranks=[0],
                    title=f"{checkpoint.name}: {time_text(checkpoint.scaled.step_time_s)} on {SCALED}, rank 0",
                ),
                "Each layer's input travels to the host in forward and back in backward, one layer ahead of where it is needed; "
                "there the layer runs forward again.",
            ),
        ]
    return out


def _inside_pictures(demo: Demo) -> list[Any]:
    from emu.view import Heading, Picture, routing_figure, timeline_figure
    from emu.view.units import time_text

    out: list[Any] = []
    sp, ep = (demo.strategies.get(name) for name in ("sp", "ep"))
    if sp is not None and sp is not demo.first:
        out += [
            Heading("Inside the layer"),
            Picture(
                timeline_figure(
                    sp.scaled,
                    ranks=[0],
                    title=f"{sp.name}: {time_text(sp.scaled.step_time_s)} on {SCALED}, rank 0",
                ),
                f"Every layer gathers its tokens and scatters its sums, twice. {sharing(sp)} In backward they run beside the "
                "products of the weights' gradients.",
            ),
        ]
    if ep is not None:
        out += [
            Heading("Who sends how much to whom"),
            Picture(
                routing_figure(
                    ep.run.results[0].sent, title=f"{ep.strategy.model}, the first layer's experts, {ep.step[0]}"
                ),
                "A row for every sender: to which device its tokens' choices go. Each device has one expert, so the busiest "
                "column is the expert that most tokens ask for, and all wait for it. A balance loss works against that.",
            ),
        ]
    return out
