"""The fit: constants of hardware and software that published runs tell, each held near its prior.

    python -m emu.validate.fit            # what it finds, by constant
    python -m emu.validate.fit --write    # and writes emu/hardware/data/fitted.toml

Only the cases of fold 0 are looked at (emu.validate.fold). What is made small is the mean size of the errors of their step
times, as logarithms, never above CLIPPED, and rounded below NOISE, plus PENALTY times the squared distance of each constant
from its prior, in widths: so
a constant moves from its prior only as far as the cases pay for it, and one that they do not tell stays. Where a row of
that fold has times of one layer, they are fitted to besides: they tell kernels apart that a step's time adds up.
The search is the same every time: coordinates in turn, with steps that halve when they no longer help, then directions
from a seeded generator.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from emu.hardware import Cluster, Constant, fitted
from emu.planner.closed.prices import Prices
from emu.planner.closed.stacks import stack
from emu.planner.closed.stages import layers_of_stages
from emu.planner.closed.step import Prepared, fastest, prepare, priced
from emu.validate.cases import Case, cases_of
from emu.validate.constants_file import write
from emu.validate.reading import packaged_rows

CLIPPED = 0.5  # an error counts as this at most: a slip of a source must not bend constants
NOISE = (
    0.05  # below about this an error counts by its square: one layout differs by 5.8 % between two releases (median)
)
PENALTY = 2e-4  # of one width of distance from a prior, in mean error
ROUNDS, DIRECTIONS, SEED = 8, 120, 0
FIRST_STEP = 0.5  # widths of a prior
ALONG, SPREAD = 4, 0.25  # constants that a random direction moves, and widths that it moves each
LAYERS = 0.1  # what the mean error of layers' times counts, of that of steps
ENOUGH = 1e-6  # what a step must gain
TELLS = 1e-4  # what moving a constant by a width must change in the errors' part, for the cases to tell it
DIGITS = 4  # of a value that is written

Values = Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """A case that is fitted to: its workload as kernels, and what was measured.

    Args:
        measured: a step's seconds; of one layer, seconds by the name that Prediction.detail has for them.
        layer: whether it is of one layer.
    """

    id: str
    prepared: tuple[Prepared, ...]
    measured: Mapping[str, float]
    layer: bool = False

    @property
    def families(self) -> frozenset[str]:
        """Families of constants that its price can depend on."""
        return families_of(self.prepared[0].workload.cluster)

    def log_error(self, prices: Prices) -> float:
        """Logarithm of predicted over measured; of a layer, the mean size of those of its figures."""
        prediction = fastest([priced(one, prices=prices) for one in self.prepared])
        if not self.layer:
            return math.log(prediction.step_s / self.measured["step"])
        return fmean(abs(math.log(prediction.detail[name] / value)) for name, value in self.measured.items())


@dataclass(frozen=True)
class Fitted:
    """What the fit found.

    values: every constant's; told: those that the cases tell, by name; the others stay at their prior. loss: what was made
    small; errors: signed relative errors of the fitted cases.
    """

    values: dict[str, float]
    told: frozenset[str]
    loss: float
    errors: tuple[float, ...]


def targets(cases: Iterable[Case] | None = None) -> list[Target]:
    """What is fitted to: the cases of the fit's fold that have times; by default those that come with emu.

    Layers' times of one layout that stand in several rows count once.
    """
    cases = cases_of(packaged_rows()) if cases is None else cases
    found: list[Target] = []
    profiled: set[object] = set()
    for case in cases:
        if not case.fit or case.workload is None:
            continue
        prepared = tuple(prepare(case.workload))
        if case.measured_s and not case.why_not:
            found.append(Target(case.id, prepared, {"step": case.measured_s}))
        layer = layer_times(case)
        if layer and (key := (prepared[0].dense, case.workload.recompute)) not in profiled:
            profiled.add(key)
            found.append(Target(case.id, prepared, layer, layer=True))
    return found


def layer_times(case: Case) -> dict[str, float]:
    """Seconds of one layer that a row has: measured ones; or of a stage, profiled for a schedule, as its notes print them.

    Profiles are of a stage's forward, its backward for inputs, and that for weights, in milliseconds.
    """
    measured, w = case.row.measured, case.workload
    if measured.layer_fwd_ms and measured.layer_bwd_ms:
        return {"forward": measured.layer_fwd_ms / 1e3, "backward": measured.layer_bwd_ms / 1e3}
    profile = re.search(r"T_F,T_B,T_W,T_comm ms=\(([\d., ]+)\)", case.row.notes or "")
    if profile is None or w is None:
        return {}
    layers = max(layers_of_stages(w.layers, w.pp))
    forward, into, weight = (float(text) / 1e3 / layers for text in profile[1].split(",")[:3])
    return {"kernels_forward": forward, "input": into, "weight": weight}


def families_of(cluster: Cluster) -> frozenset[str]:
    """Families of constants that a cluster takes; software's always."""
    parts = (cluster.chip, cluster.node.scale_up, cluster.scale_out)
    return frozenset(("software", *(family for part in parts for family in getattr(part, "fitted", ()))))


def log_errors(targets: Sequence[Target], values: Values) -> list[float]:
    """The error of each target, as `Target.log_error` has it."""
    built: dict[tuple, Prices] = {}
    found = []
    for target in targets:
        w = target.prepared[0].workload
        key = (id(w.cluster), w.stack, w.power_w)
        if key not in built:
            built[key] = Prices(w.cluster, stack(w.stack), values, w.power_w)
        found.append(target.log_error(built[key]))
    return found


def distance(name: str, value: float) -> float:
    """How far a value is from its prior, in widths."""
    constant = fitted()[name]
    return math.log(value / constant.prior) / constant.width


def penalty(values: Values) -> float:
    """What distances from priors cost."""
    return PENALTY * sum(distance(name, value) ** 2 for name, value in values.items())


class Search:
    """The best values so far, and the errors that they leave."""

    def __init__(self, targets: Sequence[Target], values: Values) -> None:
        self.targets, self.values = targets, dict(values)
        self.errors = log_errors(targets, self.values)
        self._steps = [i for i, target in enumerate(targets) if not target.layer]
        self._layers = [i for i, target in enumerate(targets) if target.layer]
        self.loss = self._loss(self.errors, self.values)
        self._touched = {
            family: [i for i, target in enumerate(targets) if family in target.families]
            for family in {name.split(".")[0] for name in self.values}
        }

    def tried(self, moved: Mapping[str, float]) -> tuple[float, list[float]]:
        """Loss and errors with other values for some constants; only cases that these touch are priced again."""
        values = {**self.values, **moved}
        touched = sorted({i for name in moved for i in self._touched[name.split(".")[0]]})
        errors = list(self.errors)
        for i, error in zip(touched, log_errors([self.targets[i] for i in touched], values)):
            errors[i] = error
        return self._loss(errors, values), errors

    def moves(self, moved: Mapping[str, float]) -> bool:
        """Takes other values if they are better; says whether they were."""
        loss, errors = self.tried(moved)
        if loss >= self.loss - ENOUGH:
            return False
        self.values.update(moved)
        self.loss, self.errors = loss, errors
        return True

    def of_steps(self, errors: Sequence[float]) -> list[float]:
        """The errors that are of step times."""
        return [errors[i] for i in self._steps]

    def _loss(self, errors: Sequence[float], values: Values) -> float:
        steps = [math.hypot(min(abs(errors[i]), CLIPPED), NOISE) - NOISE for i in self._steps]
        layers = [errors[i] for i in self._layers]
        return (fmean(steps) if steps else 0.0) + (LAYERS * fmean(layers) if layers else 0.0) + penalty(values)


def fit(targets: Sequence[Target], rounds: int = ROUNDS, directions: int = DIRECTIONS) -> Fitted:
    """Fits all constants that the targets tell, from their priors."""
    priors = {name: constant.prior for name, constant in fitted().items()}
    search = Search(targets, priors)
    told = {name for name in priors if _tells(search, name)}
    coordinates(search, sorted(told, key=list(priors).index), rounds)
    random_directions(search, sorted(told), directions)
    coordinates(search, sorted(told, key=list(priors).index), rounds)
    told = {name for name in told if _tells(search, name)}
    values = {name: rounded(search.values[name]) if name in told else priors[name] for name in priors}
    last = Search(targets, values)
    return Fitted(values, frozenset(told), last.loss, tuple(math.expm1(error) for error in last.of_steps(last.errors)))


def coordinates(search: Search, names: Sequence[str], rounds: int) -> None:
    """One constant after another, up or down; a step that helps neither way is halved for the next round."""
    steps = {name: FIRST_STEP * fitted()[name].width for name in names}
    for _ in range(rounds):
        for name in names:
            up = math.exp(steps[name])
            if not any(search.moves({name: search.values[name] * factor}) for factor in (up, 1 / up)):
                steps[name] /= 2


def random_directions(search: Search, names: Sequence[str], n: int) -> None:
    """Several constants at once, for those that make up for one another."""
    generator = random.Random(SEED)
    for _ in range(n):
        chosen = generator.sample(list(names), min(ALONG, len(names)))
        step = {name: generator.gauss(0, SPREAD) * fitted()[name].width for name in chosen}
        for sign in (1, -1):
            if search.moves({name: search.values[name] * math.exp(sign * s) for name, s in step.items()}):
                break


def _tells(search: Search, name: str) -> bool:
    """Whether the cases change when a constant moves by a width."""
    here = search.loss - penalty(search.values)
    width = math.exp(fitted()[name].width)
    for value in (search.values[name] * width, search.values[name] / width):
        loss = search.tried({name: value})[0] - penalty({**search.values, name: value})
        if abs(loss - here) > TELLS:
            return True
    return False


def rounded(value: float) -> float:
    """A value with as many digits as are written."""
    return float(f"{value:.{DIGITS}g}")


def table(found: Fitted) -> str:
    """Every constant's value, prior and distance, and how well the fitted cases are met."""
    lines = [f"{'constant':36} {'value':>11} {'prior':>11} {'distance':>9}  of widths"]
    for name, constant in fitted().items():
        value = found.values[name]
        far = f"{distance(name, value):+9.2f}" if name in found.told else "not fitted"
        lines.append(f"{name:36} {value:11.4g} {constant.prior:11.4g} {far}")
    sizes = [abs(error) for error in found.errors]
    lines.append(
        f"{len(sizes)} cases of the fit's fold: median error {median(sizes):.1%}, mean {fmean(sizes):.1%}; loss {found.loss:.5f}"
    )
    return "\n".join(lines)


def constants(found: Fitted) -> dict[str, tuple[Constant, bool]]:
    """Each constant with its new value, and whether it was fitted."""
    return {
        name: (Constant(found.values[name], old.prior, old.width, old.source), name in found.told)
        for name, old in fitted().items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m emu.validate.fit [--write]`."""
    parser = argparse.ArgumentParser(prog="python -m emu.validate.fit", description="Fit constants to published runs.")
    parser.add_argument("--write", action="store_true", help="write emu/hardware/data/fitted.toml")
    asked = parser.parse_args(arguments)
    found = fit(targets())
    print(table(found))
    if asked.write:
        print(f"written to {write(constants(found))}")


if __name__ == "__main__":
    main()
