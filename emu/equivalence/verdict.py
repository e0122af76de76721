"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from emu.equivalence.bisection.divergence import Divergence


@dataclass(frozen=True)
class Verdict:
    """Whether a program computes what its reference computes. True if it does (and every mutant that counts was killed).

    Attributes:
        equivalent: every compared tensor agrees in this tier.
        tier: "exact" (bit for bit on a fixed-point grid), "float64" (1e-12) or "float32" (1e-5).
        max_rel_err, worst_parameter: the largest error and where; 0 when all is bit-equal.
        n_parameters, n_inputs: how many tensors were compared beside the loss: gradients of inputs, and all others.
        mutants, mutants_killed, mutants_equivalent: how many deliberately broken runs there were, how many the check
            noticed, and how many changed no rank's state at all (so that no check could notice them).
        first_divergence: the first result, in the reference's order, that differs; None if none does.
        why: in words, for a verdict that is not clean, with a hint what to do.
        survivors: mutants that changed a state and went unnoticed.
        certificate_bits: exact tier only: the bits that the largest sum needed, of 53.
        without_gradient: names that got no gradient (frozen or unused), so that there was nothing to compare.
        divergence: where the program first computes what the reference never does: layer, direction, ranks and line.
    """

    equivalent: bool
    tier: str
    max_rel_err: float
    worst_parameter: str | None
    n_parameters: int
    n_inputs: int
    mutants: int = 0
    mutants_killed: int = 0
    mutants_equivalent: int = 0
    first_divergence: str | None = None
    why: str = ""
    survivors: list[str] = field(default_factory=list)
    certificate_bits: float | None = None
    without_gradient: list[str] = field(default_factory=list)
    divergence: Divergence | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __bool__(self) -> bool:
        return self.equivalent and not self.survivors

    def __str__(self) -> str:
        how = {"exact": "bit for bit", "float64": "to 1e-12", "float32": "to 1e-5"}[self.tier]
        if self.equivalent:
            text = f"equivalent in tier {self.tier}: {self._agreeing()} {how}"
            if self.tier != "exact":
                text += f" (largest error {self.max_rel_err:.1e}, {self.worst_parameter})"
        else:
            text = f"NOT equivalent in tier {self.tier}: {self.why}"
            text += f"\n  first divergence: {self.divergence}" if self.divergence else ""
        if self.mutants:
            real = self.mutants - self.mutants_equivalent
            text += f"; {self.mutants_killed} of {count_of(real, 'mutant')} killed"
            if self.mutants_equivalent:
                text += f" ({self.mutants_equivalent} more {'change' if self.mutants_equivalent > 1 else 'changes'} nothing)"
        if self.without_gradient:
            names = ", ".join(self.without_gradient[:3])
            more = f" and {len(self.without_gradient) - 3} more" if len(self.without_gradient) > 3 else ""
            text += f"\n  without a gradient, so not compared: {names}{more}"
        if self.survivors:
            text += f"\n  went unnoticed: {'; '.join(self.survivors)}\n  hint: {self.why}"
        return text

    def _agreeing(self) -> str:
        n = self.n_parameters + self.n_inputs
        return f"{count_of(n, 'tensor')} {'agree' if n > 1 else 'agrees'}" if n else "the loss agrees"


def count_of(n: int, noun: str) -> str:
    """(1, "tensor") -> "1 tensor"."""
    return f"{n} {noun}{'s' if n != 1 else ''}"
