"""Writes and reads a saved run: a zip of plain text and safetensors, in which nothing can be executed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emu.cost.standing import Standing
from emu.hardware import Cluster, HardwareError, cluster
from emu.runfiles.archive import PARTS, pack, unpack
from emu.runfiles.errors import Refused, shown
from emu.runfiles.events import check_events
from emu.runfiles.head import FORMAT, MOST_RANKS, Head
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
AGAIN = "save it again with run.save(path)"
OWN = "pass the cluster it ran on: Run.load(path, on=cluster)"


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

    if run.mesh.size > MOST_RANKS:
        raise EmuError(
            f"a run of {run.mesh.size:,} ranks cannot be saved: a file holds up to {MOST_RANKS:,}", "run a smaller mesh"
        )
    try:  # what could not be read again
        check_events(run.trace, run.mesh.size, run._memory.held, run._memory.held_by_host)
    except Refused as error:
        problem = str(error).partition(": ")[2]
        raise EmuError(
            f"this run cannot be saved: {problem}", "launch the whole program again, and save that run"
        ) from None
    tensors: list[torch.Tensor] = []
    results = encode(dict(run.results) if isinstance(run.results, Mapping) else list(run.results), tensors)
    head = {
        "format": FORMAT,
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
    stored = save({str(i): t.contiguous().clone() for i, t in enumerate(tensors)})
    content = pack(dict(zip(PARTS, (json.dumps(head).encode(), dumps(run.trace), stored), strict=True)))
    try:
        _write_whole(Path(path), content)
    except OSError as error:
        raise EmuError(
            f"{path} cannot be written: {error.strerror or error}", "name a file in a folder that exists"
        ) from error


def read(path: str | os.PathLike[str], on: Cluster | None = None) -> Saved:
    """What a saved run holds. See `Run.load`."""
    try:
        os.fspath(path)
    except TypeError:
        raise EmuError(f"the path of a saved run is a {type(path).__name__}", "give it as a text or a Path") from None
    try:
        return _read(path, on)
    except (EmuError, MemoryError) as error:
        if isinstance(error, EmuError):
            raise
        raise EmuError(f"{path} cannot be read as a saved run: it needs more memory than there is", AGAIN) from error
    except Exception as error:
        # OSError, BadZipFile and Refused say what is wrong; the rest is what zip's and safetensors' readers trip over.
        told = isinstance(error, (OSError, zipfile.BadZipFile, Refused))
        problem = shown(str(error) if told else f"it is damaged: {type(error).__name__}: {error}")
        hint = (error.hint if isinstance(error, Refused) else "") or AGAIN
        if isinstance(error, OSError) and error.strerror:
            problem, hint = error.strerror, "name a file that run.save(path) or emu run --save wrote"
        raise EmuError(f"{path} cannot be read as a saved run: {problem}", hint) from error


def _read(path: str | os.PathLike[str], on: Cluster | None) -> Saved:
    from safetensors.torch import load

    parts = dict(unpack(path))
    said = Head.of(parts["run.json"], NO_MEMORY)
    where = on if on is not None else _named_cluster(said)
    try:
        mesh = Mesh(on=where, **said.axes, **said.folds)
    except EmuError as error:
        raise Refused("run.json", error.message, "" if on is None else error.hint) from None
    trace = _trace(parts.pop("trace.jsonl"), mesh)
    check_events(trace, mesh.size, said.held, said.held_by_host)
    standing = _standing(said, trace, mesh)
    stored = load(parts.pop("results.safetensors"))
    results = _results(said.results, stored, mesh)
    if on is None and said.digest is not None and said.digest != _digest(where):
        raise EmuError(
            f"{path} was run on a cluster named {where.name!r}, whose numbers are not those of emu's own {where.name!r}",
            f"{OWN}, or the one to price it on: on=emu.cluster(name)",
        )
    if standing is not None and not standing.holds_on(where):
        raise standing.error(str(path), where)
    rest = (said.launch_mode, said.no_memory, standing, said.held, said.held_by_host)
    return Saved(mesh, where, results, trace, *rest)


def _trace(text: bytes, mesh: Mesh) -> Trace:
    try:
        trace = loads(text)
    except TraceError as error:
        raise Refused(f"trace.jsonl, line {error.line}", error.problem) from None
    if dict(trace.axes) != dict(mesh.axes):
        raise Refused("trace.jsonl, line 1", f"its mesh is not the {mesh} of run.json")
    return trace


def _standing(said: Head, trace: Trace, mesh: Mesh) -> Standing | None:
    """For how many ranks each one stands, checked."""
    for field, named in (("held", said.held), ("held_by_host", said.held_by_host)):
        if not {*named} <= {*trace.ranks}:
            raise Refused("run.json", f"{field} names ranks of which there is no record")
    if said.counts is None:
        return None
    if {*said.counts} != {*trace.ranks} or sum(said.counts.values()) != mesh.size:
        raise Refused("run.json", f"standing.counts: its ranks do not stand for the {mesh.size:,} of its mesh")
    return Standing(said.counts, said.levels)


def _results(encoded: Any, stored: Mapping[str, torch.Tensor], mesh: Mesh) -> Any:
    from emu.real.results import decode

    if {*stored} != {str(i) for i in range(len(stored))}:
        raise Refused("results.safetensors", f"its tensors are not called 0 to {len(stored) - 1}")
    tensors = (stored[str(i)] for i in range(len(stored)))
    try:
        results = decode(encoded, tensors, "results")
    except EmuError as error:
        raise Refused("run.json", error.message) from None
    whole = isinstance(results, list) and len(results) == mesh.size
    if not whole and (type(results) is not dict or not all(type(r) is int and 0 <= r < mesh.size for r in results)):
        raise Refused("run.json", f"results: it does not hold {mesh.size:,} results, or some by rank")
    if next(tensors, None) is not None:
        raise Refused("results.safetensors", "it has tensors that are no results")
    return results


def _write_whole(target: Path, content: bytes) -> None:
    """Writes beside the target first, so that the target is there whole or as it was."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".emu-") as folder:
        written = Path(folder) / target.name
        written.write_bytes(content)
        os.replace(written, target)


def _digest(cluster: Cluster) -> str:
    """Tells clusters of one name apart by their numbers."""
    return hashlib.sha256(repr(asdict(cluster)).encode()).hexdigest()


def _named_cluster(said: Head) -> Cluster:
    try:
        try:
            found = cluster(said.cluster)
        except HardwareError:
            found = None
        return found if found is not None and found.nodes == said.nodes else cluster(said.cluster, nodes=said.nodes)
    except HardwareError as error:
        raise Refused("run.json", f"its cluster: {error.message}", OWN) from None
