"""A saved run: a zip of plain text and safetensors, in which nothing can be executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emu.cost import LAUNCH_MODES
from emu.hardware import Cluster, HardwareError, cluster
from emu.spmd import EmuError, Mesh
from emu.trace.files import TraceError, dumps, loads
from emu.trace.trace import Trace

if TYPE_CHECKING:
    from emu.run import Run

NO_MEMORY = {  # why a run has no record of its memory, and what to do about it
    "real": (
        "the memory of real devices is not recorded",
        'launch it with backend="virtual" to see it, or ask torch: torch.cuda.max_memory_allocated()',
    ),
    "untracked": ("this run was not tracked, so its memory was not recorded", "launch it with track=True"),
}


def write(run: Run, path: str | os.PathLike[str]) -> None:
    """Writes a run's results, trace and mesh, whole or not at all. See `Run.save`."""
    from safetensors.torch import save

    from emu.real.results import encode

    tensors: list[torch.Tensor] = []
    results = encode(dict(run.results) if isinstance(run.results, Mapping) else list(run.results), tensors)
    head = {
        "format": "emu run 1",
        "axes": dict(run.mesh.axes),
        "folds": {axis: n for axis, n in run.mesh.folds.items() if axis != "edp"},
        "cluster": run.cluster.name,
        "nodes": run.cluster.nodes,
        "cluster_digest": _digest(run.cluster),
        "launch_mode": run.launch_mode,
        "no_memory": run._no_memory,
        "results": results,
    }
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run.json", json.dumps(head))
        archive.writestr("trace.jsonl", dumps(run.trace))
        archive.writestr("results.safetensors", save({str(i): t.contiguous().clone() for i, t in enumerate(tensors)}))
    try:
        _write_whole(Path(path), blob.getvalue())
    except OSError as error:
        raise EmuError(f"{path} cannot be written: {error}", "name a file in a folder that exists") from error


def read(path: str | os.PathLike[str], on: Cluster | None = None) -> tuple[Mesh, Cluster, Any, Trace, str, str | None]:
    """What a saved run holds: mesh, cluster, results, trace, launch mode, and why it has no memory. See `Run.load`."""
    from safetensors.torch import load

    from emu.real.results import decode

    try:
        with zipfile.ZipFile(path) as archive:
            head = json.loads(archive.read("run.json"))
            trace = loads(archive.read("trace.jsonl"))
            stored = load(archive.read("results.safetensors"))
        if head["format"] != "emu run 1":
            raise ValueError(f"its format is {head['format']!r}")
        mesh = Mesh(**head["axes"], **head["folds"])
        results = decode(head["results"], [stored[str(i)] for i in range(len(stored))])
        if head["launch_mode"] not in LAUNCH_MODES:
            raise ValueError(f"its launch mode is {head['launch_mode']!r}")
        if not isinstance(results, dict) and (not isinstance(results, list) or len(results) != mesh.size):
            raise ValueError(f"it does not hold {mesh.size} results")
        no_memory = head.get("no_memory")
        if no_memory is not None and no_memory not in NO_MEMORY:
            raise ValueError(f"it says {no_memory!r} of its memory")
        where = on if on is not None else _named_cluster(head["cluster"], head["nodes"])
        digest = head.get("cluster_digest")  # files of earlier versions have none
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, TypeError, TraceError, HardwareError) as error:
        known = isinstance(error, HardwareError)
        cure = (
            "pass the cluster it ran on: Run.load(path, on=cluster)" if known else "save it again with run.save(path)"
        )
        raise EmuError(f"{path} cannot be read as a saved run: {error}", cure) from error
    except Exception as error:  # safetensors' own error type
        raise EmuError(f"{path} is damaged: {error}", "save it again with run.save(path)") from error
    if on is None and digest is not None and digest != _digest(where):
        raise EmuError(
            f"{path} was run on a cluster named {where.name!r}, whose numbers are not those of emu's own {where.name!r}",
            "pass the cluster it ran on: Run.load(path, on=cluster), or the one to price it on: on=emu.cluster(name)",
        )
    return mesh, where, results, trace, head["launch_mode"], no_memory


def _write_whole(target: Path, content: bytes) -> None:
    """Writes beside the target first, so that the target is there whole or as it was."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".emu-") as folder:
        written = Path(folder) / target.name
        written.write_bytes(content)
        os.replace(written, target)


def _digest(cluster: Cluster) -> str:
    """Tells clusters of one name apart by their numbers."""
    return hashlib.sha256(repr(asdict(cluster)).encode()).hexdigest()


def _named_cluster(name: str, nodes: int) -> Cluster:
    try:
        found = cluster(name)
    except HardwareError:
        found = None
    return found if found is not None and found.nodes == nodes else cluster(name, nodes=nodes)
