"""Cases priced by the closed forms, and set beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from emu.cost import PricingError
from emu.hardware import HardwareError
from emu.planner.closed import Prediction, Workload, predict
from emu.spmd import EmuError

from .cases import Case
from .fold import canonical
from .score import Pair

Predictor = Callable[[Workload], Prediction]
BANDS = (1, 8, 64, 512)  # upper ends of the bands that large sizes are grouped in


@dataclass(frozen=True)
class Outcome:
    """A case and what was predicted of it.

    Args:
        case: what was measured.
        prediction: None where it cannot be priced; why_not: the reason then, or that of the case; else None.
    """

    case: Case
    prediction: Prediction | None
    why_not: str | None

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step."""
        return self.prediction and self.prediction.step_s

    @property
    def predicted_bytes(self) -> float | None:
        """Memory of the fullest device, counted as the case's source counts it."""
        return self.prediction and max(self.prediction.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest device holds it."""
        return self.prediction and self.prediction.fits


def judged(
    cases: Sequence[Case], predictor: Predictor = predict, tick: Callable[[int], None] | None = None
) -> list[Outcome]:
    """All cases priced, each layout once.

    Args:
        predictor: what prices a workload.
        tick: told how many are done.
    """
    known: dict[Workload, Prediction | str] = {}
    outcomes = []
    for done, case in enumerate(cases, 1):
        outcomes.append(_judged(case, predictor, known))
        if tick is not None:
            tick(done)
    return outcomes


def _judged(case: Case, predictor: Predictor, known: dict[Workload, Prediction | str]) -> Outcome:
    if case.workload is None or case.why_not is not None:
        return Outcome(case, None, case.why_not)
    if case.workload not in known:
        try:
            known[case.workload] = predictor(case.workload)
        except (EmuError, HardwareError, PricingError) as error:
            known[case.workload] = f"it cannot be priced: {error.message} {error.hint}".strip()
    found = known[case.workload]
    return Outcome(case, None, found) if isinstance(found, str) else Outcome(case, found, None)


def times(outcomes: Iterable[Outcome]) -> list[Pair]:
    """Measured and predicted seconds of a step, of the cases that have both."""
    return [
        _pair(o, o.case.measured_s, o.predicted_s)
        for o in outcomes
        if o.case.measured_s is not None and o.predicted_s is not None
    ]


def memories(outcomes: Iterable[Outcome]) -> list[Pair]:
    """Measured and predicted bytes of the fullest device, of the cases that have both."""
    return [
        _pair(o, o.case.measured_bytes, o.predicted_bytes)
        for o in outcomes
        if o.case.measured_bytes is not None and o.predicted_bytes is not None
    ]


def layers(outcomes: Iterable[Outcome]) -> list[Pair]:
    """Measured and predicted seconds of one layer, forward and backward, of the cases that have both."""
    return [
        _pair(o, o.case.layer_s, o.prediction.detail["forward"] + o.prediction.detail["backward"])
        for o in outcomes
        if o.case.layer_s is not None and o.prediction is not None
    ]


def _pair(outcome: Outcome, measured: float, predicted: float) -> Pair:
    case, row = outcome.case, outcome.case.row
    model = row.model.model_dump(include={"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "moe"})
    return Pair(
        id=case.id,
        measured=measured,
        predicted=predicted,
        source=case.source,
        axes=axes_of(case),
        alike=(case.source, canonical(model), row.hardware, case.workload and case.workload.devices),
        batch=case.workload and (case.workload.global_batch, case.workload.seq),
    )


def axes_of(case: Case) -> dict[str, str]:
    """What errors are grouped by."""
    w = case.workload
    if w is None:
        return {}
    shards = "fsdp" if w.fsdp else f"zero {w.zero}" if w.zero else "none"
    return {
        "tp": str(w.tp),
        "pp": str(w.pp),
        "dp": band(w.dp),
        "cp": str(w.cp),
        "ep": str(w.ep),
        "n": band(w.devices),
        "precision": w.precision,
        "recompute": w.recompute,
        "shards": shards,
        "schedule": w.schedule if w.pp > 1 else "no pipeline",
        "chip": w.cluster.chip.name,
        "model": "experts" if w.moe else "dense",
        "row": "part assumed" if case.assumed else "says all",
    }


def band(size: int) -> str:
    """The band of a size: "1", "2-8", "9-64", "65-512" or ">512"."""
    low = 1
    for high in BANDS:
        if size <= high:
            return str(high) if low == high else f"{low}-{high}"
        low = high + 1
    return f">{BANDS[-1]}"
