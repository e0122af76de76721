"""State that outlives a run: saved whole or not at all, loaded into any other layout."""

from emu.parallel.state.errors import StateError
from emu.parallel.state.exporting import dcp_key, export_dcp
from emu.parallel.state.front import load, load_dcp, save, save_dcp
from emu.parallel.state.importing import import_dcp
from emu.parallel.state.loading import Loaded, load_state
from emu.parallel.state.piece import Piece
from emu.parallel.state.rng import restore_rng, rng_state
from emu.parallel.state.saving import save_state

__all__ = [
    "Loaded",
    "Piece",
    "StateError",
    "dcp_key",
    "export_dcp",
    "import_dcp",
    "load",
    "load_dcp",
    "load_state",
    "restore_rng",
    "rng_state",
    "save",
    "save_dcp",
    "save_state",
]
