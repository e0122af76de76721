"""Perfetto files keep the rules by which trace_processor imports them, stated again from its documentation.

https://perfetto.dev/docs/reference/synthetic-track-event: a sequence id in every packet; a track's descriptor before its
events, its parent's before its own; slices of a track that nest, begun and ended in order of time; counters on counter tracks
alone. Nothing is interned, so no packet needs the incremental state of another.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from emu.cost import price
from emu.export import perfetto_bytes
from emu.spmd import EmuError
from emu.trace.events import Kernel
from emu.trace.memory import Memory
from emu.trace.trace import Trace

from .exported import TOY, traces


def broken_rules(content: bytes) -> list[str]:
    trace = protos.Trace()
    trace.ParseFromString(content)
    event, broken = protos.TrackEvent, []
    counters: dict[int, bool] = {}  # track -> whether it counts
    open_: dict[int, int] = {}
    last: dict[int, int] = {}

    def rule(kept: Any, what: str) -> None:
        if not kept:
            broken.append(what)

    for packet in trace.packet:
        rule(packet.trusted_packet_sequence_id > 0, "a packet has no sequence")
        rule(not packet.HasField("interned_data"), "interned data without incremental state")
        track, shown = packet.track_descriptor, packet.track_event
        if packet.HasField("track_descriptor"):
            rule(track.uuid and track.uuid not in counters, "a track is described twice, or is 0")
            rule(not track.HasField("parent_uuid") or track.parent_uuid in counters, "a parent comes later")
            rule(not track.HasField("process") or track.process.pid > 0, "a process is the idle one")
            counters[track.uuid] = track.HasField("counter")
            continue
        at = shown.track_uuid
        rule(at in counters, "an event is on no track")
        rule(0 <= packet.timestamp < 1 << 63, "a time is none")
        rule(packet.timestamp >= last.get(at, 0), "a track goes back in time")
        rule(
            counters.get(at) == (shown.type == event.TYPE_COUNTER),
            "a counter is among slices, or a slice among counters",
        )
        rule(all(shown.flow_ids), "a flow is 0")
        last[at] = packet.timestamp
        open_[at] = open_.get(at, 0) + {event.TYPE_SLICE_BEGIN: 1, event.TYPE_SLICE_END: -1}.get(shown.type, 0)
        rule(open_[at] >= 0, "a slice ends that did not begin")
    rule(not any(open_.values()), "a slice never ends")
    return broken


@given(traces())
@settings(max_examples=25, deadline=None)
def test_no_rule_is_broken(trace):
    assert broken_rules(perfetto_bytes(price(trace, TOY), Memory(trace))) == []


def test_a_broken_rule_is_noticed():
    """The negative control: the same packets, each one left out in turn, or all backwards."""
    events = [Kernel("mm", "", "", 0, 10**6, "float32", (), "default")] * 2
    whole = protos.Trace()
    whole.ParseFromString(perfetto_bytes(price(Trace({"dp": 1}, {0: events}), TOY)))
    for i in range(len(whole.packet)):
        other = protos.Trace()
        other.packet.extend([*whole.packet[:i], *whole.packet[i + 1 :]])
        assert broken_rules(other.SerializeToString())
    backwards = protos.Trace()
    backwards.packet.extend(reversed(whole.packet))
    assert broken_rules(backwards.SerializeToString())


def test_centuries_are_refused():
    events = [Kernel("mm", "", "", 0, (1 << 63) - 1, "float32", (), "default")] * 20_000
    with pytest.raises(EmuError, match="a Perfetto file holds up to"):
        perfetto_bytes(price(Trace({"dp": 1}, {0: events}), TOY))
