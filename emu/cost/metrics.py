"""What a run achieves on a cluster: utilisation, exposed communication, traffic, peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from emu.cost.collectives import sent_bytes
from emu.cost.energy import energy_j
from emu.cost.kernels import is_model_work
from emu.trace.events import Alloc, Collective, Free, HostCopy, HostFree, Kernel, Transfer
from emu.trace.units import bytes_text, metric_text, percent_text, time_text

if TYPE_CHECKING:
    from emu.cost.timeline import Timeline

FLOPS_CONVENTION = (
    "as executed: matrix products and attention kernels, a multiply-add is two; causal attention counts the pairs it "
    "attends; MFU leaves recomputation out, HFU counts it"
)


@dataclass(frozen=True)
class Metrics:
    """Sizes in bytes, times in seconds, fractions in 0-1. Devices are the ranks that have a record.

    Fields:
        step_time_s: the makespan of the whole trace.
        mfu: model flops utilisation: floating point operations of matrix products and attention outside recomputation,
            over what all devices could do at peak in `dtype` during the step (PaLM, arXiv 2204.02311, appendix B).
        hfu: the same with recomputation (hardware flops utilisation).
        dtype: what most of that work was computed in; its peak is the yardstick.
        tflops_per_device: the work that mfu counts, in 1e12 FLOP/s per device.
        exposed_comm_s: time in which communication of a rank runs, or waits for other ranks, and none of its kernels
            does; of the rank where it is longest.
        exposed_comm_fraction: that over step_time_s.
        comm_s: time in which communication of a rank runs or waits for others; of the rank where it is longest.
        busy_fraction: share of the step in which a device runs a kernel; mean over ranks.
        comm_bytes: by group label, bytes that the rank which sends most puts on links (rounded up to whole bytes).
        peak_hbm_bytes: by rank, in the order of the trace: the most that was allocated at once (requested bytes). None where
            memory was not recorded: of real devices, and of runs that were not tracked.
        host_copy_s, exposed_host_copy_s: time in which copies between a rank's device and its host run, and in which they
            do while none of its kernels does; each of the rank where it is longest.
        host_copy_bytes: "to_host" and "from_host", what the rank copies that copies most; empty if nobody copies.
        peak_host_bytes: by rank, the most that such copies held in host memory at once; None where memory was not recorded.
        kernel_hfu: the work that hfu counts, over what the devices could do at peak in the time in which kernels of such
            work (matrix products and attention) run: what those kernels reach, however long a device waits for them.
        energy_j: joules of all devices of the mesh, by emu.cost.energy's rough model; None where their power is not known.
        flops_convention: how operations are counted.
        tokens_per_s, tokens_per_s_per_device: None if the number of tokens was not given.
    """

    step_time_s: float
    mfu: float
    hfu: float
    dtype: str
    tflops_per_device: float
    exposed_comm_s: float
    exposed_comm_fraction: float
    comm_s: float
    busy_fraction: float
    comm_bytes: dict[str, int]
    peak_hbm_bytes: list[int] | None
    flops_convention: str = FLOPS_CONVENTION
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    host_copy_s: float = 0.0
    exposed_host_copy_s: float = 0.0
    host_copy_bytes: dict[str, int] = field(default_factory=dict)
    peak_host_bytes: list[int] | None = None
    kernel_hfu: float = 0.0
    energy_j: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        """Three lines, four where tensors visit the host; `as_dict` has all."""
        peaks = self.peak_hbm_bytes
        sent = ", ".join(f"{label} {bytes_text(n)}" for label, n in self.comm_bytes.items()) or "nothing"
        work = f"{metric_text(self.tflops_per_device * 1e12, 'FLOP/s')} per device"
        work += f" in {self.dtype}: MFU {percent_text(self.mfu)}" if self.dtype else ""
        work += f", HFU {percent_text(self.hfu)}" if self.hfu != self.mfu else ""
        tokens = f", {self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s is not None else ""
        hidden = f"{time_text(self.exposed_comm_s)} exposed ({percent_text(self.exposed_comm_fraction)} of the step)"
        copied = ", ".join(f"{kind.replace('_', ' ')} {bytes_text(n)}" for kind, n in self.host_copy_bytes.items())
        if copied:
            copied = (
                f"  host copies {time_text(self.host_copy_s)}, {time_text(self.exposed_host_copy_s)} exposed: {copied}"
            )
            held = self.peak_host_bytes
            copied += "\n" if held is None else f"; up to {bytes_text(max(held))} held there\n"
        return (
            f"Metrics(step {time_text(self.step_time_s)}{tokens}; {work}\n"
            f"  communication {time_text(self.comm_s)}, {hidden}; sent: {sent}\n"
            f"{copied}"
            f"  peak memory {'was not recorded' if peaks is None else bytes_text(max(peaks, default=0))})"
        )


def measure(timeline: Timeline, tokens: int | None = None, stand_for: Mapping[int, int] | None = None) -> Metrics:
    """The metrics of a timeline.

    Args:
        timeline: a priced trace.
        tokens: tokens that all ranks together trained on.
        stand_for: rank -> how many ranks it stands for, which do the same as it does; one by default.
    """
    trace, step_s = timeline.trace, timeline.step_time_s
    work: Counter[str] = Counter()  # by dtype, recomputation included
    recomputed: Counter[str] = Counter()
    comm_bytes: Counter[str] = Counter()
    copied_bytes: Counter[str] = Counter()
    exposed_s = comm_s = busy_s = working_s = copying_s = exposed_copying_s = 0.0
    for rank, events in trace.events.items():
        weight = stand_for[rank] if stand_for is not None else 1
        kernels: list[tuple[float, float]] = []
        matrix: list[tuple[float, float]] = []  # those whose work counts
        communication: list[tuple[float, float]] = []
        copies: list[tuple[float, float]] = []
        copied: Counter[str] = Counter()
        starts, ends = timeline._starts[rank], timeline._ends[rank]
        for i, event in enumerate(events):
            if type(event) is Kernel:
                kernels.append((starts[i], ends[i]))
                if event.flops and is_model_work(event):
                    work[event.dtype] += weight * event.flops
                    matrix.append((starts[i], ends[i]))
                    if event.phase == "recompute":
                        recomputed[event.dtype] += weight * event.flops
            elif type(event) is Collective or type(event) is Transfer:
                communication.append((starts[i], ends[i]))
            elif type(event) is HostCopy:
                copies.append((starts[i], ends[i]))
                copied[event.kind] += event.bytes
        running, talking = _union(kernels), _union(communication)
        working_s += weight * _length(_union(matrix))
        busy_s += weight * _length(running)
        comm_s = max(comm_s, _length(talking))
        exposed_s = max(exposed_s, _length(_union([*running, *talking])) - _length(running))
        copying = _union(copies)
        copying_s = max(copying_s, _length(copying))
        exposed_copying_s = max(exposed_copying_s, _length(_union([*running, *copying])) - _length(running))
        copied_bytes |= copied
        for label, sent in sent_by(lambda event: event.group, rank, events).items():
            comm_bytes[label] = max(comm_bytes[label], sent)
    ranks = max(sum(stand_for[rank] for rank in trace.events) if stand_for is not None else len(trace.events), 1)
    dtype = max(sorted(work), key=work.__getitem__, default="")
    done, again = sum(work.values()), sum(recomputed.values())
    chip = timeline.cluster.chip
    peak = chip.peak(dtype) if dtype else 0.0
    could, could_working = step_s * ranks * peak, working_s * peak
    devices = prod(trace.axes.values()) or ranks
    peaks_bytes = _peaks_bytes(trace.events.values())
    busy = busy_s / ranks / step_s if step_s else 0.0
    return Metrics(
        step_time_s=step_s,
        mfu=(done - again) / could if could else 0.0,
        hfu=done / could if could else 0.0,
        dtype=dtype,
        tflops_per_device=(done - again) / step_s / ranks / 1e12 if step_s else 0.0,
        exposed_comm_s=exposed_s,
        exposed_comm_fraction=exposed_s / step_s if step_s else 0.0,
        comm_s=comm_s,
        busy_fraction=busy,
        comm_bytes=dict(+comm_bytes),  # a group of one sends nothing
        peak_hbm_bytes=peaks_bytes,
        tokens_per_s=tokens / step_s if tokens is not None and step_s else None,
        tokens_per_s_per_device=tokens / step_s / devices if tokens is not None and step_s else None,
        host_copy_s=copying_s,
        exposed_host_copy_s=exposed_copying_s,
        host_copy_bytes=dict(copied_bytes),
        peak_host_bytes=None if peaks_bytes is None else [_peak_host_bytes(e) for e in trace.events.values()],
        kernel_hfu=done / could_working if could_working else 0.0,
        energy_j=energy_j(chip, devices, step_s, busy),
    )


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same time, in order."""
    out: list[tuple[float, float]] = []
    first, last = 0.0, -1.0
    for start, end in sorted(intervals):
        if start > last:
            if last >= first:
                out.append((first, last))
            first, last = start, end
        elif end > last:
            last = end
    if last >= first:
        out.append((first, last))
    return out


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def sent_by(name: Callable[[Collective | Transfer], str], rank: int, events: Iterable) -> dict[str, int]:
    """Bytes that a rank puts on links, by what its groups are called, rounded up once at the end.

    Args:
        name: of a group, by a call of its; asked once for calls that are equal.
    """
    counts: Counter[tuple] = Counter()  # equal calls are counted, then computed once
    first: dict[tuple, Collective | Transfer] = {}
    for event in events:
        if type(event) is Collective:
            key: tuple = (event.group, event.kind, event.bytes, event.sizes, event.root, id(event.members))
        elif type(event) is Transfer:
            key = (event.group, event.kind, event.bytes, event.src, event.dst)
        else:
            continue
        counts[key] += 1
        first.setdefault(key, event)
    totals: dict[str, Any] = {}
    for key, count in counts.items():
        called = name(first[key])
        totals[called] = totals.get(called, 0) + count * sent_bytes(first[key], rank)
    return {label: ceil(total) for label, total in totals.items()}


def _peaks_bytes(ranks: Iterable[Iterable]) -> list[int] | None:
    """By rank; None if nobody allocated anything, which says that memory was not recorded."""
    peaks = [_peak_bytes(events) for events in ranks]
    return peaks if any(peaks) else None


def _peak_bytes(events: Iterable) -> int:
    now = peak = 0
    for event in events:
        if type(event) is Alloc:
            now += event.bytes
            peak = max(peak, now)
        elif type(event) is Free:
            now -= event.bytes
    return peak


def _peak_host_bytes(events: Iterable) -> int:
    now = peak = 0
    for event in events:
        if type(event) is HostCopy and event.kind == "to_host":
            now += event.bytes
            peak = max(peak, now)
        elif type(event) is HostFree:
            now -= event.bytes
    return peak
