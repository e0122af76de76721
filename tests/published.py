"""Rows of published cases as plain dicts, for tests to change."""

from __future__ import annotations

import copy

RUN = {
    "id": "one",
    "kind": "measured",
    "source": {"title": "Megatron-LM of somebody", "section": "table 1", "url": "https://example.org"},
    "hardware": "A100 80GB (8xHDR200)",
    "n_gpus": 16,
    "model": {
        "name": "GPT",
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "ffn": 4096,
        "vocab": 50304,
        "mlp": "gelu",
        "moe": None,
    },
    "seq": 2048,
    "precision": "bf16",
    "tp": 2,
    "sp": True,
    "cp": 1,
    "pp": 2,
    "vp": 1,
    "dp": 4,
    "zero_stage": 1,
    "fsdp": False,
    "schedule": "1F1B",
    "micro_batch": 2,
    "global_batch_seqs": 64,
    "recompute": "none",
    "measured": {"iter_time_s": 2.0},
}
COLLECTIVE = {
    "id": "two",
    "source": "somebody's benchmark",
    "hardware": "8x A100 NVLink3",
    "nodes": 1,
    "gpus": 8,
    "op": "all_reduce",
    "algo": "default",
    "bytes": 2**30,
    "time_us": 8000.0,
}
GONE = object()  # leaves a field out


def changed(row: dict, **fields) -> dict:
    """A row with other values: "model__heads" is heads of its model, GONE takes a field away."""
    row = copy.deepcopy(row)
    for name, value in fields.items():
        *path, last = name.split("__")
        at = row
        for part in path:
            at = at[part]
        if value is GONE:
            del at[last]
        else:
            at[last] = value
    return row
