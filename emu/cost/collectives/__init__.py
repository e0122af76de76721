"""How long a collective or a transfer moves data, by which algorithm and protocol, and over which wires.

One price, two callers: `collective_s` for an event of a trace, `moving_s` for bytes and a placement.
"""

from emu.cost.collectives.choice import Choice, choose, moving_s
from emu.cost.collectives.events import collective_s, transfer_s
from emu.cost.collectives.kinds import ALGORITHMS, KINDS
from emu.cost.collectives.placement import Level, Placement, place, place_evenly
from emu.cost.collectives.steps import Step, steps
from emu.cost.collectives.volumes import sent_bytes
from emu.cost.collectives.wires import wire_bytes

__all__ = [
    "ALGORITHMS",
    "KINDS",
    "Choice",
    "Level",
    "Placement",
    "Step",
    "choose",
    "collective_s",
    "moving_s",
    "place",
    "place_evenly",
    "sent_bytes",
    "steps",
    "transfer_s",
    "wire_bytes",
]
