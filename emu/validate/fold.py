"""Which published runs constants are fitted to, and which they are judged on: by layout, never by row or by name.

A layout is what a source states of a run: its model, how it is cut, its batch, on what. Its fold is the SHA-256 of that
as canonical JSON, mod 5; fold 0 is fitted to, the others are held out. Repeated measurements of one layout fall into
one fold, and a better guess of what is not stated moves none. Only three things are read rather than copied, because
leaving them out and spelling them out mean the same: key and value heads (as many as heads), context parallelism (1),
and the width of the numbers that products run in (all 16-bit formats are alike).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .rows import RunRow

FOLDS = 5
FIT_FOLD = 0


def layout(row: RunRow) -> dict[str, Any]:
    """What a row states of its run; None where it states nothing."""
    model = row.model
    moe = None if model.moe is None else model.moe.model_dump(exclude_none=True)
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "moe": moe,
        "seq": row.seq,
        "precision": width(row.precision),
        "tp": row.tp,
        "pp": row.pp,
        "vp": row.vp,
        "dp": row.dp,
        "cp": row.cp or 1,
        "ep": row.ep,
        "zero": row.zero_stage,
        "micro_batch": row.micro_batch,
        "global_batch": row.global_batch_seqs,
        "recompute": row.recompute,
        "schedule": row.schedule,
        "hardware": row.hardware,
        "n": row.n_gpus,
    }


def fold(row: RunRow) -> int:
    """The fold of a row's layout, 0 to 4."""
    return int(hashlib.sha256(canonical(layout(row)).encode()).hexdigest(), 16) % FOLDS


def in_fit(row: RunRow) -> bool:
    """Whether constants may be fitted to this row; if so, no figure is reported on it."""
    return fold(row) == FIT_FOLD


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; a whole number is written without a point."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def width(precision: str | None) -> str | None:
    """The format of matrix products: "fp8", or "bf16" for every 16-bit one; others as they are written."""
    text = (precision or "").lower()
    if text.startswith("fp8"):
        return "fp8"
    return "bf16" if text.startswith(("bf16", "fp16", "bfloat16", "float16")) else precision


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
