"""Context parallelism: sequences cut over ranks, and attention across the cut.

Read cut.py first: who holds which tokens (holding.py, dealing.py), and which rectangles of queries and keys meet. Then one of
the ways across: ring.py, gathered.py, ulysses.py, or mixed.py, which are for autograd what attending.py makes of them.
"""

from emu.parallel.context.attending import attention
from emu.parallel.context.cut import KINDS, Cut, make_cut

__all__ = ["KINDS", "Cut", "attention", "make_cut"]
