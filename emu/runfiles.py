"""A saved run: a zip of plain text and safetensors, in which nothing can be executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emu.cost import LAUNCH_MODES
from emu.cost.standing import Standing
from emu.hardware import Cluster, HardwareError, cluster
from emu.spmd import EmuError, Mesh
from emu.trace.events import CATEGORIES
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


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Args:
        mesh, cluster, results, trace, launch_mode: of the run.
        no_memory: why its memory was not recorded, a key of NO_MEMORY; None if it was.
        standing: for how many ranks each one stands that ran; None if each for itself.
        held, held_by_host: of a window of a run, what lived when it began, as of `Memory`.
    """

    mesh: Mesh
    cluster: Cluster
    results: Any
    trace: Trace
    launch_mode: str
    no_memory: str | None
    standing: Standing | None
    held: Mapping[int, Mapping[str, int]]
    held_by_host: Mapping[int, int]


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
        "held": {str(rank): dict(held) for rank, held in run._memory.held.items()},
        "held_by_host": {str(rank): held for rank, held in run._memory.held_by_host.items()},
        "results": results,
    }
    if run._standing is not None:
        counts = {str(rank): count for rank, count in run._standing.counts.items()}
        head["standing"] = {"counts": counts, "levels": list(run._standing.levels)}
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run.json", json.dumps(head))
        archive.writestr("trace.jsonl", dumps(run.trace))
        archive.writestr("results.safetensors", save({str(i): t.contiguous().clone() for i, t in enumerate(tensors)}))
    try:
        _write_whole(Path(path), blob.getvalue())
    except OSError as error:
        raise EmuError(f"{path} cannot be written: {error}", "name a file in a folder that exists") from error


def read(path: str | os.PathLike[str], on: Cluster | None = None) -> Saved:
    """What a saved run holds. See `Run.load`."""
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
        digest = head.get("cluster_digest")  # files of earlier versions have none, and none of what follows
        standing = _standing(head["standing"], trace, mesh) if "standing" in head else None
        held = {rank: _held(said) for rank, said in _by_rank(head.get("held", {}), trace).items()}
        by_host = {rank: _size(said, 0) for rank, said in _by_rank(head.get("held_by_host", {}), trace).items()}
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
    if standing is not None and not standing.holds_on(where):
        raise standing.error(str(path), where)
    return Saved(mesh, where, results, trace, head["launch_mode"], no_memory, standing, held, by_host)


def _standing(said: Any, trace: Trace, mesh: Mesh) -> Standing:
    """For how many ranks each one stands, checked."""
    counts = {rank: _size(count, 1) for rank, count in _by_rank(said["counts"], trace).items()}
    if set(counts) != set(trace.ranks) or sum(counts.values()) != mesh.size:
        raise ValueError(f"its ranks do not stand for the {mesh.size} of its mesh")
    return Standing(counts, tuple(_size(level, 1) for level in said["levels"]))


def _by_rank(said: Any, trace: Trace) -> dict[int, Any]:
    if not isinstance(said, dict) or not {*said} <= {str(rank) for rank in trace.ranks}:
        raise ValueError(f"{str(said)[:40]} is not of its ranks")
    return {int(rank): value for rank, value in said.items()}


def _held(said: Any) -> dict[str, int]:
    if not isinstance(said, dict) or not {*said} <= {*CATEGORIES}:
        raise ValueError(f"{str(said)[:40]} are no kinds of memory")
    return {category: _size(n, 0) for category, n in said.items()}


def _size(said: Any, least: int) -> int:
    if type(said) is not int or said < least:
        raise ValueError(f"{str(said)[:40]} is no whole number from {least}")
    return said


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
