"""What can go wrong when a trace is priced."""

from __future__ import annotations

from typing import Any


class PricingError(ValueError):
    """A trace that cannot be priced on a cluster.

    Args:
        message: what is wrong, and where.
        hint: what to do about it.
        fields: facts about it; each becomes an attribute.
    """

    def __init__(self, message: str, hint: str, **fields: Any) -> None:
        super().__init__(f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint
        for name, value in fields.items():
            setattr(self, name, value)


class NeverCompletes(PricingError):
    """The ranks of a trace wait for each other for ever.

    Fields: waiting (list of (rank, stream, what it waits for)), missing (ranks whose record ended too early).
    """
