"""Advice on common slips, from what a run did: each is seen in its trace, and its gain priced by the model that priced the run.

What is not certain is left out. A gain is the step time of the run less that of the same run with one thing changed, so
what is hidden behind other work gains nothing, and is no advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeGuard

from emu.cost.buckets import joined
from emu.cost.kernels import is_attention, kernel_s
from emu.cost.simulate import price
from emu.cost.timeline import Timeline
from emu.trace.events import Collective, Event, HostWait, Kernel, Transfer
from emu.trace.memory import Memory
from emu.trace.trace import Trace
from emu.trace.units import bytes_text, count_text, percent_text, ranks_text, time_text

WORTH = 0.02  # of the step, or of the peak memory: what gains less is not worth a change
FASTER = {"tf32": "TF32", "bfloat16": "bfloat16", "float16": "float16"}  # what tensor cores compute in
ONE_NUMBER = 8  # bytes: a metric, not gradients
LEAST_REDUCED = 8  # bytes of optimizer states to one of gradients, at most: Adam's, with a copy of the weights, have 6
DELIBERATE = ("synchronize", "event")  # waits of the host that the program asks for


class Advice(NamedTuple):
    """One thing that would make a run faster or smaller, or right.

    Fields:
        kind: "float32 products", "small collectives", "host waits", "uneven means" or "replicated optimizer".
        what: what the run does, in words, with its figures.
        where: modules, groups or operations.
        hint: what to do.
        gain_s, gain: step time that it would save, in seconds and as a share of the step; None where it is not about time.
        gain_bytes: memory that it would save on every rank; None where it is not about memory.
    """

    kind: str
    what: str
    where: str
    hint: str
    gain_s: float | None = None
    gain: float | None = None
    gain_bytes: int | None = None

    def __str__(self) -> str:
        saved = ""
        if self.gain_s is not None and self.gain is not None:
            saved = f"; {time_text(self.gain_s)} ({percent_text(self.gain)} of the step) could be saved"
        elif self.gain_bytes is not None:
            saved = f"; {bytes_text(self.gain_bytes)} a rank could be saved"
        return f"{self.what} ({self.where}){saved}\n  hint: {self.hint}"


def advise(timeline: Timeline, memory: Memory | None = None) -> list[Advice]:
    """What would make a run better, largest gain first; nothing where nothing is certain.

    Args:
        timeline: a priced run. It is priced again for each change that its trace gives reason for.
        memory: its memory over time; None where it was not recorded.
    """
    if timeline.step_time_s <= 0:
        return []  # nothing ran
    found = [*_products(timeline), *_collectives(timeline), *_host_waits(timeline), *_means(timeline.trace)]
    if memory is not None:
        found += _optimizer(timeline.trace, memory)
    return sorted(found, key=lambda advice: -(advice.gain or 0.0))


def _gain_s(timeline: Timeline, change: Callable[[Sequence[Event]], Iterable[Event]]) -> float:
    """By how much the step is shorter with every rank's events changed."""
    trace = Trace(timeline.trace.axes, {rank: list(change(events)) for rank, events in timeline.trace.events.items()})
    return timeline.step_time_s - price(trace, timeline.cluster, timeline.launch_mode, timeline.contention).step_time_s


# Time.


def _products(timeline: Timeline) -> list[Advice]:
    """Products in float32 on a chip whose tensor cores would compute them in less."""
    chip, step_s = timeline.cluster.chip, timeline.step_time_s
    have = [d for d in FASTER if d in chip.peak_flops and chip.flops_per_s(d) > 1.5 * chip.flops_per_s("float32")]
    slow = {r: [e for e in events if isinstance(e, Kernel) and _slow(e)] for r, events in timeline.trace.events.items()}
    busy_s = {rank: sum(kernel_s(e, chip) for e in kernels) for rank, kernels in slow.items()}
    most = max(busy_s, key=busy_s.__getitem__, default=None)
    if not have or most is None or busy_s[most] < WORTH * step_s:
        return []
    gains_s = {d: _gain_s(timeline, lambda es, d=d: (e._replace(dtype=d) if _slow(e) else e for e in es)) for d in have}
    best = max(have, key=lambda d: (gains_s[d], d != "float16"))
    if gains_s[best] < WORTH * step_s:
        return []
    times_s: dict[str, float] = {}
    for e in slow[most]:
        times_s[e.scope or e.name] = times_s.get(e.scope or e.name, 0.0) + kernel_s(e, chip)
    where = sorted(times_s, key=times_s.__getitem__, reverse=True)
    saved = ", ".join(f"{FASTER[d]} {time_text(gains_s[d])}" for d in have)
    how = (
        'compute in bfloat16 (precision="bf16-mixed", or a model.to(torch.bfloat16) with float32 copies of the weights)'
    )
    if "tf32" in have:
        how += '; or keep float32 and allow TF32, torch.set_float32_matmul_precision("high"), which rounds to 10 bits'
    return [
        Advice(
            "float32 products",
            f"matrix products in float32 take {percent_text(busy_s[most] / step_s)} of the step, and run on ordinary cores: "
            f"on the tensor cores of {chip.name}, {saved} less",
            _some(where),
            how,
            gains_s[best],
            gains_s[best] / step_s,
        )
    ]


def _slow(event: Event) -> bool:
    return isinstance(event, Kernel) and event.dtype == "float32" and (bool(event.dims) or is_attention(event))


def _collectives(timeline: Timeline) -> list[Advice]:
    """All-reduces so small and so many that their latency is most of what they cost."""
    changed, counted = joined(timeline.trace, timeline.cluster)
    if not counted:
        return []
    saved_s = (
        timeline.step_time_s - price(changed, timeline.cluster, timeline.launch_mode, timeline.contention).step_time_s
    )
    if saved_s < WORTH * timeline.step_time_s:
        return []
    before, after = sum(n for n, _ in counted.values()), sum(n for _, n in counted.values())
    return [
        Advice(
            "small collectives",
            f"{count_text(before, 'all-reduce')} a rank are so small that latency is most of their time; {after} would do",
            _some([f"{group}.all_reduce" for group in counted]),
            "reduce them together: one flat buffer for all gradients, or buckets of some 25 MB as emu.DataParallel has",
            saved_s,
            saved_s / timeline.step_time_s,
        )
    ]


def _host_waits(timeline: Timeline) -> list[Advice]:
    """Values that the host reads, for which it stands still while it could launch what comes next."""

    def stalls(e: Event) -> TypeGuard[HostWait]:
        return isinstance(e, HostWait) and not e.reason.startswith(DELIBERATE)

    reasons = [e.reason for events in timeline.trace.events.values() for e in events if stalls(e)]
    if not reasons:
        return []
    saved_s = _gain_s(timeline, lambda events: (e for e in events if not stalls(e)))
    if saved_s < WORTH * timeline.step_time_s:
        return []
    each = -(-len(reasons) // max(len(timeline.trace.events), 1))
    read = ".item(), float(x) or `if x`" if "_local_scalar_dense" in reasons else "a value that the host needs"
    return [
        Advice(
            "host waits",
            f"the host reads values of the device {each} times a rank, and launches nothing until they are there",
            _some(sorted({read if r == "_local_scalar_dense" else r for r in reasons})),
            "keep losses and norms on the device, and read them once, after the step; choose with torch.where instead of `if`",
            saved_s,
            saved_s / timeline.step_time_s,
        )
    ]


# Right, and small.


def _means(trace: Trace) -> list[Advice]:
    """A mean over ranks that did not have the same amount of work: it weighs every rank alike, whatever its batch."""
    work = {rank: _tokens(events) for rank, events in trace.events.items()}
    for rank, events in trace.events.items():
        for e in events:
            if not isinstance(e, Collective) or e.op != "avg" or e.bytes <= ONE_NUMBER or not _over_data(e, trace):
                continue
            shares = {m: sum(work[m]) for m in e.members if m in work}
            alike = len({len(work[m]) for m in shares}) == 1  # else some rank computed something more, for itself
            if alike and len(set(shares.values())) > 1 and all(shares.values()):
                few, many = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
                return [
                    Advice(
                        "uneven means",
                        f'op="avg" weighs ranks alike, but rank {few} had {percent_text(shares[few] / shares[many])} of the '
                        f"work of rank {many}: unless the program weighs their parts itself, that is a mean of means, where the "
                        "mean over all tokens belongs",
                        f"{e.group}.{e.kind}" + (f" {e.name!r}" if e.name else f" number {e.seq} of rank {rank}"),
                        'sum losses and gradients (op="sum"), and divide once by the number of tokens of all ranks',
                    )
                ]
    return []


def _over_data(event: Collective, trace: Trace) -> bool:
    """Whether the members of its group differ in their data alone: not in layers, nor in pieces of them."""
    axes = [axis for axis, size in trace.axes.items() if size > 1] if event.group == "world" else event.group.split("+")
    return event.kind in ("all_reduce", "reduce", "reduce_scatter") and set(axes) <= {"dp", "cp"} and bool(axes)


def _tokens(events: Sequence[Event]) -> list[int]:
    """Work of each plain product in forward: it grows with tokens alone; that of attention grows with their square."""
    return [e.flops for e in events if isinstance(e, Kernel) and e.phase == "forward" and e.dims and e.dims[0] == 1]


def _optimizer(trace: Trace, memory: Memory) -> list[Advice]:
    """Ranks that keep the same optimizer states: none is ever sent parameters, so each updates all of them by itself."""
    size = trace.axes.get("dp", 1)
    kinds = set().union(*(_kinds_over_data(trace, rank) for rank in trace.ranks)) if size > 1 else set()
    if "all_reduce" not in kinds or kinds - {"all_reduce", "barrier"}:
        return []
    held = {rank: memory.at_peak(rank).get("optimizer", 0) for rank in trace.ranks}
    most = max(held, key=held.__getitem__)
    saved = held[most] * (size - 1) // size
    reduced = sum(e.bytes for e in trace.events[most] if isinstance(e, Collective) and e.kind == "all_reduce")
    if reduced * LEAST_REDUCED < held[most]:
        return []  # not the gradients of what they keep: every rank may have a model of its own
    if not saved or saved < 5 * WORTH * memory.peak_bytes(most):
        return []
    same = [rank for rank in trace.ranks if held[rank] == held[most]]
    return [
        Advice(
            "replicated optimizer",
            f"all {size} ranks of dp keep the same optimizer states, {bytes_text(held[most])} each",
            f"rank{'s' * (len(same) > 1)} {ranks_text(same)}",
            f"shard them with ZeRO-1: emu.DataParallel(model, rank, zero=1); each then keeps 1/{size}, for the same traffic",
            gain_bytes=saved,
        )
    ]


def _kinds_over_data(trace: Trace, rank: int) -> set[str]:
    """The kinds of communication between ranks with different data, from the first backward on."""
    along = set(trace.axes) - {"dp"}
    backward, kinds = False, set()
    for e in trace.events[rank]:
        backward = backward or (isinstance(e, Kernel) and e.phase == "backward")
        if backward and isinstance(e, (Collective, Transfer)) and not set(e.group.split("+")) <= along:
            kinds.add(e.kind)
    return kinds


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
