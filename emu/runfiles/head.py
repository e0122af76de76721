"""The first part of a saved run, run.json: what ran where. Every field of it is checked before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from emu.cost import LAUNCH_MODES
from emu.runfiles.errors import Refused, quoted
from emu.trace.events import CATEGORIES

FORMAT = "emu run 1"
MOST_RANKS = 1 << 20  # of a mesh: more than any machine has, and few enough to list
MOST_BYTES = (1 << 63) - 1  # what other programs' numbers hold
MOST_HELD = MOST_BYTES // len(CATEGORIES)  # of each kind of memory, so that all together are no more
NAME = 200  # characters of a cluster's name
NEEDED = ("format", "axes", "folds", "cluster", "nodes", "launch_mode", "results")
OTHERS = ("cluster_digest", "no_memory", "held", "held_by_host", "standing")  # files of earlier versions lack some
FOLDS = ("ep", "etp")
NOT_AXES = ("on", "self", "edp")  # words of Mesh(...) that are no axes


@dataclass(frozen=True)
class Head:
    """What run.json says.

    Args:
        axes, folds: of the mesh.
        cluster, nodes: what it ran on, by name; digest: of its numbers, None if the file has none.
        launch_mode, no_memory: of the run.
        held, held_by_host: by rank, what lived when the record began.
        counts, levels: for how many ranks each one stands that ran, and on what cluster; None if each for itself.
        results: as emu.real.results encodes them, not yet looked at.
    """

    axes: Mapping[str, int]
    folds: Mapping[str, int]
    cluster: str
    nodes: int
    digest: str | None
    launch_mode: str
    no_memory: str | None
    held: Mapping[int, Mapping[str, int]]
    held_by_host: Mapping[int, int]
    counts: Mapping[int, int] | None
    levels: tuple[int, ...]
    results: Any

    @classmethod
    def of(cls, data: bytes, no_memory: Iterable[str]) -> Head:
        """What the text says.

        Args:
            no_memory: the reasons that there are for having no record of memory.

        Raises:
            Refused: no JSON, or not what a head says; names the field.
        """
        head = _table("", _parsed(data))
        for key in (*NEEDED, *head):
            if key not in head:
                raise Refused("run.json", f"it does not say {key!r}")
            if key not in NEEDED and key not in OTHERS:
                raise Refused("run.json", f"it says {quoted(key)}, which no run has")
        if head["format"] != FORMAT:
            known = f"read it with the emu that wrote it; this one reads {FORMAT!r}"
            raise Refused("run.json", f"its format is {quoted(head['format'])}", known)
        axes = _sizes("axes", head["axes"], _axis, 1)
        folds = _sizes("folds", head["folds"], lambda fold: fold if fold in FOLDS else None, 1)
        ranks = 1
        for size in axes.values():
            ranks *= size
            if ranks > MOST_RANKS:
                raise Refused(
                    "run.json", f"its mesh has {ranks:,} ranks or more; emu reads runs of up to {MOST_RANKS:,}"
                )
        rank = _rank_below(ranks)
        standing = _table("standing", head["standing"], ("counts", "levels")) if "standing" in head else None
        return cls(
            axes,
            folds,
            _text("cluster", head["cluster"], NAME),
            _whole("nodes", head["nodes"], 1, MOST_RANKS),
            None if head.get("cluster_digest") is None else _text("cluster_digest", head["cluster_digest"], NAME),
            _one_of("launch_mode", head["launch_mode"], LAUNCH_MODES),
            None if head.get("no_memory") is None else _one_of("no_memory", head["no_memory"], no_memory),
            {r: _held(f"held of rank {r}", said) for r, said in _by("held", head.get("held", {}), rank).items()},
            _sizes("held_by_host", head.get("held_by_host", {}), rank, 0),
            None if standing is None else _sizes("standing.counts", standing["counts"], rank, 1),
            () if standing is None else _levels(standing["levels"]),
            head["results"],
        )


def _parsed(data: bytes) -> Any:
    """Strict JSON: nothing said twice, no NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise Refused("run.json", f"it says {quoted(name)} twice")
            made[name] = value
        return made

    def none(text: str) -> Any:
        raise Refused("run.json", f"{text} is no number")

    try:
        return json.loads(data.decode("ascii"), object_pairs_hook=once, parse_constant=none)
    except RecursionError:
        raise Refused("run.json", "it is nested too deeply") from None
    except Refused:
        raise
    except ValueError as error:
        raise Refused("run.json", f"it is no JSON: {error}") from None


def _table(field: str, said: Any, keys: Iterable[str] | None = None) -> dict[str, Any]:
    if type(said) is not dict or (keys is not None and {*said} != {*keys}):
        what = "a table" if keys is None else f"a table of {' and '.join(keys)}"
        raise Refused("run.json", f"{field or 'it'} is {quoted(said)}, not {what}")
    return said


def _by(field: str, said: Any, key: Callable[[str], Any]) -> dict[Any, Any]:
    """A table with its keys as what they stand for."""
    made = {key(name): value for name, value in _table(field, said).items()}
    if None in made or len(made) < len(said):
        wrong = next((name for name in said if key(name) is None), "")
        raise Refused("run.json", f"{field} names {quoted(wrong)}, which the run does not have")
    return made


def _sizes(field: str, said: Any, key: Callable[[str], Any], least: int, most: int = MOST_BYTES) -> dict[Any, int]:
    return {name: _whole(f"{field}[{quoted(name)}]", n, least, most) for name, n in _by(field, said, key).items()}


def _axis(name: str) -> str | None:
    return None if name in (*NOT_AXES, *FOLDS) else name


def _rank_below(ranks: int) -> Callable[[str], int | None]:
    def rank(name: str) -> int | None:
        """As it is written: "7", never "07" or "７"."""
        number = int(name) if name.isascii() and name.isdigit() and len(name) <= len(str(MOST_RANKS)) else ranks
        return number if number < ranks and str(number) == name else None

    return rank


def _held(field: str, said: Any) -> dict[str, int]:
    return _sizes(field, said, lambda name: name if name in CATEGORIES else None, 0, MOST_HELD)


def _levels(said: Any) -> tuple[int, ...]:
    if type(said) is not list:
        raise Refused("run.json", f"standing.levels is {quoted(said)}, not a list")
    return tuple(_whole("standing.levels", level, 1) for level in said)


def _whole(field: str, said: Any, least: int, most: int = MOST_BYTES) -> int:
    if type(said) is not int or not least <= said <= most:
        raise Refused("run.json", f"{field} is {quoted(said)}, not a whole number from {least} to {most:,}")
    return said


def _text(field: str, said: Any, most: int) -> str:
    if type(said) is not str or len(said) > most:
        raise Refused("run.json", f"{field} is {quoted(said)}, not a text of up to {most} characters")
    return said


def _one_of(field: str, said: Any, known: Iterable[str]) -> str:
    if type(said) is not str or said not in known:
        raise Refused("run.json", f"{field} is {quoted(said)}, not one of {', '.join(known)}")
    return said
