"""What of a package is public, for sphinx.ext.autodoc: its names, each documented where it is called by."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from types import ModuleType
from typing import Any

from building.markdown import code, table

# Packages that have a page, the one that is preferred for a name first.
PACKAGES = (
    "emu",
    "emu.spmd",
    "emu.parallel",
    "emu.parallel.pipeline",
    "emu.parallel.tensor",
    "emu.models",
    "emu.hardware",
    "emu.cost",
    "emu.simulation",
    "emu.equivalence",
    "emu.stepping",
    "emu.testing",
    "emu.clinic",
    "emu.view",
    "emu.canvas",
    "emu.export",
)
# Modules that programs and lessons reach into, and the page of each.
MORE = {
    "parallel": (
        *("emu.parallel.checkpointing", "emu.parallel.context", "emu.parallel.expert", "emu.parallel.attention.flash"),
        *("emu.parallel.attention.tiles", "emu.parallel.attention.traffic"),
    ),
    "models": ("emu.models.huggingface",),
    "cost": ("emu.cost.collectives", "emu.cost.prices", "emu.cost.moe"),
    "records": ("emu.trace.events", "emu.trace.compare", "emu.trace.trace", "emu.trace.memory"),
    "view": ("emu.view.roofline", "emu.view.units", "emu.view.validated"),
    "validate": ("emu.validate.reading", "emu.validate.report"),
}


@cache
def home() -> dict[int, str]:
    """Identity of every public object -> the dotted name under which it is documented."""
    found: dict[int, str] = {}
    for package in (*PACKAGES, *(name for names in MORE.values() for name in names)):
        module = importlib.import_module(package)
        named = {name: getattr(module, name) for name in public(module)}
        own = [name for name, value in named.items() if getattr(value, "__name__", "") == name]
        for name in (*own, *named):  # one that has two names here is described under its own
            found.setdefault(id(named[name]), f"{package}.{name}")
    return found


def public(module: ModuleType) -> list[str]:
    """Names that a module offers: those of `__all__`, else its own functions and classes that say what they do."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [(name, value) for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [
        name
        for name, value in own
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value)) and value.__doc__
    ]


def more(page: str) -> str:
    """Modules of `MORE`, a section each: what they say of themselves, and what of theirs is described nowhere else."""
    parts = []
    for name in MORE[page]:
        module = importlib.import_module(name)
        lines = [f".. automodule:: {name}", "   :no-members:", ""]
        for each in sorted(public(module), key=str.lower):
            value, full = getattr(module, each), f"{name}.{each}"
            if home()[id(value)] == full and (inspect.isclass(value) or inspect.isroutine(value)):
                lines += _documented("autoclass" if inspect.isclass(value) else "autofunction", full)
        parts += [f"## `{name}`", _eval_rst(lines)]
    return "\n\n".join(parts) + "\n"


def package(name: str) -> str:
    """Everything that a package offers: its docstring, then classes, errors, functions, modules and values.

    A name that has its home in another package's page is named there, and only mentioned here.
    """
    module = importlib.import_module(name)
    groups: dict[str, list[str]] = {}
    elsewhere, values = [], []
    for each in sorted(module.__all__, key=str.lower):
        value, full = getattr(module, each), f"{name}.{each}"
        at = home()[id(value)]
        if inspect.ismodule(value):
            elsewhere.append(f"`{full}`")
        elif not (inspect.isclass(value) or inspect.isroutine(value)):
            values.append((code(full), code(_shown(value))))
        elif at != full:
            elsewhere.append(f"{{py:obj}}`{full} <{at}>`")
        else:
            groups.setdefault(_group(value), []).append(full)
    parts = [_eval_rst([f".. automodule:: {name}", "   :no-members:"])]
    for title in ("Classes", "Functions", "Errors"):
        if title in groups:
            directive = "autofunction" if title == "Functions" else "autoclass"
            lines = [line for full in groups[title] for line in _documented(directive, full)]
            parts += [f"## {title}", _eval_rst(lines)]
    if values:
        parts += ["## Values", table(("name", "value"), values)]
    if elsewhere:
        parts += ["## Also here", f"The same objects, described on other pages: {', '.join(elsewhere)}."]
    return "\n\n".join(parts) + "\n"


def modules(names: str) -> str:
    """What the docstrings of some modules say at their top, one after the other."""
    rows = []
    for name in names.split():
        rows.append(f"### `{name}`\n\n{_eval_rst([f'.. automodule:: {name}', '   :no-members:', '   :no-index:'])}")
    return "\n\n".join(rows) + "\n"


def members(cls: type) -> list[str]:
    """Public methods and properties of a class that say what they do, its own and those of emu that it inherits."""
    found = []
    for base in cls.__mro__:
        if not base.__module__.startswith("emu"):
            continue
        for name, value in vars(base).items():
            wrapped = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
            public = (not name.startswith("_") or name == "__call__") and name not in found
            if public and getattr(wrapped, "__doc__", None) and inspect.isroutine(wrapped):
                found.append(name)
    return found


def _documented(directive: str, full: str) -> list[str]:
    lines = [f".. {directive}:: {full}"]
    if directive == "autoclass":
        package_name, _, name = full.rpartition(".")
        cls = getattr(importlib.import_module(package_name), name)
        lines += [f"   :members: {', '.join(members(cls))}"] if members(cls) else ["   :no-members:"]
        if inspect.getdoc(cls) is None:
            lines += ["   :undoc-members:"]
    return [*lines, ""]


def _group(value: Any) -> str:
    if inspect.isclass(value):
        return "Errors" if issubclass(value, BaseException) else "Classes"
    return "Functions"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(map(str, value))
    return str(value) if not isinstance(value, ModuleType) else value.__name__


def _eval_rst(lines: list[str]) -> str:
    return "\n".join(["```{eval-rst}", *lines, "```"])
