"""From a row of published runs to a case: a workload that can be priced, what was measured of it, and what was assumed.

What a row leaves out is assumed where that is sensible, and `Case.assumed` names every such guess; where it is not, the
case is not usable, and `Case.why_not` says why. See emu.validate.workloads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emu.hardware import HardwareError
from emu.planner.closed import Workload
from emu.spmd import EmuError

from .contradictions import GB, GIB, refuse_memory
from .fold import canonical, in_fit, layout
from .reading import Line
from .rows import RunRow
from .timing import measured_step
from .words import Unclear
from .workloads import Notes, workload_of


@dataclass(frozen=True)
class Case:
    """One published run.

    Args:
        id: the row's own.
        source: title of where it was read; section: of it, or "".
        file, line: where the row stands.
        layout: what the row states of the run, as canonical JSON (emu.validate.fold).
        fit: whether constants may be fitted to it.
        workload: what is priced; None where the row does not say enough.
        measured_s: seconds of a step, None where none was measured; measured_of: the printed figure that they come from.
        measured_bytes: memory of the fullest device, None where none was measured.
        layer_s: seconds of one layer, forward and backward, None where none were measured.
        out_of_memory: True if it did not fit, False if the source says that it did, None if it says nothing.
        assumed: what was taken for what the row does not say.
        why_not: why it cannot be compared; None if it can.
        row: as it was read.
    """

    id: str
    source: str
    section: str
    file: str
    line: int
    layout: str
    fit: bool
    workload: Workload | None
    measured_s: float | None
    measured_of: str
    measured_bytes: float | None
    layer_s: float | None
    out_of_memory: bool | None
    assumed: tuple[str, ...]
    why_not: str | None
    row: RunRow


def cases_of(lines: Iterable[Line]) -> list[Case]:
    """The measured runs among the rows of a file."""
    return [case_of(line) for line in lines if is_run(line)]


def is_run(line: Line) -> bool:
    """Whether a row is a measured run, and not a collective or a formula's value."""
    return isinstance(line.row, RunRow) and line.row.kind == "measured"


def case_of(line: Line) -> Case:
    """A row's case. What cannot be used says why in `why_not`; nothing is raised."""
    row = line.row
    assert isinstance(row, RunRow)
    workload, timed, notes, why_not = None, None, Notes(row), None
    try:
        workload = workload_of(row, notes)
        timed = measured_step(row, workload)
        refuse_memory(row.measured)
    except Unclear as error:
        why_not = str(error)
    except (EmuError, HardwareError) as error:
        why_not = f"{error.message} {error.hint}".strip()
    measured_bytes, layer_s = _memory(row), _layer(row)
    if why_not is None and timed is measured_bytes is layer_s is None and not row.measured.oom:
        why_not = "no time, rate or memory of a step is stated"
    return Case(
        id=row.id,
        source=row.source.title,
        section=row.source.section or "",
        file=line.file,
        line=line.line,
        layout=canonical(layout(row)),
        fit=in_fit(row),
        workload=workload,
        measured_s=timed.seconds if timed and not row.measured.oom else None,
        measured_of=timed.of if timed else "",
        measured_bytes=measured_bytes,
        layer_s=layer_s,
        out_of_memory=row.measured.oom,
        assumed=(*notes.told, *(timed.assumed if timed else ())),
        why_not=why_not,
        row=row,
    )


def _memory(row: RunRow) -> float | None:
    if row.measured.mem_gib is not None:
        return row.measured.mem_gib * GIB
    return None if row.measured.mem_gb is None else row.measured.mem_gb * GB


def _layer(row: RunRow) -> float | None:
    m = row.measured
    if m.layer_total_ms is not None:
        return m.layer_total_ms * 1e-3
    if m.layer_fwd_ms is None or m.layer_bwd_ms is None:
        return None
    return (m.layer_fwd_ms + m.layer_bwd_ms) * 1e-3
