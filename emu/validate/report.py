"""What validation finds, as one record: figures of steps, memory and collectives, and what could not be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from emu.planner.closed import predict

from .analytic import analytic_pairs
from .cases import cases_of
from .collectives import Timed, pairs, timed_collectives
from .goals import Goal, goals_of
from .judge import Outcome, Predictor, judged, layers, memories, times
from .reading import Line
from .rows import CollectiveRow, RunRow, unknown_fields
from .score import Pair, errors, errors_by, errors_by_axis, order

WORST = 10  # cases named as worst


@dataclass(frozen=True)
class Unusable:
    """A row that cannot be compared, where it stands, and why."""

    id: str
    file: str
    line: int
    why: str


@dataclass(frozen=True)
class Report:
    """Predicted against measured.

    Args:
        of: the files whose rows these are.
        held_out: whether only layouts are reported that no constant was fitted to.
        lines: all rows.
        outcomes: of all measured runs, reported or not.
        reported: of those that figures are about.
        collectives: all measured collectives.
        analytic: printed and computed bytes of rows that hold a formula's value.
        unusable: rows that cannot be compared.
    """

    of: tuple[str, ...]
    held_out: bool
    lines: Sequence[Line]
    outcomes: Sequence[Outcome]
    reported: Sequence[Outcome]
    collectives: Sequence[Timed]
    analytic: Sequence[Pair]
    unusable: Sequence[Unusable]

    @property
    def times(self) -> list[Pair]:
        """Seconds of a step, of the reported cases."""
        return times(self.reported)

    @property
    def memories(self) -> list[Pair]:
        """Bytes of the fullest device, of the reported cases."""
        return memories(self.reported)

    @property
    def layers(self) -> list[Pair]:
        """Seconds of one layer, of the reported cases."""
        return layers(self.reported)

    @property
    def compared(self) -> int:
        """How many measured or computed numbers were set beside a prediction."""
        found = (self.times, self.memories, self.layers, pairs(self.collectives, large=False), self.analytic)
        return sum(map(len, found)) + self.fits()["out_of_memory"]

    @property
    def goals(self) -> list[Goal]:
        """What emu promises of these figures, and whether it holds."""
        return goals_of(self.times, self.memories, pairs(self.collectives))

    def rows(self) -> dict[str, Any]:
        """How many rows there are of each kind, and which of them figures are about."""
        in_fit = sum(o.case.fit for o in self.outcomes)
        return {
            "files": list(self.of),
            "rows": len(self.lines),
            "runs": len(self.outcomes),
            "collectives": len(self.collectives),
            "analytic": sum(isinstance(line.row, RunRow) and line.row.kind == "analytic" for line in self.lines),
            "in_fit": in_fit,
            "reported": "held out" if self.held_out else "all",
            "reported_runs": len(self.reported),
            "reported_in_fit": sum(o.case.fit for o in self.reported),
            "unusable": len(self.unusable),
        }

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON has it. The first keys are the contract's."""
        steps = self.times
        all_figures, ranked, harder = errors(steps), order(steps), order(steps, equal_batch=True)
        return {
            "n": all_figures.n,
            "mape": all_figures.mape,
            "median_ape": all_figures.median_ape,
            "rank_accuracy": ranked.accuracy,
            "by_source": {str(s): found.as_dict() for s, found in errors_by(steps, lambda p: p.source).items()},
            "cases": _in_seconds(steps),
            **{name: getattr(all_figures, name) for name in ("bias", "worst", "within")},
            "rank": {
                "pairs": ranked.pairs,
                "right": ranked.right,
                "equal_batch": {"pairs": harder.pairs, "right": harder.right, "accuracy": harder.accuracy},
            },
            "by_axis": {
                axis: {value: found.as_dict() for value, found in values.items()}
                for axis, values in errors_by_axis(steps).items()
            },
            "memory": self._memory(),
            "layers": {**errors(self.layers).as_dict(), "cases": _in_seconds(self.layers)},
            "collectives": self._collectives(),
            "analytic": errors(self.analytic).as_dict(),
            "rows": self.rows(),
            "goals": [goal.as_dict() for goal in self.goals],
            "assumed": self.assumed(),
            "ignored_fields": self.ignored_fields(),
            "unusable": [vars(row) for row in self.unusable],
        }

    def _memory(self) -> dict[str, Any]:
        return {
            **errors(self.memories).as_dict(),
            "cases": [
                {"id": p.id, "measured_bytes": p.measured, "predicted_bytes": p.predicted, "error": p.error}
                for p in self.memories
            ],
            "fits": self.fits(),
        }

    def fits(self) -> dict[str, Any]:
        """Whether runs fit: those that did not, and those that ran, each by what was predicted."""
        failed = [o for o in self.outcomes if o.case.out_of_memory and o.prediction is not None]
        ran = [o for o in self.reported if o.case.measured_s is not None and o.prediction is not None]
        return {
            "out_of_memory": len(failed),
            "out_of_memory_found": sum(o.fits is False for o in failed),
            "ran": len(ran),
            "ran_and_fits": sum(o.fits is True for o in ran),
            "said_not_to_fit": [o.case.id for o in ran if o.fits is False],
        }

    def _collectives(self) -> dict[str, Any]:
        large = pairs(self.collectives)
        return {
            "large": errors(large).as_dict(),
            "all": errors(pairs(self.collectives, large=False)).as_dict(),
            "cases": _in_seconds(pairs(self.collectives, large=False)),
        }

    def assumed(self) -> dict[str, int]:
        """What was taken for what reported rows do not say, and of how many rows; most rows first."""
        return dict(Counter(told for o in self.reported if o.prediction for told in o.case.assumed).most_common())

    def ignored_fields(self) -> dict[str, int]:
        """Fields of rows that nobody reads, and how many rows have them."""
        return dict(Counter(name for line in self.lines for name in unknown_fields(line.row)).most_common())

    def worst(self, most: int = WORST) -> list[Pair]:
        """The cases whose step is predicted worst."""
        return sorted(self.times, key=lambda p: -abs(p.error))[:most]


def _in_seconds(of: Sequence[Pair]) -> list[dict[str, Any]]:
    return [{"id": p.id, "measured_s": p.measured, "predicted_s": p.predicted, "error": p.error} for p in of]


def examined(
    lines: Sequence[Line],
    of: Sequence[str],
    held_out: bool,
    predictor: Predictor = predict,
    tick: Callable[[int], None] | None = None,
) -> Report:
    """Rows priced and compared.

    Args:
        lines: rows of one or more files.
        of: the files' names.
        held_out: report only layouts that no constant was fitted to.
        predictor: what prices a workload.
        tick: told how many runs are done.
    """
    outcomes = judged(cases_of(lines), predictor, tick)
    collectives = timed_collectives(lines)
    analytic, not_computed = analytic_pairs(lines)
    unusable = [Unusable(o.case.id, o.case.file, o.case.line, o.why_not) for o in outcomes if o.why_not is not None]
    places = [line for line in lines if isinstance(line.row, CollectiveRow)]
    unusable += [
        Unusable(one.row.id, line.file, line.line, one.why_not)
        for line, one in zip(places, collectives)
        if one.why_not is not None
    ]
    unusable += [Unusable(line.row.id, line.file, line.line, why) for line, why in not_computed]
    reported = [o for o in outcomes if not (held_out and o.case.fit)]
    return Report(tuple(of), held_out, lines, outcomes, reported, collectives, analytic, unusable)
