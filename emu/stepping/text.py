"""A moment as text: one line a rank, a bar of its memory, and what is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu.trace.units import bytes_text, time_text

if TYPE_CHECKING:
    from emu.stepping.chunks import Walk
    from emu.stepping.moment import Moment, RankMoment

LETTERS = {
    "parameters": "P",
    "optimizer": "O",
    "gradients": "G",
    "activations": "A",
    "communication": "C",
    "temporary": "t",
}
BAR = 20  # letters of the fullest rank's bar
SIGNS = {"failed": "!", "next": ">", "waiting": "*", "ended": ".", "ready": " ", "not begun": " "}
MOST_RANKS = 32
MOST_LISTED = 12


def moment_text(moment: Moment) -> str:
    """What a stepper shows where it stands."""
    return state_text(moment.state())


def state_text(state: dict[str, Any]) -> str:
    """The same, from plain data."""
    known = f"{state['known']}" if state["ended"] else f"{state['known']} known so far"
    time = (
        "" if state["provisional_s"] is None else f"; {time_text(state['provisional_s'])} so far on {state['cluster']}"
    )
    time += " (provisional)" if time else ""
    mesh = " ".join(f"{axis}={size}" for axis, size in state["mesh"].items())
    lines = [f"step {state['index']} of {known}, {mesh}{time}"]
    if state["error"] is not None:
        lines.append(f"ended by {state['error']['kind']}: {state['error']['message']}")
    elif state["ended"]:
        lines.append("the program has ended")
    else:
        op = state["op"]
        code = f": {op['code']}" if op["code"] else ""
        lines.append(f"next: rank {op['rank']} {op_text(op)} ({op['line']}{code})")
    ranks = state["ranks"]
    fullest = max((sum(r["hbm"].values()) for r in ranks), default=0)
    rows = [_row(r, fullest) for r in _shown(ranks)]
    head = ("", "rank", "stands at", "last", "next, or waits in", "memory", "")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        lines.append(" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if len(ranks) > MOST_RANKS:
        lines.append(f"... and {len(ranks) - MOST_RANKS} more ranks: .rank(r) shows one")
    categories = {name for r in ranks for name, n in r["hbm"].items() if n}
    if categories:
        lines.append(
            "memory: " + ", ".join(f"{letter} {name}" for name, letter in LETTERS.items() if name in categories)
        )
    lines += _under_way(state)
    return "\n".join(lines)


def _shown(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first ranks, and the one that is next."""
    first = ranks[:MOST_RANKS]
    return first + [r for r in ranks[MOST_RANKS:] if r["state"] == "next"]


def _row(r: dict[str, Any], fullest: int) -> tuple[str, ...]:
    if r["state"] == "waiting":
        coming = f"waits in {r['waits_in']}"
    elif r["state"] == "ready" and r["next"] is None:
        coming = "can go on"
    elif r["state"] in ("failed", "ended", "not begun"):
        coming = r["state"]
    else:
        coming = op_text(r["next"]) if r["next"] else "..."
    last = op_text(r["last"], short=True) if r["last"] else "-"
    held = sum(r["hbm"].values())
    bar = bar_text(r["hbm"], fullest)
    return SIGNS[r["state"]], str(r["rank"]), r["line"] or "-", _cut(last, 24), _cut(coming, 44), bytes_text(held), bar


def bar_text(hbm: dict[str, int], fullest: int, width: int = BAR) -> str:
    """Memory by category as letters: "PPPPPGGA"; whatever lives has one letter at least."""
    if not fullest:
        return ""
    return "".join(
        letter * max(round(width * hbm.get(name, 0) / fullest), 1) for name, letter in LETTERS.items() if hbm.get(name)
    )


def op_text(op: dict[str, Any], short: bool = False) -> str:
    """ "mm float32[4, 6] float32[6, 8] (layers.0, forward)"."""
    if short:
        return op["label"]
    where = ", ".join(filter(None, (op["scope"], op["phase"])))
    return " ".join(filter(None, (op["label"], op["detail"], f"({where})" if where else "")))


def _under_way(state: dict[str, Any]) -> list[str]:
    lines = []
    for m in state["messages"]:
        waits = f"rank {m['dst'] if m['posted'] == 'send' else m['src']} has not posted its half"
        lines.append(f"message {m['src']}->{m['dst']} in {m['group']}, {bytes_text(m['bytes'])}: {waits}")
    for c in state["collectives"]:
        lines.append(
            f"{c['what']}, {bytes_text(c['bytes'])}: come {_ranks(c['come'])}, not yet {_ranks(c['waits_for'])}"
        )
    for r in state["ranks"]:
        for w in r["works"]:
            if not w["waits_for"]:
                lines.append(f"rank {r['rank']} has not waited for {w['what']} on stream {w['stream']}, which is done")
    if len(lines) > MOST_LISTED:
        lines[MOST_LISTED:] = [f"... and {len(lines) - MOST_LISTED} more under way"]
    return lines


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def rank_text(at: RankMoment) -> str:
    """One rank: where it stands, its streams, its memory, its works."""
    r = at.state()
    coords = " ".join(f"{axis}={i}" for axis, i in r["coords"].items())
    lines = [f"rank {r['rank']} ({coords}) before step {at.moment.index}: {r['state']}, {r['steps']} steps taken"]
    if r["line"]:
        lines.append(f"  stands at {r['line']}" + (f", after mark {r['mark']!r}" if r["mark"] else ""))
    if r["last"]:
        lines.append(f"  last: {op_text(r['last'])} ({r['last']['line']})")
    if r["state"] == "waiting":
        lines.append(f"  waits in {r['waits_in']}")
    elif r["next"] and r["state"] != "ended":
        lines.append(f"  next: {op_text(r['next'])} ({r['next']['line']})")
    held = ", ".join(f"{name} {bytes_text(n)}" for name, n in r["hbm"].items() if n) or "nothing"
    lines.append(f"  memory: {held}; at most {bytes_text(r['peak_bytes'])} so far")
    for s in r["streams"]:
        until = "" if s["until_s"] is None else f", busy until {time_text(s['until_s'])}"
        lines.append(f"  stream {s['name']}: {s['given']} given, the last {s['last']}{until}")
    for w in r["works"]:
        state = f"waits for ranks {_ranks(w['waits_for'])}" if w["waits_for"] else "done, and nobody has waited for it"
        lines.append(f"  under way: {w['what']} on stream {w['stream']}: {state}")
    return "\n".join(lines)


def walk_text(walk: Walk) -> str:
    """A collective chunk by chunk: who sends what, and what everyone holds after each hop."""
    lines = [f"{walk.what} by {walk.algorithm}: {len(walk.given)} ranks, chunks of {', '.join(map(str, walk.cuts))}"]
    lines += [f"  rank {rank} gives {_numbers(x)}" for rank, x in walk.given.items()]
    for hop in walk.hops:
        at = "" if hop.times_s is None else f" ({time_text(hop.times_s[0])} to {time_text(hop.times_s[1])})"
        lines.append(f"hop {hop.number}{at}: {hop.says}")
        lines += [
            f"  {m.src} -> {m.dst}: chunk {m.chunk} {_numbers(m.values)}, to {'add' if m.does == 'add' else 'keep'}"
            for m in hop.moves
        ]
        lines += [f"  rank {rank} holds {_numbers(x)}" for rank, x in hop.held.items()]
    return "\n".join(lines)


def _numbers(x: Any, most: int = 12) -> str:
    flat = x.reshape(-1)
    shown = " ".join(f"{v:.6g}" for v in flat[:most].tolist())
    return f"[{shown}{' ...' if flat.numel() > most else ''}]"
