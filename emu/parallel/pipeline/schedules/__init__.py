"""Every schedule by its name. Each is a generator: (rank, ranks, microbatches, chunks) -> that rank's actions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from emu.parallel.pipeline.actions import Action
from emu.parallel.pipeline.schedule import Generator, Schedule
from emu.parallel.pipeline.schedules.auto import auto
from emu.parallel.pipeline.schedules.dualpipe import dualpipe
from emu.parallel.pipeline.schedules.dualpipe_v import dualpipe_v
from emu.parallel.pipeline.schedules.gpipe import gpipe
from emu.parallel.pipeline.schedules.interleaved import interleaved
from emu.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from emu.parallel.pipeline.schedules.v_half import v_half
from emu.parallel.pipeline.schedules.v_min import v_min
from emu.parallel.pipeline.schedules.zb_h1 import zb_h1
from emu.parallel.pipeline.schedules.zb_h2 import zb_h2
from emu.parallel.pipeline.schedules.zb_v import zb_v
from emu.spmd import PlanError

SCHEDULES: dict[str, Generator] = {  # a schedule is one file, one import and one line here
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "auto": auto,
}


def make(name: str | Generator, ranks: int, microbatches: int, chunks: int = 1, **options: Any) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of SCHEDULES; or a generator of your own.
        ranks: how many share the model out.
        microbatches: into how many parts the batch is cut.
        chunks: stages a rank holds; 1 is what a schedule has by nature (two for those in the shape of a V).
        options: what this schedule has besides, by name: `count` of interleaved.

    Raises:
        PlanError: no such schedule or option, or sizes that this schedule cannot do. Fields: field, value, nearest.
        EmuError: a generator of your own yielded something else than actions.
    """
    generator, label = _found(name)
    asked = (generator, label, ranks, microbatches, chunks, tuple(sorted(options.items())))
    try:
        hash(asked)
    except TypeError:  # an option that is a list is no reason to fail
        return _make(*asked)
    if callable(name):  # who knows what a generator of one's own looks at
        return _make(*asked)
    return _cached(*asked, tuple(type(value) for _, value in asked[-1]))


def _make(generator: Generator, name: str, ranks: int, microbatches: int, chunks: int, options: tuple) -> Schedule:
    known = _options(generator) if options else []
    for what, value in options:
        if what not in known and "**" not in known:
            raise PlanError(
                f"{name} has no option {what}={value!r}",
                f"its options are {', '.join(known)}" if known else "leave it out: it has no options",
                field=what,
                value=value,
            )

    def chosen(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
        return generator(rank, ranks, microbatches, chunks, **dict(options))

    chosen.__name__ = name
    return Schedule.of(chosen, ranks, microbatches, chunks)


@lru_cache(maxsize=32, typed=True)
def _cached(
    generator: Generator, name: str, ranks: int, microbatches: int, chunks: int, options: tuple, kinds: tuple
) -> Schedule:
    """As `_make`, with the options' types: memory=True equals memory=1 and is none."""
    return _make(generator, name, ranks, microbatches, chunks, options)


def _options(generator: Generator) -> list[str]:
    """What a generator takes beyond rank, ranks, microbatches, chunks; "**" where it takes anything."""
    parameters = list(inspect.signature(generator).parameters.values())[4:]
    return ["**" if p.kind is inspect.Parameter.VAR_KEYWORD else p.name for p in parameters]


def _found(name: str | Generator) -> tuple[Generator, str]:
    """A generator, and what it is called."""
    if callable(name):
        return name, getattr(name, "__name__", "a schedule").replace("_", "-")
    if isinstance(name, str) and name in SCHEDULES:
        return SCHEDULES[name], name
    close = get_close_matches(str(name).lower().replace("_", "-"), SCHEDULES, 1, 0.5)
    raise PlanError(
        f"there is no schedule {name!r:.60}",
        (f"did you mean {close[0]}? " if close else "") + f"schedules are {', '.join(SCHEDULES)}",
        field="schedule",
        value=name,
        nearest=close[0] if close else None,
    )
