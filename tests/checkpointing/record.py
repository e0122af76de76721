"""What the record of a run says of activations: which blocks forwards and recomputations filled, and when these live."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import emu
from emu.trace.events import Alloc, Collective, Free, Kernel, Mark


class Block(NamedTuple):
    """A block of memory and the kernel that filled it."""

    scope: str
    op: str
    phase: str
    bytes: int


class Record(NamedTuple):
    """One rank's activations.

    Fields:
        after_forward: the blocks that live when the mark "backward" is set.
        at_peak: those that live when they take most.
    """

    after_forward: tuple[Block, ...]
    at_peak: tuple[Block, ...]

    @property
    def after_forward_bytes(self) -> int:
        return sum(block.bytes for block in self.after_forward)

    @property
    def peak_bytes(self) -> int:
        return sum(block.bytes for block in self.at_peak)


def activations(run: emu.Run, rank: int = 0) -> Record:
    """Of a program that marks "forward" and "backward": what kernels of these phases filled since: forward, recompute.

    A kernel's results are allocated right before it stands in the record. Categories play no part.
    """
    living: dict[int, Block] = {}
    unnamed: list[Alloc] = []
    after: tuple[Block, ...] = ()
    peak: tuple[Block, ...] = ()
    now = most = 0
    begun = False
    for event in run.trace[rank]:
        if isinstance(event, Mark):
            begun = begun or event.name == "forward"
            if event.name == "backward":
                after = tuple(living.values())
        elif isinstance(event, Alloc):
            unnamed.append(event)
        elif isinstance(event, Kernel | Collective):
            phase = event.phase if isinstance(event, Kernel) else "recompute" if living else ""
            scope, op = (event.scope, event.name) if isinstance(event, Kernel) else (event.name, event.kind)
            for made in unnamed:
                if begun and phase in ("forward", "recompute", ""):
                    living[made.block] = Block(scope, op, phase, made.bytes)
                    now += made.bytes
            unnamed = []
            if now > most:
                most, peak = now, tuple(living.values())
        elif isinstance(event, Free):
            unnamed = [made for made in unnamed if made.block != event.block]
            if (gone := living.pop(event.block, None)) is not None:
                now -= gone.bytes
    return Record(after, peak)


def layer_flops(run: emu.Run, phase: str, layers: str = "layers.", rank: int = 0) -> Counter[str]:
    """Floating point operations of a phase, by the layer that they belong to."""
    found: Counter[str] = Counter()
    for event in run.trace[rank]:
        if isinstance(event, Kernel) and event.phase == phase and event.scope.startswith(layers):
            found[".".join(event.scope.split(".")[:2])] += event.flops
    return found
