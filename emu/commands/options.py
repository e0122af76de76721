"""Options that several commands have: that of JSON, and the fields of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from emu.parallel import Plan

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


def _flag(kind: Any, *names: str, text: str, default: str) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=text, show_default=default)]


# Field of a plan -> its flag. None is what nobody said, which a file may say.
PLAN_FLAGS: dict[str, Any] = {
    "mesh": _flag(
        str, "--mesh", text="Axes outermost first, e.g. dp=2,tp=2.", default="dp=2; to simulate: dp, all devices"
    ),
    "zero": _flag(
        int, "--zero", text="With --model: shard nothing (0), optimizer states, gradients, parameters (3).", default="0"
    ),
    "replicate": _flag(
        int, "--replicate", text="With --model: how many groups hold the same shards (HSDP).", default="1"
    ),
    "keep_gathered": _flag(
        bool,
        "--keep-gathered/--free-gathered",
        text="With --zero 3: keep parameters from forward to backward.",
        default="free",
    ),
    "prefetch": _flag(int, "--prefetch", text="With --zero 3: units gathered ahead.", default="1"),
    "sp": _flag(bool, "--sp/--no-sp", text="With --model: sequence parallel, over tp.", default="off"),
    "ep": _flag(int, "--ep", text="With --model: experts are shared out over so many ranks.", default="1"),
    "etp": _flag(int, "--etp", text="With --model: every expert is cut over so many ranks.", default="1"),
    "capacity": _flag(
        float, "--capacity", text="With --model: an expert takes so many times its even share at most.", default="all"
    ),
    "schedule": _flag(
        str,
        "--schedule",
        text="With --model, over pp: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, ...",
        default="1f1b",
    ),
    "chunks": _flag(int, "--chunks", text="With --model: stages that a rank of the pipeline holds.", default="1"),
    "context": _flag(
        str,
        "--context",
        text="With --model, over cp: ring, zigzag, striped, all-gather, ulysses or usp.",
        default="zigzag",
    ),
    "checkpoint": _flag(
        str,
        "--checkpoint",
        text="With --model: what is computed again: none, full, every:C, sqrt, naive, selective, ...",
        default="none",
    ),
    "offload": _flag(
        bool, "--offload/--no-offload", text="With --model: activations wait in the host's memory.", default="off"
    ),
    "microbatches": _flag(
        int,
        "--microbatches",
        text="With --model: a rank's sequences are cut into so many, one after the other.",
        default="1",
    ),
    "micro_batch": _flag(
        int, "--micro-batch", text="With --model: the most sequences of a rank at once.", default="all"
    ),
    "precision": _flag(str, "--precision", text="With --model: fp32, bf16-mixed or fp16-scaled.", default="bf16-mixed"),
    "dtype": _flag(
        str, "--dtype", text="With --model: one dtype for every role, in place of --precision.", default="by role"
    ),
    "launch_mode": _flag(
        str, "--launch-mode", text="With --model: how kernels start: eager, compiled or graph.", default="eager"
    ),
    "global_batch": _flag(int, "--global-batch", text="With --model: sequences in the batch.", default="8"),
    "seq": _flag(
        int,
        "--seq",
        text="With --model: tokens in a sequence.",
        default="32, or what the model takes if less; to simulate: what it takes",
    ),
    "seed": _flag(int, "--seed", text="With --model: of weights and data.", default="0"),
    "plan": _flag(
        Path, "--plan", text="With --model: a TOML file with a plan; flags beside it count more.", default="none"
    ),
}


def with_plan_flags(command: Callable[..., int]) -> Callable[..., int]:
    """A command that has the flags of a plan, too: its argument `flags` is a dict of those that were given."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, kind, default=None, annotation=flag) for name, flag in PLAN_FLAGS.items()]

    @wraps(command)
    def called(**options: Any) -> int:
        found = {name: options.pop(name) for name in PLAN_FLAGS}
        return command(**options, flags={name: value for name, value in found.items() if value is not None})

    parameters, read = [p.replace(kind=kind) for p in own], cast(Any, called)
    # Typer reads both; what is not said last stands last in its help.
    read.__signature__ = inspect.Signature([*parameters[:-1], *more, *parameters[-1:]])
    read.__annotations__ = {p.name: p.annotation for p in (*parameters, *more)}
    return called


def plan_of(flags: dict[str, Any], most: int, **usual: Any) -> tuple[Plan, set[str]]:
    """The plan that flags describe, over that of a file if there is one; and the fields that somebody said.

    Args:
        flags: what `with_plan_flags` hands on.
        most: tokens that a sequence of the model may have: seq is no more where nobody says it.
        usual: fields that are otherwise where nobody says them.

    Raises:
        PlanError: one that cannot be, or a file that is none.
    """
    from emu.parallel import Plan

    said = dict(flags)
    if "keep_gathered" in said:
        said["reshard_after_forward"] = not said.pop("keep_gathered")
    path = said.pop("plan", None)
    file = Plan.file(path) if path is not None else None
    spoken = {*said, *(file.said if file is not None else ())}
    said = {field: value for field, value in usual.items() if field not in spoken} | said
    plan = file.plan(**said) if file is not None else Plan(**said)
    return plan if "seq" in spoken else replace(plan, seq=min(plan.seq, most)), spoken
