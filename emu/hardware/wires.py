"""A wire between two vertices of a topology."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wire:
    """A wire that carries `lanes` lanes in each direction between two vertices (devices or switches).

    Two messages share a wire if they take it in the same direction; both directions at once is free.
    """

    source: int
    target: int
    lanes: float = 1

    @property
    def back(self) -> Wire:
        """The same wire in the other direction."""
        return Wire(self.target, self.source, self.lanes)
