"""Context parallelism: sequences cut over ranks, and attention across the cut."""

from emu.parallel.context.attending import attention
from emu.parallel.context.cut import KINDS, Cut, make_cut

__all__ = ["KINDS", "Cut", "attention", "make_cut"]
