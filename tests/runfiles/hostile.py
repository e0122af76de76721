"""Saved runs as a stranger might make them: a good one, its parts changed, packed again as a zip that is whole."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

import emu
from emu.runfiles.archive import PARTS, pack

HEAD, TRACE, RESULTS = PARTS


def program(rank):
    """A little of everything that a record has."""
    dp = rank.group("dp")
    rank.mark("step 0")
    x = torch.ones(8, 8) @ torch.ones(8, 8)
    work = dp.all_reduce(x, async_op=True)
    y = torch.ones(4) * 2
    work.wait()
    out = torch.empty(4)
    if int(rank):
        dp.recv(out, 0)
    else:
        dp.send(y, 1)
    sizes = [2, 1] if int(rank) else [1, 2]
    dp.all_to_all(torch.ones(3), send_sizes=sizes, recv_sizes=sizes)
    total = dp.reduce(torch.ones(2), root=1).sum().item()
    rank.mark("end")
    return {"x": x, "n": [total, 3, None, True, "text"], "empty": torch.ones(0, 2)}


def saved(path: Path) -> dict[str, bytes]:
    """The parts of a good one."""
    emu.launch(program, emu.Mesh(dp=2), uses=True).save(path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts: Mapping[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", how) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return blob.getvalue()


def with_head(parts: Mapping[str, bytes], **said: Any) -> bytes:
    return packed({**parts, HEAD: json.dumps(json.loads(parts[HEAD]) | said).encode()})


def with_events(parts: Mapping[str, bytes], *lines: list[Any], axes: Any = None, rank: int = 0) -> bytes:
    """A run of which one rank has these events alone, and the others none."""
    head = json.loads(parts[HEAD])
    axes = head["axes"] if axes is None else axes
    top = {"emu_trace": 1, "axes": [*map(list, axes.items())], "ranks": [[rank, len(lines)]]}
    text = "\n".join(map(json.dumps, [top, *lines])) + "\n"
    more = {"axes": axes, "results": {"dict": []}}
    return pack({HEAD: json.dumps(head | more).encode(), TRACE: text.encode(), RESULTS: save({})})


NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 10**12, 10**30, -(2**63)]))
TEXTS = st.sampled_from(
    (
        *(
            "",
            "0",
            "../../etc/passwd",
            "/dev/zero",
            "\0",
            "\ud800",
            "<b>",
            "\x1b[31m",
            "dp",
            "event 7",
            "side",
            "all_gather",
        ),
        *(
            "float64",
            "bfloat16",
            "optimizer",
            "recompute",
            "attention_backward",
            "tree",
            "recv",
            "parameters",
            "from_host",
        ),
    )
)
# Values of every kind where another should be.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    TEXTS,
    st.sampled_from([0.5, -0.0, float("inf"), float("nan")]),
    st.sampled_from(
        [[], {}, [[]], {"list": []}, {"tensor": ["float32", [2]]}, {"meta": ["load", [1]]}, [0, 1], [0, 99]]
    ),
)


@st.composite
def changed(draw: Any, value: Any) -> Any:
    """The value with something in it exchanged, taken out, said twice or added, at any depth."""
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        i = draw(st.integers(0, len(value) - 1))
        what = draw(st.sampled_from(("inside", "inside", "inside", "gone", "twice", "swap")))
        if what == "inside":
            return [*value[:i], draw(changed(value[i])), *value[i + 1 :]]
        if what == "gone":
            return [*value[:i], *value[i + 1 :]]
        if what == "twice":
            return [*value[: i + 1], *value[i:]]
        j = draw(st.integers(0, len(value) - 1))
        other = list(value)
        other[i], other[j] = other[j], other[i]
        return other
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        what = draw(st.sampled_from(("inside", "inside", "inside", "gone", "name")))
        rest = {k: v for k, v in value.items() if k != key}
        if what == "inside":
            return {**value, key: draw(changed(value[key]))}
        return rest if what == "gone" else {**rest, draw(st.sampled_from(["", "x", "on", "9", "-1"])): value[key]}
    if type(value) in (int, str) and draw(st.integers(0, 9)):  # one that may well do
        return draw(TEXTS) if type(value) is str else draw(st.one_of(NUMBERS, st.just(value + 1), st.just(2 * value)))
    return draw(VALUES)


@st.composite
def altered(draw: Any, parts: Mapping[str, bytes]) -> bytes:
    """A whole zip in which something of the head or the trace is not as it was."""
    head = json.loads(parts[HEAD])
    top, *events = map(json.loads, parts[TRACE].decode().splitlines())
    for _ in range(draw(st.integers(1, 3))):
        what = draw(st.sampled_from(("head", "top", "event", "event", "event", "events")))
        if what == "head":
            head = draw(changed(head))
        elif what == "top":
            top = draw(changed(top))
        elif what == "event" and events:
            i = draw(st.integers(0, len(events) - 1))
            events[i] = draw(changed(events[i]))
        elif events:
            events = draw(changed(events)) or []
            events = events if isinstance(events, list) else [events]
    if (
        draw(st.booleans()) and isinstance(top, dict) and _counts(top)
    ):  # let the header agree, so that more is looked at
        ranks = top["ranks"]
        ranks[-1][1] = max(len(events) - sum(n for _, n in ranks[:-1]), 0)
    text = "".join(json.dumps(line) + "\n" for line in (top, *events))
    return packed({**parts, HEAD: json.dumps(head).encode(), TRACE: text.encode()})


def _counts(top: dict[str, Any]) -> bool:
    ranks = top.get("ranks")
    return (
        isinstance(ranks, list)
        and bool(ranks)
        and all(type(p) is list and len(p) == 2 and type(p[1]) is int for p in ranks)
    )


__all__ = ["HEAD", "RESULTS", "TRACE", "altered", "packed", "program", "saved", "with_events", "with_head"]
