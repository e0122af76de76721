"""What a record's events are called."""

from __future__ import annotations

from emu.trace.events import (
    Collective,
    Event,
    EventRecord,
    EventWait,
    HostCopy,
    HostWait,
    Kernel,
    Mark,
    Transfer,
    Wait,
)


def in_words(event: Collective | Transfer) -> str:
    """A communication as messages call it: "dp.all_reduce number 3"."""
    if isinstance(event, Collective):
        return f"{event.group}.{event.kind} number {event.seq}"
    return f"{event.group}.{event.kind} number {event.seq} {event.src}->{event.dst}"


def on_stream(event: Event) -> str:
    """What a stream was given, in short: "mm", "dp.all_reduce", "wait"."""
    match event:
        case Kernel():
            return event.name
        case Collective() | Transfer():
            return f"{event.group}.{event.kind}"
        case HostCopy():
            return event.kind
        case Wait() | EventWait():
            return "wait"
        case EventRecord():
            return f"event {event.event}"
        case _:
            return type(event).__name__


def as_step(event: Event, awaited: str = "") -> tuple[str, ...] | None:
    """An event as a step: kind, name, group, given, scope, phase, stream, line, detail, label, as of a program that is stepped.

    None of what happens within a step: memory that begins to live or dies, and what stands in the record for proofs.

    Args:
        awaited: what a wait waits for, in words.
    """
    match event:
        case Kernel(name=name, scope=scope, phase=phase, stream=stream, dtype=dtype):
            size = f"{event.flops:,} flops" if event.flops else f"{event.bytes:,} bytes"
            return ("kernel", name, "", "", scope, phase, stream, "", f"{dtype}, {size}" if dtype else size, name)
        case Collective(kind=kind, group=group, name=given, stream=stream):
            detail = " ".join(filter(None, (event.dtype, f"{event.bytes:,} bytes", event.op, event.algorithm)))
            return ("collective", kind, group, given, "", "", stream, "", detail, f"{group}.{kind}")
        case Transfer(kind=kind, group=group, name=given, stream=stream):
            toward = f"to rank {event.dst}" if kind == "send" else f"from rank {event.src}"
            detail = f"{kind} {toward} {event.dtype}, {event.bytes:,} bytes"
            return ("transfer", kind, group, given, "", "", stream, "", detail, f"{group}.{kind}")
        case HostCopy(kind=kind, name=given, stream=stream):
            return ("host copy", kind, "", given, "", "", stream, "", f"{event.dtype}, {event.bytes:,} bytes", kind)
        case Wait(stream=stream):
            what = awaited or "a communication that began before"
            return ("wait", "wait", "", what, "", "", stream, "", "", f"wait for {what}")
        case EventRecord(stream=stream, event=number) | EventWait(stream=stream, event=number):
            name = "record event" if isinstance(event, EventRecord) else "wait for event"
            return ("event", name, "", "", "", "", stream, "", f"number {number}", f"{name} {number}")
        case HostWait(stream=stream, reason=reason):
            return ("host", "host waits", "", reason, "", "", stream, "", "", f"host waits: {reason}")
        case Mark(name=name):
            return ("mark", name, "", "", "", "", "", "", "", f"mark {name}")
        case _:
            return None
