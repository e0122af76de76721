"""What the demo says. Every number comes from its runs."""

from __future__ import annotations

from typing import Any

from emu.cost import Metrics
from emu.demo.batch_size import RANKS as RANKS_OF_SIZES
from emu.demo.findings import ROWS, SEQ, STATES, Demo, Shown, most_activations
from emu.demo.training import MICROBATCHES, RANKS
from emu.models import config
from emu.parallel.context import Cut, make_cut
from emu.parallel.pipeline import Schedule
from emu.parallel.pipeline.schedules import make
from emu.run import Run
from emu.trace.events import HostCopy, Kernel

OTHER_CHIP = "a100-8"  # the same trace priced there shows whether the chip matters
SCALED = f"{RANKS} scaled-down H100s"
LLAMA = "Llama 3 8B"


def summary(demo: Demo) -> Any:
    """One device, eight, and eight on which the toy behaves as a real model."""
    from emu.view.tables import comparison_table

    single = demo.single.window(f"step {len(demo.single.results[0].losses) - 1}", "end")
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
        rows.append(
            (
                shown.name,
                "bit for bit" if shown.exact else "NO",
                bytes_text(_states(shown)),
                bytes_text(shown.peak_bytes),
                bytes_text(sum(shown.metrics.comm_bytes.values())),
                time_text(scaled.step_time_s),
                percent_text(scaled.exposed_comm_s / scaled.comm_s if scaled.comm_s else 0.0),
                shown.strategy.meaning,
            )
        )
    headers = ("", "equals 1 device", "states", "peak", "sent", "step", "exposed", "what it is")
    note = (
        "states: parameters, gradients and optimizer states of a device before the optimizer's step, in float32; peak: the "
        "most that one holds in a step; both of the fullest device; sent: in a step, by the one that sends most; exposed: the "
        f"share of communication, waiting for others included, that no kernel hides; that and the step's time on {SCALED}"
    )
    if other := [shown.name for shown in demo.strategies.values() if shown.strategy.model != demo.model]:
        note += f". {', '.join(other)} trains another model: its numbers do not compare with those above it"
    return Table(headers, rows, f"{_models(demo)} on {RANKS} devices", note, left=(0, 1, 7))


def _row(run: Run, metrics: Metrics) -> dict[str, Any]:
    """What the table shows. TFLOP/s would mean nothing on a scaled-down chip, HFU and dtype say nothing new, and what goes
    to the host goes in one strategy alone."""
    values = metrics.as_dict()
    for key in [key for key in values if key in ("tflops_per_device", "hfu", "dtype") or "host" in key]:
        del values[key]
    values["peak_hbm_bytes"] = [run.memory.peak_bytes(rank) for rank in run.trace.ranks]
    return values


def explain(demo: Demo) -> list[str]:
    """What the tables show, in sentences."""
    from emu.view.units import percent_text, time_text

    first = demo.first
    step, eight, scaled = first.window, first.metrics, first.scaled.metrics()
    one = demo.single.window(f"step {len(demo.single.results[0].losses) - 1}", "end").metrics
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
        f"{percent_text(scaled.mfu)}. {sharing(first)} Of {time_text(scaled.comm_s)} "
        f"of communication, waiting for others included, {time_text(scaled.exposed_comm_s)} are not hidden by kernels.",
    ]
    if len(demo.strategies) > 1:
        said.append(_stages(demo))
    said += _inside(demo) + _pipelines(demo) + _long_sequences(demo)
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


def _models(demo: Demo) -> str:
    return " and ".join(dict.fromkeys(shown.strategy.model for shown in demo.strategies.values()))


def filling(shown: Shown) -> str:
    """What fills the time on scaled-down chips, on average over ranks."""
    from emu.view.units import percent_text

    spans = [span for spans in shown.scaled.spans.values() for span in spans if span.kind == "collective"]
    ends_s = len(shown.scaled.spans) * shown.scaled.step_time_s
    waiting = sum(span.moves_s - span.start_s for span in spans if span.stream == "default") / ends_s
    said = f"kernels run for {percent_text(shown.scaled.metrics().busy_fraction)} of the time"
    if waiting >= 0.01:  # less is not seen
        said += f", and for {percent_text(waiting)} a device waits for others (outlined in grey)"
    return said


def sharing(shown: Shown) -> str:
    """What travels when."""
    strategy = shown.strategy
    if "ep" in strategy.axes:
        return (
            "In every layer tokens travel to their experts and back; a device waits for both, and for the busiest one."
        )
    if strategy.schedule:
        return "Activations travel from stage to stage, and their gradients back; a stage without either waits."
    if "tp" in strategy.axes:
        return "In every layer partial sums travel between the 4 devices that share it, and those of forward are waited for."
    if strategy.context:
        return (
            f"In every layer keys and values go round among the {strategy.axes['cp']} devices that share a sequence, while "
            "each attends to those it has."
        )
    if strategy.checkpoint != "none":
        return (
            "In backward every layer first runs forward again, from its input, which comes back from the host; buckets of "
            "gradients are summed meanwhile."
        )
    if strategy.options.get("zero") == 3:
        return "Parameters are gathered one unit ahead, and gradients are summed while backward goes on."
    return "Buckets of gradients are summed while backward goes on."


def _states(shown: Shown) -> int:
    return sum(shown.states[kind] for kind in STATES)


def _sent(shown: Shown, among: str = "") -> int:
    return sum(n for label, n in shown.metrics.comm_bytes.items() if among in label)


def _stages(demo: Demo) -> str:
    from emu.view.units import bytes_text

    stages = {name: shown for name, shown in demo.strategies.items() if "dp" in name or "zero" in name}
    each = ", ".join(f"{name} {bytes_text(_states(shown))}" for name, shown in stages.items())
    return (
        f"Parameters, gradients and optimizer states of one device, before its optimizer's step: {each}. Of these, dp "
        f"sends {bytes_text(_sent(stages['dp']))} a step and zero1 and zero2 the same; zero3, which gathers parameters twice, "
        f"sends {bytes_text(_sent(stages['zero3']))}."
    )


def bubble(shown: Shown) -> tuple[float, float]:
    """What share of a step's forwards and backwards a pipeline's stages wait: on scaled-down chips, and by the schedule
    alone, F, I and W equally long."""
    from emu.parallel.pipeline import timed
    from emu.view.pipeline_bars import timed_run

    assert shown.actions is not None
    return timed_run(shown.actions).bubble_fraction, timed(schedule_of(shown)).bubble_fraction


def schedule_of(shown: Shown) -> Schedule:
    return make(shown.strategy.schedule, shown.strategy.axes["pp"], MICROBATCHES)


def _pipelines(demo: Demo) -> list[str]:
    from emu.view.units import bytes_text, percent_text

    said = []
    for name in ("pp", "zb"):
        if shown := demo.strategies.get(name):
            here, alone = map(percent_text, bubble(shown))
            said.append(
                f"{name} gives each of 4 devices a layer, and {MICROBATCHES} microbatches flow through them by the schedule "
                f"{shown.strategy.schedule}: states take {bytes_text(_states(shown))} of the fullest, and activations and their "
                f"gradients that travel {bytes_text(_sent(shown, 'pp'))} a step. Stages wait for {here} of the time on {SCALED}; "
                f"{alone} it would be if stages were alike, and backward twice as long as forward."
            )
    return said


def cut_of(shown: Shown) -> Cut:
    """Who has which tokens of a sequence."""
    return make_cut(shown.strategy.context, SEQ, shown.strategy.axes["cp"])


def _flops(run: Run, phase: str) -> int:
    kernels = (event for events in run.trace.events.values() for event in events if isinstance(event, Kernel))
    return sum(kernel.flops for kernel in kernels if kernel.phase == phase)


def _long_sequences(demo: Demo) -> list[str]:
    """Of the strategies that cut sequences, or keep less of them."""
    from emu.view.units import bytes_text, percent_text

    said, (cp, checkpoint) = [], (demo.strategies.get(name) for name in ("cp", "checkpoint"))
    if cp is not None:
        cut = cut_of(cp)
        works, naive = ([c.work(i) for i in range(c.ranks)] for c in (cut, make_cut("ring", SEQ, cut.ranks)))
        busiest, uneven = (percent_text(max(work) / sum(work)) for work in (works, naive))
        said.append(
            f"cp cuts every sequence of {SEQ} tokens over {cut.ranks} devices, {max(cut.sizes)} each, and the keys and values "
            f"of others come by: {bytes_text(_sent(cp, 'cp') - _sent(cp, 'dp'))} a step. One piece is from the front and one "
            f"from the back of a sequence (a zigzag), so each device has {busiest} of what is attended; of contiguous pieces "
            f"the last would have {uneven}."
        )
    if checkpoint is not None and demo.kept_bytes is not None:
        run = checkpoint.window
        copies = (event for event in run.trace.events[0] if isinstance(event, HostCopy))
        copied = bytes_text(sum(copy.bytes for copy in copies if copy.kind == "to_host"))
        forward, again = _flops(run, "forward"), _flops(run, "recompute")
        said.append(
            f"checkpoint keeps each layer's input, and most of these ({copied} of a device) wait in the host's memory; the rest "
            f"is computed again in backward. Activations take at most {bytes_text(most_activations(run))} of a device, where "
            f"dp's take {bytes_text(demo.kept_bytes)}. That is {percent_text(again / forward)} of forward's FLOPs once more. "
            f"Loss and gradients stay the same bits."
        )
    return said


def _inside(demo: Demo) -> list[str]:
    """Of the strategies that cut inside layers."""
    from emu.view.units import bytes_text, percent_text

    said, (tp, sp, ep) = [], (demo.strategies.get(name) for name in ("tp", "sp", "ep"))
    if tp is not None:
        said.append(
            f"tp cuts the weights of every layer over 4 devices: states take {bytes_text(_states(tp))} of each. Its partial sums "
            f"travel within the layer, {bytes_text(_sent(tp, 'tp'))} a step, more than the gradients, "
            f"{bytes_text(_sent(tp) - _sent(tp, 'tp'))}."
        )
    if sp is not None and demo.whole_tokens_bytes is not None:
        beside = [bytes_text(peak - _states(sp)) for peak in (demo.whole_tokens_bytes, sp.peak_bytes)]
        said.append(
            f"Under tp all 4 devices keep the same activations between the pairs of cut matrices. sp cuts those by tokens: what "
            f"is held at the peak, beside states, falls from {beside[0]} to {beside[1]}; states stay as they are."
        )
    if ep is not None:
        sent, model, travels = ep.run.results[0].sent, ep.strategy.model, bytes_text(_sent(ep, "ep"))
        loads = [sum(column) for column in zip(*sent)]
        stays, busiest = sum(sent[i][i] for i in range(RANKS)) / sum(loads), max(loads) * RANKS / sum(loads)
        said.append(
            f"ep trains {model}, whose layers have 8 experts, one on each device: of {config(model).n_params():,} parameters "
            f"each has {ep.states['parameters'] // 4:,}. In the first layer {percent_text(stays)} of what tokens ask for lies on "
            f"their device, and the rest travels: in all layers up to {travels} a step and device. Routing is "
            f"uneven: the first layer's busiest device gets {busiest:.2f} times the mean, and all others wait for it."
        )
    return said
