"""Bisection: where a program first computes what the reference never does.

Both run once more, in float64, and every tensor that either makes is kept. A tensor of a rank is *found* in the
reference if its numbers are there, whole or a slice, or if they are once the ranks of a group are summed. From what came
out wrong one walks back along what it was made of, as far as nothing is found: there something right went in, and
something wrong came out.
"""

from emu.equivalence.bisection.divergence import Divergence
from emu.equivalence.bisection.walk import bisect

__all__ = ["Divergence", "bisect"]
