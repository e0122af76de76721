"""A timeline as a Perfetto trace: a process for each rank with a track for its host and for each stream, arrows between
the parts of a communication, and device memory by category. Times are whole nanoseconds.

Source: https://perfetto.dev/docs/reference/synthetic-track-event (tracks, slices, flows and counters).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from emu.export.rows import rows_of
from emu.spmd import EmuError
from emu.trace.events import CATEGORIES, Collective, HostWait, Mark, Transfer
from emu.trace.memory import Memory

if TYPE_CHECKING:
    from emu.cost.timeline import Span, Timeline

MOST_S = 9e9  # whole nanoseconds in 63 bits
SEQUENCE = 1  # everything comes from one writer
BEGIN, END, INSTANT, COUNTER = "TYPE_SLICE_BEGIN", "TYPE_SLICE_END", "TYPE_INSTANT", "TYPE_COUNTER"


def perfetto_bytes(timeline: Timeline, memory: Memory | None = None) -> bytes:
    """The trace as a Perfetto file.

    Args:
        timeline: a priced trace.
        memory: of the same run; None leaves counters out.

    Raises:
        EmuError: the package `perfetto` is not installed; a step of centuries, whose nanoseconds no file holds.
    """
    if timeline.step_time_s >= MOST_S:
        raise EmuError(
            f"it takes {timeline.step_time_s:.3g} s, and a Perfetto file holds up to {MOST_S:.3g} s",
            "look for a kernel or a message of far too many bytes: run.timeline().spans",
        )
    return _Writer(timeline, memory).written()


class _Writer:
    def __init__(self, timeline: Timeline, memory: Memory | None) -> None:
        try:
            from perfetto.trace_builder.proto_builder import TraceProtoBuilder
        except ImportError as error:
            hint = "pip install 'emu[trace]', or write a Chrome trace, which Perfetto reads, too"
            raise EmuError("Perfetto files need the package perfetto", hint) from error
        self._builder: Any = TraceProtoBuilder()
        self._timeline, self._memory = timeline, memory
        self._tracks = 0
        self._flows: dict[tuple[Any, ...], int] = {}  # what a communication is known by -> its number

    def written(self) -> bytes:
        for rank in self._timeline.trace.ranks:
            self._rank(rank)
        return self._builder.serialize()

    def _rank(self, rank: int) -> None:
        timeline, spans = self._timeline, self._timeline.spans[rank]
        process = self._track(f"rank {rank}", None)
        process.process.pid = rank + 1  # 0 is the system's idle process
        process.process.process_name = f"rank {rank}"
        self._host(rank, self._track("host", process.uuid).uuid)
        for row in rows_of(spans):
            track = self._track(f"stream {row.name}", process.uuid).uuid
            for span in row.spans:
                self._slice(track, span, timeline.trace[rank][span.index])
        if self._memory is not None:
            self._counters(rank, process.uuid)

    def _host(self, rank: int, track: int) -> None:
        hosts = self._timeline.event_times(rank)
        spans = {span.index: span for span in self._timeline.spans[rank]}
        for i, event in enumerate(self._timeline.trace[rank]):
            began = hosts[i - 1] if i else 0.0
            if isinstance(event, Mark):
                self._event(INSTANT, track, hosts[i]).name = _text(event.name)
            elif hosts[i] > began and (i in spans or isinstance(event, HostWait)):
                name = _reason(event) if isinstance(event, HostWait) else f"launch {spans[i].name}"
                self._event(BEGIN, track, began).name = _text(name)
                self._event(END, track, hosts[i])

    def _slice(self, track: int, span: Span, event: Any) -> None:
        begin = self._event(BEGIN, track, span.start_s)
        begin.name = _text(span.name)
        begin.categories.append(span.kind)
        for name, value in _about(span, event):
            note = begin.debug_annotations.add()
            note.name = name
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = _text(value)
        key = _key(event)
        if key is not None:
            begin.flow_ids.append(self._flows.setdefault(key, len(self._flows) + 1))
        self._event(END, track, span.end_s)

    def _counters(self, rank: int, process: int) -> None:
        assert self._memory is not None
        hosts = self._timeline.event_times(rank)
        indices, lines = self._memory.series(rank)
        for category in CATEGORIES:
            if not any(lines[category]):
                continue
            counter = self._track(f"HBM {category}", process)
            counter.counter.unit = counter.counter.Unit.UNIT_SIZE_BYTES
            before = None
            for i, value in zip(indices, lines[category]):
                if value != before:
                    self._event(COUNTER, counter.uuid, hosts[i]).counter_value = value
                    before = value

    def _track(self, name: str, parent: int | None) -> Any:
        """A new track's descriptor, in a packet of its own."""
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        self._tracks += 1
        track = packet.track_descriptor
        track.uuid, track.name = self._tracks, _text(name)
        if parent is not None:
            track.parent_uuid = parent
        return track

    def _event(self, kind: str, track: int, time_s: float) -> Any:
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.timestamp = nanoseconds(time_s)
        event = packet.track_event
        event.type = event.Type.Value(kind)
        event.track_uuid = track
        return event


def nanoseconds(time_s: float) -> int:
    """A time, rounded to whole nanoseconds."""
    return round(time_s * 1e9)


def _text(name: str) -> str:
    """The name, with "?" for what is no text: half a surrogate pair, say."""
    return name.encode(errors="replace").decode()


def _reason(event: HostWait) -> str:
    return f"wait: {event.reason} ({event.stream})" if event.stream else f"wait: {event.reason}"


def _key(event: Any) -> tuple[Any, ...] | None:
    """What the parts of one communication on several ranks have in common."""
    if isinstance(event, Collective):
        return "collective", event.group, event.members, event.seq
    if isinstance(event, Transfer):
        return "transfer", event.group, event.src, event.dst, event.seq
    return None


def _about(span: Span, event: Any) -> Iterator[tuple[str, int | str]]:
    """What a slice shows when it is chosen."""
    fields = ("kind", "scope", "phase", "flops", "bytes", "dtype", "group", "members", "src", "dst", "seq", "op")
    for field in fields:
        value = getattr(event, field, "")
        if value not in ("", ()):
            yield field, value if isinstance(value, int) else str(value)
    if span.moves_s > span.start_s:
        yield "waited for others (ns)", nanoseconds(span.moves_s) - nanoseconds(span.start_s)
