"""Software stacks: what a training framework of its year fuses, overlaps, keeps and launches. Data, in stacks.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from emu.hardware.packaged import parse_toml
from emu.planner.closed.workload import WorkloadError


@dataclass(frozen=True)
class Stack:
    """What software decides about a step's kernels, messages and memory.

    Args:
        name: its table in stacks.toml.
        meaning: which software of which year.
        attention: "unfused" computes, keeps and passes over all scores; else a kind of emu.cost.prices.attention_s.
        elementwise: how far elementwise kernels are fused: "eager" not at all, "jit" by hand where it counts, "fused" by
            a compiler or in hand-written kernels.
        dropout: whether there is any.
        spelled_norms: whether RMS norms are written out in float32, a kernel for each operation (gated models only).
        launch: the constant for what the host takes to launch a kernel; "" where whole programs are launched.
        hosts_wait: whether every host of a tensor-parallel group waits for the slowest in each collective.
        overlaps: what runs beside compute: "tensor" (collectives within a layer, in pieces), "weights" (of them, sums of
            inputs' gradients alone, beside weights' gradients), "data" (gradients and gathers of parameters), "pipeline"
            (sends between stages).
        gradient_bytes: of an element in data parallelism's reduction.
        sharded_gradient_bytes: the same under FSDP.
        gathers_fp8: whether FSDP gathers parameters in fp8 where products are.
        sends_slices: whether a tensor-parallel rank sends only its slice to the next stage.
        tied_reduce: whether the first and last stage all-reduce gradients of a shared embedding.
        reduces_whole: whether ZeRO 1 all-reduces gradients where a reduce-scatter would do.
        dispatcher: how tokens reach experts: "plain" is one all-to-all, "nodewise" sends a token once to a node.
        counted: what its published memory figures count: "allocated" tensors, "reserved" by torch's allocator, or
            "device" with context and communicators.
        accumulator_bytes: of a gradient as kept between micro-batches.
        logit_bytes: of a logit and all that cross entropy makes of it, where there is most; kept_logit_bytes: of them,
            those that are there until its backward; moved_logit_bytes: read and written, forward and backward, 0 where
            cross entropy is spelled out, which has a fitted constant.
        products_alone: whether a layer keeps nothing but its products' outputs, and computes the rest again.
        cuts_residuals: whether tensor parallelism cuts what lies between layers, too, along the hidden size.
        deepspeed: whether DeepSpeed's optimizers for 16-bit training keep the states.
        keeps_outputs: whether a stage keeps what it sent, too.
        recorded: whether its kernels are counted one by one as emu records them, instead of by the fields above.
        words: a source whose title or notes have one of these used it; also: and one of these, if there are any.
        chips: and it ran on a chip whose name starts with one of these, if there are any.
        fsdp: and parameters were sharded or not; None: either.
        sources: field name to where it was read; "default" for the rest.
    """

    name: str
    meaning: str
    attention: Literal["unfused", "flash1", "flash2", "flash3"] = "flash2"
    elementwise: Literal["eager", "jit", "fused"] = "jit"
    dropout: bool = False
    spelled_norms: bool = False
    launch: str = "software.launch_s"
    hosts_wait: bool = False
    overlaps: frozenset[str] = frozenset()
    gradient_bytes: int = 4
    sharded_gradient_bytes: int = 4
    gathers_fp8: bool = False
    sends_slices: bool = False
    tied_reduce: bool = False
    reduces_whole: bool = False
    dispatcher: Literal["plain", "nodewise"] = "plain"
    counted: Literal["allocated", "reserved", "device"] = "reserved"
    accumulator_bytes: int = 2
    logit_bytes: float = 12
    kept_logit_bytes: float = 6
    moved_logit_bytes: float = 0
    products_alone: bool = False
    cuts_residuals: bool = False
    deepspeed: bool = False
    keeps_outputs: bool = False
    recorded: bool = False
    words: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    fsdp: bool | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    @property
    def fused(self) -> bool:
        return self.elementwise == "fused"


@cache
def stacks() -> Mapping[str, Stack]:
    """All stacks by name, in the order in which a source is looked for."""
    tables = parse_toml((files("emu.planner.closed") / "stacks.toml").read_text(encoding="utf-8"))
    return {name: _built(name, tables) for name in tables}


def stack(name: str) -> Stack:
    """A stack by name. Raises WorkloadError with the nearest one."""
    if name in stacks():
        return stacks()[name]
    close = get_close_matches(str(name), stacks(), 1)
    raise WorkloadError(
        f"there is no software stack {name!r:.60}",
        (f"did you mean {close[0]}? " if close else "") + f"stacks are {', '.join(stacks())}",
        field="stack",
        value=name,
    )


def stack_for(text: str, chip: str = "", fsdp: bool = False) -> tuple[str, bool]:
    """The stack that a published run used, by what its source says.

    Args:
        text: title, section and notes of the source, in any order.
        chip: name of the chip, e.g. "H100-SXM-80GB".
        fsdp: whether parameters were sharded.

    Returns:
        Its name; and whether the source names the software. Where it does not, a stack of the chip's time is assumed:
        the last tables of stacks.toml, which look for no words.
    """
    said = text.lower()
    for one in stacks().values():
        if one.chips and not chip.lower().startswith(one.chips):
            continue
        if one.fsdp is not None and one.fsdp != fsdp:
            continue
        if one.words and not any(word in said for word in one.words):
            continue
        if one.also and not any(word in said for word in one.also):
            continue
        return one.name, bool(one.words)
    raise AssertionError("stacks.toml ends with a table that fits everything")


def _built(name: str, tables: Mapping[str, dict[str, Any]]) -> Stack:
    """A stack from its table; what it does not say is as in the stack that it is `like`, all but who used it."""
    table = dict(tables[name])
    base = table.pop("like", None)
    known = {} if base is None else vars(_built(base, tables))
    inherited = {field: value for field, value in known.items() if field not in ("words", "also", "chips", "fsdp")}
    sources = {**inherited.pop("sources", {}), **table.pop("sources", {})}
    for listed in ("words", "also", "chips"):
        table[listed] = tuple(table.get(listed, ()))
    if "overlaps" in table:
        table["overlaps"] = frozenset(table["overlaps"])
    return Stack(**{**inherited, **table, "name": name, "sources": sources})
