"""Where gradients are born: the exact tier marks the tensors from which a backward starts.

Every backward of torch, reentrant checkpoints and torch.func included, passes through one Python function. While any
exact mode is active that function is replaced by one that marks its roots first. The replacement is counted, so that
ranks (threads) may come and go in any order, and undone exactly when the last one leaves.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from emu.equivalence.exact_rules import GRADIENT, set_tag

_autograd: Any = torch.autograd  # whose types hide what is replaced here
_lock = threading.Lock()
_users = 0
_original = torch.autograd.graph._engine_run_backward


def _marking(roots: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's engine, after marking the gradients it starts from, where the exact tier is active.

    Other threads may be outside it; the stack of modes, which torch hands to its own backward threads, tells.
    """
    if any(getattr(mode, "marks_gradients", False) for mode in _get_current_dispatch_mode_stack()):
        for g in grads:
            if isinstance(g, torch.Tensor):
                set_tag(g, GRADIENT)
    return _original(roots, grads, *args, **kwargs)


def begin() -> None:
    """One more exact mode is active."""
    global _users, _original
    with _lock:
        _users += 1
        if _users == 1:
            _original = _autograd._engine_run_backward
            _autograd._engine_run_backward = _marking


def end() -> None:
    """One exact mode less; the last one puts torch's own function back."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and _autograd._engine_run_backward is _marking:
            _autograd._engine_run_backward = _original
