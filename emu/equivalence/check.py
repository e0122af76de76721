"""Checking a program against a reference: both run again, in the tier's arithmetic, and everything is compared.

The reference is a program, too, run on one device: nothing of what distributes the work is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from emu.equivalence.advice import (
    common_factor,
    may_be_rounding,
    say_factor,
    say_names,
    say_rounding,
    say_where,
)
from emu.equivalence.arithmetic import GRIDS, Arithmetic
from emu.equivalence.bisection import Divergence, bisect
from emu.equivalence.bisection.recorder import Record
from emu.equivalence.failing import note_makers
from emu.equivalence.judge import Judged, judge
from emu.equivalence.mutants import Observed, mutants_of, sample
from emu.equivalence.scoring import score, wanted
from emu.equivalence.state import keeping
from emu.equivalence.verdict import Verdict
from emu.spmd import BufferInFlight, CrossRankAccess, EmuError, FreedMemory, Mesh
from emu.spmd.programs import check_kinds
from emu.virtual.launch import Program, run_virtual
from emu.virtual.rendezvous import Rendezvous

TIERS = ("exact", "float64", "float32")


def check(
    program: Program,
    mesh: Mesh,
    reference: Program,
    *,
    args: Sequence[Any] = (),
    tier: str = "exact",
    mutants: str | int = "sampled",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Whether `program` on `mesh` computes what `reference` computes on one device.

    Args:
        program: `program(rank, *args)`; what it returns is compared: tensors, numbers, `emu.grads(model)`, or dicts and
            lists of them. A tensor without a layout is a replica: every rank must return the same.
        reference: `reference(rank, *args)` on a mesh of one rank with the same axes; or `reference(*args)` without rank.
        tier: "exact", "float64" or "float32".
        mutants: "none", "sampled", "all", or how many.

    Raises:
        EmuError: an unknown tier, no program, no Mesh, a reference that is none, or results that cannot be compared;
            whatever either raises.
        BufferInFlight, CrossRankAccess, FreedMemory: the program has a race, its ranks share memory, or it uses memory
            that it freed, whatever its results are.
    """
    check_kinds(program, mesh)
    if tier not in TIERS:
        raise EmuError(f"there is no tier {tier!r}", f"use one of {', '.join(TIERS)}")
    if not callable(reference):
        raise EmuError(
            f"the reference is a {type(reference).__name__}, not a program",
            "pass a function reference(rank) that computes the same on one device",
        )
    most = wanted(mutants)
    alone = Mesh(**dict.fromkeys(mesh.axes, 1))
    single = _with_rank(reference, len(args))
    with keeping():
        for values, gradients in GRIDS if tier == "exact" else ((0, 0),):
            arithmetic = Arithmetic(tier, values, gradients)
            progress("reference")
            right, certificate = arithmetic.certified(single, alone, args)
            if certificate is None or certificate.holds:
                break
        else:
            raise EmuError(
                f"sums are too long for the exact tier: they need {GRIDS[-1]}-grids and {certificate.limit} bits, "
                f"{-certificate.margin:.1f} too many",
                'use a smaller batch or model, or tier="float64"',
            )
        progress("program")
        _refuse_races(program, mesh, args)  # first: what is not watched may take the process down
        try:
            base = arithmetic.run(program, mesh, args, Observed)
        except Exception as error:
            note_makers(error, program, mesh, _recorded(args))
            raise
        judged = judge(base.run, mesh, right, arithmetic)
        verdict = replace(
            judged.verdict, certificate_bits=max(certificate.bits.values(), default=0.0) if certificate else None
        )
        if verdict.equivalent:
            every = mutants_of(list(base.meeting_place.sites))
            chosen = every if most is None else sample(every, most)
            verdict = score(verdict, chosen, program, mesh, args, base, right, arithmetic, progress)
        else:
            drops_out = next((keeper.random for keeper in base.keepers if keeper.random), None)
            progress("bisection")
            names = [d.name for d in judged.wrong] or [verdict.first_divergence]
            divergence = _diverges(program, single, mesh, alone, [n for n in names if n], args)
            hint = _advice(
                judged,
                arithmetic.comparable(right),
                mesh,
                drops_out,
                divergence is not None,
                lambda: _in_float64(single, alone, program, mesh, args) if tier == "exact" else "",
            )
            why = f"{verdict.why}\n  hint: {hint}" if hint else verdict.why
            verdict = replace(verdict, why=why, divergence=divergence)
    return verdict


def _refuse_races(program: Program, mesh: Mesh, args: Sequence[Any]) -> None:
    """Runs the program once more, tracked: in a tier's arithmetic nobody watches who uses which buffer when.

    Raises:
        BufferInFlight, CrossRankAccess, FreedMemory: what the tracker finds.
    """
    before = torch.get_default_dtype()
    # A program may run in one dtype only (a number from outside that is float64); how it fails is for its tier to say.
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            run_virtual(program, mesh, args=args)
        except (BufferInFlight, CrossRankAccess, FreedMemory):
            raise
        except Exception:
            continue
        finally:
            torch.set_default_dtype(before)
        return


def _with_rank(reference: Program, n_args: int) -> Program:
    """A reference may leave out the rank: it does if with one, an argument is too many or lands in a default."""
    try:
        signature = inspect.signature(reference)
    except ValueError:  # a builtin, which says nothing about itself
        return reference
    try:
        filled = signature.bind(None, *[None] * n_args).arguments
        spare = any(signature.parameters[name].default is not inspect.Parameter.empty for name in filled)
    except TypeError:
        spare = True
    if spare and next(iter(signature.parameters), "") != "rank":
        return lambda rank, *args: reference(*args)
    return reference


def _advice(
    judged: Judged,
    right: Mapping[str, Tensor],
    mesh: Mesh,
    drops_out: str | None,
    located: bool,
    rounding: Callable[[], str],
) -> str:
    """What to do about results that differ; the first of the causes below that fits.

    Where it is known which line is wrong (`located`), nothing general is said beside it of a program without a loss to
    begin with, or of one that cuts nothing but layers.
    """
    wrong, ours = judged.wrong, judged.ours
    if not wrong:
        return ""
    if drops_out is not None:
        return (
            f"{drops_out} draws random numbers, and a whole batch draws others than its pieces do: "
            "call model.eval() in both, or make the model without dropout"
        )
    if names := say_names(wrong, ours, right):
        return names
    if any("finite" in d.why for d in wrong):
        return "find the first operation that overflows, or use a batch and weights that do not"
    if factor := common_factor(wrong, ours, right):
        return say_factor(factor, mesh)
    if may_be_rounding(wrong) and (said := rounding()):
        return said
    layers = mesh.axes.get("tp", 1) == mesh.size  # or nothing at all
    return "" if located and (layers or "loss" not in right) else say_where(wrong, right, mesh)


def _diverges(
    program: Program, single: Program, mesh: Mesh, alone: Mesh, wrong: list[str], args: Sequence[Any]
) -> Divergence | None:
    """Where the program first computes what the reference does not: both run once more, in float64."""
    return bisect(program, single, mesh, alone, wrong, _recorded(args)) if wrong else None


def _recorded(args: Sequence[Any]) -> Callable[[Program, Mesh, Record, Any], Sequence[Any]]:
    """What runs a program in float64, keeping what it makes in a record, and returns its results."""
    arithmetic = Arithmetic("float64", 0, 0)

    def runs(program: Program, mesh: Mesh, record: Record, meeting_place: Any) -> Sequence[Any]:
        return arithmetic.run(program, mesh, args, meeting_place, watching=record.within).run.results

    return runs


def _in_float64(single: Program, alone: Mesh, program: Program, mesh: Mesh, args: Sequence[Any]) -> str:
    """Whether a small difference in the exact tier is rounding: whether float64 sees it, too."""
    arithmetic = Arithmetic("float64", 0, 0)
    try:
        right, _ = arithmetic.certified(single, alone, args)
        judged = judge(arithmetic.run(program, mesh, args, Rendezvous).run, mesh, right, arithmetic)
    except Exception:  # a program that cannot run in that tier leaves the question open; its own result stands
        return ""
    return say_rounding(judged.verdict.max_rel_err if judged.verdict.equivalent else None)
