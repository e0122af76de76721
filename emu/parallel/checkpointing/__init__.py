"""Activation checkpointing: what forward keeps, and what backward computes again; and keeping it in the host's memory.

For whoever moves what is kept (offload.py): `checkpointed(model, policy, keep=...)` takes the point through which every kept
tensor passes; keeping.py says what it must do.
"""

from emu.parallel.checkpointing.apply import checkpointed
from emu.parallel.checkpointing.keeping import Keep, in_place
from emu.parallel.checkpointing.offload import Offload, offloaded
from emu.parallel.checkpointing.policy import Policy, Segment
from emu.parallel.checkpointing.selective import CORES, checkpointed_modules

__all__ = [
    "CORES",
    "Keep",
    "Offload",
    "Policy",
    "Segment",
    "checkpointed",
    "checkpointed_modules",
    "in_place",
    "offloaded",
]
