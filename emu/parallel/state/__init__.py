"""State that outlives a run: saved whole or not at all, loaded into any other layout."""

from emu.parallel.state.piece import Piece

__all__ = ["Piece"]
