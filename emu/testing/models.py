"""Random models that fit a plan, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from emu.models import Config, Decoder
from emu.parallel import Batch, Plan
from emu.parallel.batch import IGNORED
from emu.spmd import EmuError
from emu.testing.choices import AXES, FOLDS, config_of, stages_of
from emu.testing.meshes import one_of


@dataclass(frozen=True)
class ModelFactory:
    """Makes the same small decoder each time it is called, as `emu.verify` and programs want it.

    Args:
        config: its shape.
        seed: of its weights.
    """

    config: Config
    seed: int = 0

    def __call__(self) -> Decoder:
        return Decoder(self.config, seed=self.seed)


@st.composite
def models(draw: st.DrawFn, plan: Plan | None = None, max_layers: int = 3) -> ModelFactory:
    """Factories of plain torch decoders that a plan can train: enough layers for its stages, heads for its tp, experts for
    its ep, positions for its seq; shrinks to a dense one of as few layers as there can be.

    Args:
        plan: what it is to fit; None is one device.
        max_layers: the most layers, where the plan's pipeline does not need more.
    """
    plan = plan if plan is not None else Plan()
    axes = {axis: plan.axes().get(axis, 1) for axis in AXES}
    kinds = ["dense"] if plan.ep * plan.etp == 1 else []
    kinds += ["experts", "balanced"]
    if axes["pp"] == 1 and plan.accumulated() == 1:
        kinds.append("balanced over the batch")  # which depends on how a batch is cut, on one device, too
    fold = next((name for name, sizes in FOLDS.items() if sizes == (plan.ep, plan.etp)), None)
    if fold is None:
        raise EmuError(f"no model is drawn for ep={plan.ep}, etp={plan.etp}", f"choose of {list(FOLDS.values())}")
    case = axes | {
        "schedule": plan.schedule,
        "microbatches": plan.accumulated(),
        "chunks": plan.chunks,
        "context": plan.context,
        "fold": fold,
        "model": draw(one_of(kinds)),
        "documents": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "positions": draw(one_of(["rotary", "learned"])),
    }
    stages = stages_of(case)
    layers = draw(st.integers(stages, max(stages, max_layers)))
    config = config_of(case, layers)
    return ModelFactory(replace(config, seq=max(config.seq, plan.seq)), draw(st.integers(0, 9)))


@st.composite
def batches(draw: st.DrawFn, model: Any, plan: Plan | None = None, vocab: int | None = None) -> Batch:
    """Batches of a plan's global_batch sequences of seq tokens, padded to uneven lengths: labels behind the end of a row
    do not count, nor do some in between; at least one does. Shrinks to full rows.

    Args:
        model: a module or a factory of one whose config says its vocabulary; or give `vocab`.
        plan: its sizes; None is those of emu.Plan(), but rows no longer than the model's config allows, where it says so.
        vocab: how many different tokens there are.
    """
    made = model if vocab is not None or isinstance(model, (nn.Module, ModelFactory)) else model()
    config = getattr(made, "config", None)
    if plan is None:
        plan = Plan()
        plan = replace(plan, seq=min(plan.seq, getattr(config, "seq", plan.seq)))
    if vocab is None:
        vocab = getattr(config, "vocab", None)
        if vocab is None:
            what = type(made).__name__
            raise EmuError(
                f"{what} does not say its vocabulary (config.vocab)", "say it: batches(model, plan, vocab=256)"
            )
    rows, seq = plan.global_batch, plan.seq
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x, y = (torch.randint(0, vocab, (rows, seq), generator=generator) for _ in "xy")
    padded = draw(st.lists(st.integers(0, seq), min_size=rows, max_size=rows))
    for row, n in enumerate(padded):
        y[row, seq - n :] = IGNORED
    if draw(st.booleans()):
        y[torch.rand(y.shape, generator=generator) < 1 / 8] = IGNORED
    if bool((y == IGNORED).all()):
        y[0, 0] = 0  # something must be learnt
    return Batch(x, y)
