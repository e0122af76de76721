"""Prices a trace on a cluster: a discrete-event simulation of hosts, streams, devices and links.

CUDA's and NCCL's rules: the host of each rank launches one thing after another and runs ahead of its streams; a
stream does its work in order; streams are ordered among each other by events and waits alone; the kernel of a
collective starts when its own stream reaches it and the work issued before it is done, then waits for the other
members, then moves data.

What runs at one time shares what it runs on, and alone takes what the price list says:

* Communication takes compute of its devices: while it moves data `Chip.overlap_loss`, and while its kernel waits for
  others the cores that it holds (emu.cost.loads, with sources). Transfers to other nodes hold few cores, copies to the
  host none. It takes memory bandwidth by the bytes that arrive. So kernels beside it are slower; it is not slowed by them.
* Kernels of several streams share their device (emu.cost.devices).
* Messages share links: a device's own to its node, to the network and to its host, and what leads up from a pod
  (emu.cost.links: max-min fair rates; emu.cost.loads: who takes what of which).

A kernel or message that shares nothing ends exactly when it would in a simulation without all this
(`contention=False`). Sharing can turn things round: where a kernel comes first that nobody waits for, what makes one
thing faster may make the whole slower, as in all list scheduling (Graham 1969, doi 10.1137/0117039).

Not modelled: clocks that fall as power rises, beyond what the fitted rates hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from emu.cost.devices import KernelCost
from emu.cost.engine import Engine
from emu.cost.errors import PricingError
from emu.cost.meetings import Half
from emu.cost.streams import COLLECTIVE, COPY, TRANSFERS, WAIT, RankState, Token
from emu.cost.stuck import check_all_done
from emu.cost.timeline import Timeline
from emu.hardware import Cluster
from emu.trace.events import (
    Alloc,
    At,
    Choice,
    Collective,
    EventRecord,
    EventWait,
    Free,
    HostCopy,
    HostFree,
    HostWait,
    Kernel,
    Mark,
    Recategorise,
    Transfer,
    Use,
    Wait,
)
from emu.trace.trace import Trace

LAUNCH_MODES = ("eager", "compiled", "graph")
NO_TIME = frozenset((Alloc, Free, HostFree, Recategorise, Mark, Use, At, Choice))


def price(trace: Trace, cluster: Cluster, launch_mode: str = "eager", contention: bool = True) -> Timeline:
    """Says when everything in a trace happens on a cluster. The trace does not change: price it again elsewhere.

    Args:
        trace: what the ranks did; rank r runs on device r. Members of a group that have no events (symbolic ranks)
            arrive on time.
        cluster: what it runs on.
        launch_mode: how long the host takes to launch a kernel. "eager": `host.launch_s` each; "compiled": the shorter
            `host.compiled_launch_s` each (that compiled code has fewer kernels is for the trace to say); "graph": the
            whole trace of a rank is one captured graph, launched once in `host.graph_launch_s`.
        contention: False lets everything run at full speed, as if it shared nothing: what is slower with it is what
            sharing costs.

    Raises:
        ValueError: there is no such launch mode.
        PricingError: a rank has no device, or the chip or the cost model does not know a dtype or a collective.
        NeverCompletes: ranks wait for each other for ever, or for one whose record ends too early.
    """
    if launch_mode not in LAUNCH_MODES:
        raise ValueError(f"no launch mode {launch_mode!r}; choose one of {', '.join(map(repr, LAUNCH_MODES))}")
    top = max(trace.events, default=0)
    if top >= cluster.n_devices:
        raise PricingError(
            f"rank {top} has no device: {cluster.name} has {cluster.n_devices}",
            f"price the trace on a cluster of at least {top + 1} devices",
            rank=top,
        )
    states = {rank: RankState(rank, list(events)) for rank, events in trace.events.items()}
    engine = Engine(cluster, states, contention)
    host = cluster.host
    launch_s = {"eager": host.launch_s, "compiled": host.compiled_launch_s, "graph": 0.0}[launch_mode]
    if launch_mode == "graph":
        for state in states.values():
            state.host = host.graph_launch_s
    costs: dict[tuple, KernelCost] = {}
    for state in states.values():
        _launch(state, engine, launch_s, costs)
    engine.run()
    while engine.runnable:
        _launch(engine.runnable.popleft(), engine, launch_s, costs)
        engine.run()
    check_all_done(engine)
    return Timeline(
        trace=trace,
        cluster=cluster,
        launch_mode=launch_mode,
        contention=contention,
        _starts={rank: s.starts for rank, s in states.items()},
        _ends={rank: s.ends for rank, s in states.items()},
        _moves={rank: s.moves for rank, s in states.items()},
        _hosts={rank: s.hosts for rank, s in states.items()},
        _costs={rank: s.costs for rank, s in states.items()},
    )


def _launch(state: RankState, engine: Engine, launch_s: float, known_costs: dict[tuple, KernelCost]) -> None:
    """Runs one rank's host until its record ends, or until it waits for a time that is not known yet.

    This loop is much of the price of a trace: it keeps to plain tuples and numbers (Kernel is name, scope, phase, flops,
    bytes, dtype, dims, stream).
    """
    events, host_s, chip = state.events, state.host, engine.cluster.chip
    costs, note_host = state.costs, state.hosts.append
    if state.until:  # the host was waiting
        times_s: list[Any] = [token.value for token in state.until]  # known by now
        host_s = max(host_s, *times_s)
        state.until = []
        note_host(host_s)
    posted = -1  # the last transfer that was posted together with earlier ones
    on, push = None, note_host  # the stream that was given a kernel last, and how to give it more
    for index, event in enumerate(islice(events, state.index, None), state.index):
        kind = type(event)
        if kind is Kernel:
            name, _, phase, flops, size, dtype, dims, stream = event
            host_s += launch_s
            key = (name, phase, flops, size, dtype, dims)
            cost = known_costs.get(key)
            if cost is None:
                cost = known_costs[key] = KernelCost(event, chip)
            costs[index] = cost
            if stream != on:
                on, push = stream, engine.lane(state, stream).queue.append
            push(index)
        elif kind in NO_TIME:
            pass
        elif kind is Collective:
            if len(event.members) > 1:  # a group of one is free
                host_s += launch_s
            needed = state.position(event.after) if event.after != event.stream else 0.0
            token = state.works[event.work] = Token()
            engine.lane(state, event.stream).queue.append((COLLECTIVE, needed, index, host_s, event, token))
        elif kind is Wait or kind is EventWait:
            number, stream = event
            known = (state.works if kind is Wait else state.marks).get(number)
            if known is None:
                raise _unknown(state.id, index, event)
            engine.lane(state, stream).queue.append((WAIT, known))
        elif kind is EventRecord:
            state.marks[event.event] = state.position(event.stream)
        elif kind is Transfer:
            host_s += launch_s
            if index > posted:
                together = _together(events, index, host_s, launch_s)
                posted = together[-1].index
                for half in together:
                    state.works[half.event.work] = half.done
                needed = state.position(event.after) if event.after != event.stream else 0.0
                for stream in dict.fromkeys(half.event.stream for half in together):
                    halves = [half for half in together if half.event.stream == stream]
                    engine.lane(state, stream).queue.append((TRANSFERS, needed, halves))
        elif kind is HostCopy:
            host_s += launch_s
            engine.lane(state, event.stream).queue.append((COPY, 0.0, index, host_s, event))
        elif kind is HostWait:
            waits: list[Any] = [state.position(s) for s in ((event.stream,) if event.stream else tuple(state.lanes))]
            state.until = [w for w in waits if type(w) is Token]
            host_s = max(host_s, *(w for w in waits if type(w) is not Token), 0.0)
            if state.until:
                state.unknown = len(state.until)
                for token in state.until:
                    token.waiters.append(state)
                state.index, state.host = index + 1, host_s
                engine.wake(state)
                return
        else:
            raise PricingError(
                f"rank {state.id}, event {index} is a {kind.__name__}, which no rule prices",
                "a trace holds only the events of emu.trace.events",
                rank=state.id,
                index=index,
            )
        note_host(host_s)
    state.index, state.host = len(events), host_s
    engine.wake(state)


def _together(events: Sequence, first: int, host_s: float, launch_s: float) -> list[Half]:
    """The transfers that are posted together with the first one: those that follow at once, if on streams of their own.

    NCCL runs them as one kernel (ncclGroupStart; torch's batch_isend_irecv): two ranks may each send before they
    receive, and messages in one direction share the device's link. A transfer on the stream that it was issued from
    is alone: what follows it there comes after it.
    """
    head = events[first]
    posted = [(first, head)]
    if head.stream != head.after:
        for index in range(first + 1, len(events)):
            event = events[index]
            if type(event) is Transfer and event.after == head.after != event.stream:
                posted.append((index, event))
            elif type(event) not in NO_TIME:
                break
    total_bytes = {"send": 0, "recv": 0}
    for _, event in posted:
        if event.src != event.dst:
            total_bytes[event.kind] += event.bytes
    return [
        Half(index, host_s + i * launch_s, event, Token(), total_bytes[event.kind])
        for i, (index, event) in enumerate(posted)
    ]


def _unknown(rank: int, index: int, event: Wait | EventWait) -> PricingError:
    what = f"work {event.work}" if isinstance(event, Wait) else f"event {event.event}"
    return PricingError(
        f"rank {rank}, event {index} waits for {what}, which nothing before it started or recorded",
        "the trace is cut or edited: record the run again, and remove a collective only together with its waits",
        rank=rank,
        index=index,
    )
