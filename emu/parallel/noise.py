"""How far a batch can grow before it stops helping: the gradient noise scale, and the steps that a batch size saves.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162. A batch's mean gradient is the true
one plus noise that shrinks with the batch. As long as noise is most of it, twice the batch needs half the steps; once it
is not, the larger batch computes the same step at twice the cost. Data parallelism measures where that is for free: it
has gradients of small batches, one per rank, and of the large one that they make together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from emu.parallel.batch import uncut
from emu.spmd import EmuError, Group


class Noise(NamedTuple):
    """The true gradient, and how far single examples' gradients lie around it.

    Attributes:
        signal: |G|^2, the squared norm of the true gradient. An estimate may be below zero where noise hides it.
        noise: tr(S), the variance of one example's gradient, summed over all parameters.
    """

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The simple noise scale tr(S) / |G|^2, in examples: at this batch size the two are equal. May be infinite."""
        return self.noise / self.signal if self.signal > 0 else math.inf


def noise_from(small_square: float, large_square: float, small: float, large: float) -> Noise:
    """Unbiased estimates from the gradients of two batch sizes (appendix A): E |g|^2 = |G|^2 + tr(S) / batch.

    Args:
        small_square, large_square: squared norms of the mean gradients; averages over several batches of a size.
        small, large: examples in a batch of each. For batches of several sizes, their harmonic mean.

    Raises:
        EmuError: the sizes do not differ as they say.
    """
    if not 0 < small < large:
        raise EmuError(
            f"a small batch of {small:g} and a large one of {large:g} examples", "compare gradients of two sizes"
        )
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return Noise(large_square - noise / large, noise)


class GradientNoise:
    """Measures the noise scale while a model trains. Every backward pass of every rank is a small batch.

        dist = DataParallel(model, rank, "dp")
        noise = GradientNoise(model, dist.group)
        dist.backward(batch)                  # or any other strategy; each rank's own gradients are sums over its rows
        noise.small(rows, tokens)             # after every backward pass: what this rank's rows and labels were
        noise.large()                         # when .grad is the mean over all; with zero: dist.gather_gradients().values()
        noise.measured().scale                # in rows; of all steps since the start

    Examples must be drawn independently: of language, sequences and not tokens. Both estimates are unbiased, their ratio
    is not, so average over many steps; where the noise scale changes, `reset()` in between. A step costs an all-reduce
    of four numbers, and one pass over the gradients.

    Args:
        model: whose gradients; it is watched by a hook on each parameter, until `close()`.
        group: the ranks whose batches make up the large one.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        uncut(model, "GradientNoise(model, group)")
        if getattr(model, "in_parts_of_sequences", False):
            raise EmuError(
                "ranks along cp have parts of the same sequences, whose gradients are no small batches of their own",
                "measure the noise on a mesh without cp: it is a property of the model and the data",
            )
        self.group = group
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise EmuError(f"{type(model).__name__} has no parameters to train", "give it some that require grad")
        self._hooks = [p.register_hook(self._add) for p in self.parameters]
        self._square = self._number()  # of the gradient of the backward pass under way
        self._smalls = self._number(4)  # this step's: sum of squares, of 1 / examples, how many, examples
        self._passes = 0
        self.reset()

    def _number(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=self.parameters[0].device)

    def _add(self, gradient: Tensor) -> None:
        with torch.no_grad():
            self._square += torch.linalg.vector_norm(gradient).square()

    def reset(self) -> None:
        """Forgets the steps so far."""
        self.steps = 0
        self._sums = self._number(2)  # signal, noise

    def small(self, examples: int, tokens: int | None = None) -> None:
        """Ends a small batch: one backward pass of this rank, whose gradients are sums.

        Args:
            examples: how many independent ones it had; 0 on a rank without rows.
            tokens: what the gradients are still to be divided by; as many as examples where not given.

        Raises:
            EmuError: counts that cannot be.
        """
        divisor = examples if tokens is None else tokens
        if type(examples) is not int or type(divisor) is not int or examples < 0 or divisor < 0:
            raise EmuError(f"a batch of {examples!r} examples, {tokens!r} tokens", "give whole numbers, 0 or more")
        if examples and divisor:
            square, self._square = self._square, self._number()
            counts = torch.tensor([1 / examples, 1, examples], dtype=torch.float64).to(square.device)
            self._smalls += torch.cat([(square / divisor**2).reshape(1), counts])
        self._passes += 1

    @torch.no_grad()
    def large(self, gradients: Iterable[Tensor] | None = None) -> None:
        """Ends a step, of which every rank now has the mean gradient.

        Args:
            gradients: all parameters'; what is in `.grad` where not given.

        Raises:
            EmuError: the step had one small batch only, which is then the large one, too.
        """
        if self.group.size * self._passes < 2:
            raise EmuError(
                "there is one batch, and no smaller one to compare it with",
                "use two ranks or more, or several backward passes a step, each followed by small(examples)",
            )
        squares, inverse, count, examples = self.group.all_reduce(self._smalls, name="noise").unbind()
        small, large = squares / count, self._number()
        for gradient in (p.grad for p in self.parameters) if gradients is None else gradients:
            if gradient is not None:
                large += torch.linalg.vector_norm(gradient).square()
        noise = (small - large) / (inverse / count - 1 / examples)
        self._sums += torch.stack([large - noise / examples, noise])
        self._smalls, self._passes = self._number(4), 0
        self.steps += 1

    def measured(self) -> Noise:
        """The average over all steps since the start, or the last reset. The host waits for it.

        Raises:
            EmuError: no step yet, or one in which all rows were in one backward pass.
        """
        if not self.steps:
            raise EmuError("no step was measured yet", "call small(examples) and large() in every step")
        signal, noise = (self._sums / self.steps).tolist()
        if not math.isfinite(signal + noise):
            raise EmuError(
                "in some step one batch had all the rows, or a gradient was not finite",
                "give rows to two ranks, or two backward passes, in every step",
            )
        return Noise(signal, noise)

    def close(self) -> None:
        """Stops watching the model."""
        for hook in self._hooks:
            hook.remove()


class Tradeoff(NamedTuple):
    """What it takes to reach a goal, by batch size (section 2 of the paper).

    Attributes:
        min_steps: optimizer steps with a batch as large as one likes.
        min_examples: examples with a batch as small as one likes.
    """

    min_steps: float
    min_examples: float

    @property
    def critical(self) -> float:
        """The critical batch size, in examples: it needs twice the fewest steps and twice the fewest examples."""
        return self.min_examples / self.min_steps if self.min_steps > 0 else math.inf

    def steps(self, batch: float) -> float:
        """Steps with this batch size: min_steps (1 + critical / batch)."""
        return self.min_steps + self.min_examples / batch

    def examples(self, batch: float) -> float:
        """Examples with this batch size: min_examples (1 + batch / critical)."""
        return self.min_steps * batch + self.min_examples


def fit_tradeoff(batches: Sequence[float], steps: Sequence[float]) -> Tradeoff:
    """The trade-off nearest to measured steps, by the least sum of squared relative differences.

    If steps fall as batches grow, however large, `min_steps` is 0; if they do not fall at all, `min_examples` is.

    Args:
        batches: batch sizes, in examples; two different ones at least.
        steps: steps to the goal with each, the learning rate tuned for each.

    Raises:
        EmuError: fewer than two sizes, other than one number of steps for each, or one that is not above zero.
    """
    if len(batches) != len(steps) or len(set(batches)) < 2:
        raise EmuError(
            f"{len(batches)} batch sizes, {len(set(batches))} of them different, and {len(steps)} numbers of steps",
            "give one number of steps for each of two or more batch sizes",
        )
    if not all(0 < x < math.inf for x in (*batches, *steps)):
        raise EmuError(f"batches {list(batches)} or steps {list(steps)} are not above zero", "leave such runs out")
    # Relative: a / S + b / (B S) = 1 for every measurement, linear in a = min_steps and b = min_examples.
    u, v = [1 / s for s in steps], [1 / (b * s) for b, s in zip(batches, steps)]
    uu, vv, uv = (sum(x * y for x, y in zip(p, q)) for p, q in ((u, u), (v, v), (u, v)))
    determinant = uu * vv - uv * uv
    a = (sum(u) * vv - sum(v) * uv) / determinant
    b = (sum(v) * uu - sum(u) * uv) / determinant
    if a < 0:
        return Tradeoff(0.0, sum(v) / vv)
    return Tradeoff(a, b) if b >= 0 else Tradeoff(sum(u) / uu, 0.0)
