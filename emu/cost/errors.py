"""What can go wrong when a trace is priced."""

from __future__ import annotations

from emu.spmd import EmuError


class PricingError(EmuError, ValueError):
    """A trace that cannot be priced on a cluster. Its fields say what of it, where that is known."""


class NeverCompletes(PricingError):
    """The ranks of a trace wait for each other for ever.

    Fields: waiting (list of (rank, stream, what it waits for)), missing (ranks whose record ended too early).
    """
