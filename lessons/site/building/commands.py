"""The commands: their arguments and flags as typer has them, and the keys of what they print as JSON."""

from __future__ import annotations

import re
from typing import Any

import typer

from building.markdown import code, plain, table, worded
from emu.cli import app
from emu.commands.options import PLAN_FLAGS
from emu.cost import Metrics
from emu.equivalence import Verdict
from emu.simulation import Figures
from emu.simulation.outcome import KEYS

_FIELD = re.compile(r"^    (\w+(?:, \w+)*): ((?:.+\n?)(?:^     +.+\n?)*)", re.M)


def commands() -> dict[str, Any]:
    """The commands of `emu`, by name."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def all_of_them() -> str:
    """A section for each command; the flags of a plan have one of their own."""
    parts = []
    for name, command in commands().items():
        own = [p for p in command.params if p.name not in PLAN_FLAGS or name in ("run", "step")]
        parts += [f"## emu {name}", worded(command.help), table(("", "default", "meaning"), map(_row, own))]
        if len(own) < len(command.params):
            parts.append("And [the flags of a plan](#the-flags-of-a-plan).")
    simulate = commands()["simulate"]
    parts += [
        "## The flags of a plan",
        "`emu verify` and `emu simulate` have them. Each is a field of {py:class}`emu.Plan`, with `_` for `-`"
        " (`--keep-gathered` is `reshard_after_forward=False`).",
        table(("", "default", "meaning"), [_row(p) for p in simulate.params if p.name in PLAN_FLAGS]),
    ]
    return "\n\n".join(parts)


def _row(option: Any) -> tuple[str, str, str]:
    names = [*option.opts, *option.secondary_opts]
    if option.param_type_name == "argument":
        names = [option.name.upper() if option.required else f"[{option.name.upper()}]"]
    default = option.show_default if isinstance(option.show_default, str) else option.default
    shown = "" if default in (None, False, ()) or option.required else plain(str(default))
    return (" ".join(map(code, names)), shown, plain(option.help or ""))


def fields_of(docstring: str) -> dict[str, str]:
    """Names and meanings of a docstring's section of fields; those that share a line share its meaning."""
    section = re.split(
        r"^(?:Fields|Attributes):\n", re.sub(r"^    ", "", docstring, flags=re.M), maxsplit=1, flags=re.M
    )[-1]
    found = {}
    for names, meaning in _FIELD.findall(section):
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found


def keys() -> dict[str, dict[str, str]]:
    """Command -> key of its JSON object -> what it is."""
    metrics = fields_of(Metrics.__doc__ or "")
    figures = metrics | fields_of(Figures.__doc__ or "")
    return {
        "demo": {
            "strategies": "a list, one of each strategy: `name`, `equivalent` (its step is one device's), `tier`,"
            " `step_time_s`, `peak_hbm_bytes`, `comm_bytes` (by group), `mfu`",
            "report": "the path of the HTML page",
            "critical_batch": "the batch from which on doubling it saves less than half of the steps; null unless measured",
            "loss_single": "the last loss of the training on one device",
            "loss_distributed": "the last loss of the training on eight",
            "losses_single": "all losses of the first",
            "losses_distributed": "all losses of the second",
        },
        "verify": fields_of(Verdict.__doc__ or ""),
        "run": {
            "results": "what the program returned, by rank; of tensors their values",
            "metrics": f"all fields of {{py:class}}`emu.cost.Metrics`: {', '.join(code(name) for name in metrics)}",
            "ranks": "how many ranks there were",
            "hazards": "with `--hazards`: `free`, `ranks`, `uses`, `ordered`, `hazards`, `needed`, `redundant`, `spare`,"
            " `choices`; see {py:class}`emu.Hazards`",
            "advice": "of virtual runs, a list of what would make it faster, smaller or right: `kind`, `what`, `where`,"
            " `hint`, `gain_s`, `gain`, `gain_bytes`; see {py:class}`emu.cost.Advice`",
        },
        "step": {
            "index": "how many steps were taken",
            "known": "how many steps are known",
            "ended": "whether the program is over",
            "error": "`kind` and `message` of what ended it, or null",
            "op": "the step that comes next",
            "mesh": "axis to size",
            "cluster": "its name",
            "capacity_bytes": "device memory of a rank",
            "provisional_s": "the time of what was done so far",
            "messages": "messages in flight",
            "collectives": "collectives that wait for somebody",
            "ranks": "a list, one of each rank: `rank`, `coords`, `state`, `line`, `waits_in`, `last`, `next`, `steps`,"
            " `mark`, `hbm`, `peak_bytes`, `streams`, `works`, `host_s`",
            "refused": "commands that were not understood, or could not be",
        },
        "clinic": {
            "cases": "a list: `n`, `slug`, `title`, `kind`, `url`; of cases that ran also `broken` and `mended` (what emu"
            " says of both programs) and `found`"
        },
        "simulate": {key: figures[key] for key in KEYS},
        "validate": {
            "n": "how many measured steps were predicted",
            "mape": "the mean of the errors' sizes",
            "median_ape": "their median",
            "rank_accuracy": "of pairs of alike runs, the share whose order is predicted",
            "by_source": "the same figures for each source",
            "cases": "a list: `id`, `measured_s`, `predicted_s`, `error` (predicted over measured, less 1)",
            "bias": "the mean error with its sign",
            "worst": "the largest error's size",
            "within": "shares of cases within some errors",
            "rank": "pairs that were compared, and right ones; `equal_batch`: of those with the same batch",
            "by_axis": "figures by kind of parallelism, and by size",
            "memory": "figures and cases of peak memory; `fits`: what was predicted of runs that ran, and of those that did not",
            "layers": "figures and cases of single layers",
            "collectives": "figures and cases of collectives: `large` (from 1 MiB), `all`",
            "analytic": "figures of published predictions, which measure nothing",
            "rows": "how many rows were read, and what became of them",
            "goals": "what is promised, and whether it holds",
            "assumed": "what was assumed where rows do not say, and of how many",
            "ignored_fields": "fields of rows that nobody reads",
            "unusable": "rows that could not be used, and why",
            "picture": "with `--picture`: the path of the picture",
        },
        "export": {
            "written": "a list, one of each file: `format`, `path`, `bytes`",
            "ranks": "how many ranks the run has a record of",
            "step_time_s": "its step time on the cluster that was asked for",
        },
        "error": {"error": "what is wrong", "hint": "what to do"},
    }


def all_keys() -> str:
    """A table of keys for each command, and one for errors."""
    parts = []
    for command, meanings in keys().items():
        title = "## What went wrong" if command == "error" else f"## emu {command} \\-\\-json"
        rows = [(code(key), meaning if "`" in meaning else plain(meaning)) for key, meaning in meanings.items()]
        parts += [title, table(("key", "what it is"), rows)]
    return "\n\n".join(parts)
