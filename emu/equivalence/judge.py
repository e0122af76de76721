"""Judging one run against the right results: what is counted, what differs, and a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from emu.equivalence.compare import Difference, differences, whole_results
from emu.equivalence.verdict import Verdict, count_of
from emu.spmd import Mesh, ReplicasDisagree
from emu.virtual.launch import VirtualRun


class Arithmetic(Protocol):
    """How a tier compares."""

    tier: str

    def agrees(self, difference: Difference) -> bool: ...

    def comparable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Judged:
    """A verdict, and what it was made from.

    Args:
        verdict: without mutants and advice.
        ours: the program's results, whole; empty where they could not be put together.
        wrong: the differences that count.
    """

    verdict: Verdict
    ours: Mapping[str, Tensor] = field(default_factory=dict)
    wrong: list[Difference] = field(default_factory=list)


def is_input(name: str) -> bool:
    return name.split(".")[0] == "inputs"


def is_loss(name: str) -> bool:
    return name.startswith("loss")


def judge(run: VirtualRun, mesh: Mesh, right: Mapping[str, Tensor], arithmetic: Arithmetic) -> Judged:
    """Compares the results of all ranks with the right ones."""
    verdict = _counted(Verdict(False, arithmetic.tier, 0.0, None, 0, 0), list(right))
    if not right:
        why = "the reference returns nothing to compare: return emu.grads(model), or tensors"
        return Judged(replace(verdict, why=why))
    try:
        ours = whole_results(run.results, mesh)
    except ReplicasDisagree as error:
        name = getattr(error, "name", None)
        return Judged(
            replace(verdict, max_rel_err=float("inf"), worst_parameter=name, first_divergence=name, why=str(error))
        )
    found = differences(arithmetic.comparable(ours), arithmetic.comparable(right))
    worst = max(found, key=lambda d: d.error)
    verdict = _counted(verdict, [d.name for d in found if not d.one_sided])
    verdict = replace(
        verdict,
        max_rel_err=worst.error,
        worst_parameter=worst.name,
        without_gradient=[d.name for d in found if d.one_sided],
    )
    wrong = [d for d in found if not arithmetic.agrees(d)]
    if wrong:
        return Judged(replace(verdict, first_divergence=wrong[0].name, why=_what(wrong, worst, verdict)), ours, wrong)
    if not any(bool(t.any()) for t in right.values()):
        why = "every result is zero, which any program can compute: give it a batch with a gradient"
        return Judged(replace(verdict, why=why), ours)
    return Judged(replace(verdict, equivalent=True), ours)


def _counted(verdict: Verdict, names: list[str]) -> Verdict:
    """Tensors beside losses, in success and failure alike."""
    n_inputs = sum(map(is_input, names))
    return replace(verdict, n_parameters=len(names) - n_inputs - sum(map(is_loss, names)), n_inputs=n_inputs)


def _what(wrong: list[Difference], worst: Difference, verdict: Verdict) -> str:
    """How many differ, which is the first, and which differs most."""
    n, of = sum(not is_loss(d.name) for d in wrong), verdict.n_parameters + verdict.n_inputs
    first = wrong[0]
    if not n:
        others = f"; the other {count_of(of, 'tensor')} agree" if of > 1 else "; the other tensor agrees" if of else ""
        return f"the {first.name} differs ({_size(first)}){others}"
    loss = f"the {next(d.name for d in wrong if is_loss(d.name))} and " if n < len(wrong) else ""
    text = f"{loss}{n} of {count_of(of, 'tensor')} {'differ' if n > 1 or loss else 'differs'}, "
    text += f"first {first.name!r} ({_size(first)})"
    return text + (f", most {worst.name!r} ({_size(worst)})" if worst.name != first.name else "")


def _size(difference: Difference) -> str:
    return difference.why or f"relative error {difference.error:.2g}"
