"""Random generators as plain data: torch's, Python's and numpy's, and on a GPU that of the device.

Saved as text, not as pickles. A run with more ranks than the saved one has ranks without a saved state: rank r then
starts from a seed that is a hash of the saved state of rank r modulo the saved number of ranks, and of r. So a resumed
run is reproducible at any size, and no two ranks draw alike.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch

from emu.parallel.state.errors import StateError
from emu.spmd import Rank

Rng = dict[str, Any]


def rng_state(rank: Rank) -> Rng:
    """What this rank's generators hold, as JSON-able data."""
    version, words, kept = random.getstate()
    bits = np.random.get_state(legacy=False)
    state: Rng = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), kept],
        "numpy": {**bits, "state": {k: np.asarray(v).tolist() for k, v in bits["state"].items()}},
    }
    if rank.device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(rank.device))
    return state


def restore_rng(state: Rng) -> None:
    """Makes this rank's generators go on from a state that was saved, or derived.

    Raises:
        StateError: it is not the state of these generators.
    """
    try:
        if "seed" in state:
            torch.manual_seed(state["seed"])  # the device's too
            random.seed(state["seed"])
            np.random.seed(state["seed"] % 2**32)
            return
        version, words, kept = state["python"]
        torch.set_rng_state(_tensor(state["torch"]))
        random.setstate((version, tuple(words), kept))
        np.random.set_state(state["numpy"])
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            if "cuda" in state:
                torch.cuda.set_rng_state(_tensor(state["cuda"]))
            else:  # saved on a CPU
                torch.cuda.manual_seed(derived(state, 0)["seed"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(
            f"the saved state of the random generators does not fit those of this process: {error}",
            "load it with the versions of torch, Python and numpy that saved it, or set your own seeds after loading",
        ) from error


def derived(state: Rng, rank: int) -> Rng:
    """A state for a rank that was not there when `state` was saved by another."""
    text = f"{rank} {json.dumps(state, sort_keys=True)}"
    return {"seed": int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")}


def _text(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
