"""State that outlives a run: saved whole or not at all, loaded into any other layout."""

from emu.parallel.state.errors import StateError
from emu.parallel.state.loading import Loaded, load_state
from emu.parallel.state.piece import Piece
from emu.parallel.state.rng import restore_rng, rng_state
from emu.parallel.state.saving import save_state

__all__ = ["Loaded", "Piece", "StateError", "load_state", "restore_rng", "rng_state", "save_state"]
